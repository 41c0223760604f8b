"""Files, inputs and metrics of classification, against Megatron's rules and counts by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec, bert
from mega_schema.task_heads import add_task_head
from mega_schema.tasks.best_checkpoint import BestCheckpoint, find_best_folder, read_best, write_best
from mega_schema.tasks.class_metrics import class_metrics, f1_of_class
from mega_schema.tasks.class_predictions import ClassPredictions
from mega_schema.tasks.labelled_files import read_labelled
from mega_schema.tasks.pair_examples import PairExample, clean_text, read_mnli, read_qqp
from mega_schema.tasks.pair_features import (
    IGNORED,
    LABEL,
    QUESTION_TOKENS,
    REAL,
    TOKEN,
    TYPE,
    EncodedExamples,
    SpecialIds,
    join_pair,
    split_rows,
)
from mega_schema.tasks.pair_tasks import choose_labels
from mega_schema.tasks.race_examples import ChoiceExample, read_race
from mega_schema.tasks.squad_examples import read_squad
from tests.shared_data import SHARED

SPECIAL = SpecialIds(1, 2, 0)


def test_a_pair_is_joined_and_cut_as_in_megatron() -> None:
    assert join_pair([5, 6], [7, 8], SPECIAL, 9) == ([1, 5, 6, 2, 7, 8, 2], [0, 0, 0, 0, 1, 1, 1])
    assert join_pair([5, 6], None, SPECIAL, 9) == ([1, 5, 6, 2], [0, 0, 0, 0])
    # the second text loses its end; the last [SEP] stays
    assert join_pair([5, 6], [7, 8, 9], SPECIAL, 6) == ([1, 5, 6, 2, 7, 2], [0, 0, 0, 0, 1, 1])
    # a first text that fills the sample loses its own end, and the second disappears
    assert join_pair([5, 6, 7, 8], [9], SPECIAL, 4) == ([1, 5, 6, 2], [0, 0, 0, 1])
    # Megatron also cuts a row that fits exactly
    assert join_pair([5, 6], None, SPECIAL, 4) == ([1, 5, 6, 2], [0, 0, 0, 0])


def test_texts_are_cleaned_as_in_megatron() -> None:
    assert clean_text("a\n b\t\tc") == "a b c"
    assert clean_text("one . two . three .") == "one. two. three ."
    assert clean_text("a . . . b") == "a. .. b"


def test_glue_files_of_mnli_are_read() -> None:
    folder = SHARED / "data/eval/mnli-sample"
    if not folder.is_dir():
        pytest.skip("shared data")
    (train,) = read_mnli(folder / "train.tsv")
    assert (train.id, train.label) == ("0", "neutral")
    assert train.first.startswith("Conceptually cream skimming has two basic dimensions")
    assert train.second == "Product and geography are what make cream skimming work. "
    (test,) = read_mnli(folder / "test_matched.tsv")
    assert test.label is None


def _write(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return path


def test_qqp_leaves_out_rows_without_all_columns(tmp_path: Path) -> None:
    header = "\t".join(["id", "qid1", "qid2", "question1", "question2", "is_duplicate"])
    rows = ["7\t1\t2\twho  is it ?\twhat\t1", "8\t1\t2\tcut", "9\t1\t2\t\tempty\t0", '3\t1\t2\t"a\tb"\t0']
    examples, skipped = read_qqp(_write(tmp_path / "dev.tsv", header, *rows))
    assert [(e.id, e.first, e.second, e.label) for e in examples] == [
        ("7", "who is it ?", "what", "1"),
        ("3", '"a', 'b"', "0"),
    ]
    assert skipped == 2
    (test,), _ = read_qqp(_write(tmp_path / "test.tsv", "id\tquestion1\tquestion2", "4\ta\tb"))
    assert (test.id, test.first, test.second, test.label) == ("4", "a", "b", None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a\tb", "c\td"], ": has too few columns for MNLI: found 2 columns, wanted 10 of a test set"),
        (["\t".join("abcdefghijk")], ": contains no example: found 1 lines, wanted a line of names"),
        (
            ["\t".join("abcdefghijk"), "\t".join("abcdefghij")],
            ":2: another number of columns than the first line: found 10, wanted 11",
        ),
        (
            ["\t".join("abcdefghijk"), "\t".join("abcdefghijk")],
            ":2: unknown label: found k, wanted contradiction | entailment | neutral",
        ),
    ],
)
def test_wrong_files_of_mnli_are_one_line(tmp_path: Path, rows: list[str], message: str) -> None:
    path = _write(tmp_path / "dev.tsv", *rows)
    with pytest.raises(FormatError) as caught:
        read_mnli(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_tables_and_compressed_lines_are_read(tmp_path: Path) -> None:
    table = _write(tmp_path / "a.csv", "text,label", '"one, two",x', "three,y")
    assert [(e.first, e.label) for e in read_labelled(table, ["text"], "label")] == [
        ("one, two", "x"),
        ("three", "y"),
    ]
    lines = tmp_path / "a.jsonl.gz"
    with gzip.open(lines, "wt") as file:
        file.write('{"id": 4, "q": "a", "p": "b", "answer": true}\n')
    (example,) = read_labelled(lines, ["q", "p"], "answer")
    assert (example.id, example.first, example.second, example.label) == ("4", "a", "b", "true")
    with pytest.raises(FormatError, match="another number of columns than the first line"):
        read_labelled(_write(tmp_path / "b.csv", "text,label", "one"), ["text"], "label")
    with pytest.raises(FormatError, match=":1: names a column twice: found text"):
        read_labelled(_write(tmp_path / "c.csv", "text,text,label", "a,b,c"), ["text"], "label")
    with pytest.raises(FormatError, match="format not known: found .txt"):
        read_labelled(_write(tmp_path / "a.txt", "one"), ["text"], "label")
    with pytest.raises(FormatError, match="cannot be read"):
        read_labelled(tmp_path / "absent.jsonl", ["text"], "label")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no", "is damaged: found Not a gzipped file"),
        (gzip.compress(b"x" * 99)[:-9], "is damaged: found Compressed file ended before"),
        (gzip.compress(b"x" * 99)[:10] + b"\xff" * 40, "is damaged: found Error -3"),
        (gzip.compress(b"\xff\xfe"), "is not text in UTF-8: found 'utf-8' codec can't decode"),
    ],
)
@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz", "a.json.gz"])
def test_a_file_that_cannot_be_unpacked_is_one_line(
    tmp_path: Path, content: bytes, message: str, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read_squad(path) if name == "a.json.gz" else read_labelled(path, ["text"], "label")
    assert str(caught.value).startswith(f"{path}: {message}")


def test_passages_of_race_are_read_as_in_megatron(tmp_path: Path) -> None:
    passage = {
        "article": "One\nday .  He",
        "questions": ["He _ home .", "Why?"],
        "options": [["goes", "is", "a", "b"], ["c", "d", "e", "f"]],
        "answers": ["B", "D"],
    }
    (tmp_path / "middle").mkdir()
    _write(tmp_path / "middle/7.txt", json.dumps(passage))
    first, second = read_race(tmp_path)
    assert (first.id, first.label, first.article) == ("middle/7-1", "B", "One day. He")
    assert first.choices == ("He goes home .", "He is home .", "He a home .", "He b home .")
    assert (second.label, second.choices[3]) == ("D", "Why? f")
    for change, message in (
        ({"answers": ["B", "E"]}, "unknown label: found E, wanted A | B | C | D"),
        ({"answers": ["B"]}, "questions, options and answers differ in number: found 2, 2 and 1"),
        ({"options": [["x"], ["y"]]}, "a question does not have four options: found ['x']"),
        ({"article": 3}, "no text under 'article'"),
        ({"questions": "Why?"}, "no list under 'questions'"),
    ):
        path = _write(tmp_path / "middle/7.txt", json.dumps(passage | change))
        with pytest.raises(FormatError) as caught:
            read_race(tmp_path)
        assert str(caught.value).startswith(f"{path}:1: {message}")
    with pytest.raises(FormatError, match="contains no passages of RACE: found no such folder"):
        read_race(tmp_path / "absent")


class _Letters:
    """A tokenizer of letters whose special tokens are the first ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[10 + ord(letter) - ord("a") for letter in text] for text in texts]


def test_choices_are_rows_of_a_sample_and_questions_are_cut() -> None:
    choice = ChoiceExample("1", "xyz", ("a", "b" * 200), "B", "f:1")
    samples = EncodedExamples([choice], _Letters(), SPECIAL, 136, ("A", "B"))
    assert (len(samples), samples.rows, samples.token_counts.tolist()) == (1, 2, [134])
    first, second = split_rows(samples[0][None], 2)
    assert first[TOKEN, :8].tolist() == [1, 10, 2, 33, 34, 35, 2, 0]
    assert first[TYPE, :8].tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    assert first[REAL].sum() == 7
    assert (first[LABEL, 0], set(first[LABEL, 1:].tolist())) == (1, {IGNORED})
    assert second[REAL].sum() == 1 + QUESTION_TOKENS + 1 + 3 + 1
    assert second[TOKEN, 129:134].tolist() == [2, 33, 34, 35, 2]


def test_metrics_are_those_by_hand() -> None:
    label = np.array([0, 0, 1, 1, 1, 2])
    prediction = np.array([0, 1, 1, 1, 0, 1])
    assert f1_of_class(label, prediction, 0) == 2 * 1 / (2 * 1 + 1 + 1)
    assert f1_of_class(label, prediction, 1) == 2 * 2 / (2 * 2 + 2 + 1)
    assert f1_of_class(label, prediction, 2) == 0
    assert f1_of_class(label, prediction, 3) == 0
    macro = (0.5 + 4 / 7 + 0) / 3
    assert class_metrics(label, prediction, 4, binary=False) == {
        "accuracy": 0.5,
        "macro_f1": pytest.approx(macro),
    }
    assert class_metrics(label, prediction, 4, binary=True) == {"accuracy": 0.5, "f1": pytest.approx(4 / 7)}


def test_predictions_have_probabilities_and_the_loss_of_the_labels() -> None:
    examples = [PairExample(str(i), "a", None, label, "f:1") for i, label in enumerate("xy")]
    predictions = ClassPredictions(examples, ("x", "y"), np.array([[0.0, np.log(3)], [0.0, np.log(3)]]))
    assert predictions.loss == pytest.approx(-(np.log(0.25) + np.log(0.75)) / 2)
    rows = list(predictions.rows())
    assert rows[0] == {
        "id": "0",
        "label": "x",
        "prediction": "y",
        "probabilities": {"x": 0.25, "y": 0.75},
    }


def test_classes_are_those_of_the_task_given_or_of_the_data() -> None:
    examples = [PairExample("1", "a", None, label, "f:1") for label in "bca"]
    assert choose_labels("CLASSIFY", (), examples) == ("a", "b", "c")
    assert choose_labels("CLASSIFY", ("c", "a"), examples) == ("c", "a")
    assert choose_labels("QQP", (), examples) == ("0", "1")
    with pytest.raises(ConfigError, match="--labels: MNLI has its own: found a b; hint: leave it out"):
        choose_labels("MNLI", ("a", "b"), examples)


def test_the_head_of_a_task_excludes_those_of_pretraining() -> None:
    base = bert(layers=1, hidden=8, heads=2, vocab=20, max_seq_len=8)
    spec = add_task_head(base, "classification", ("a", "b"))
    assert ModelSpec.from_dict(spec.to_dict() | {"labels": ["a", "b"]}) == spec
    for change, message in (
        ({"labels": ["a"]}, "model.labels: are too few to choose from: found ['a'], wanted 2 or more"),
        ({"labels": ["a", "a"]}, "model.labels: are not different names: found ['a', 'a']"),
        ({"task_head": "none"}, "model.labels: need model.task_head: found ['a', 'b'], wanted none"),
        ({"head_bias": True}, "model.head_bias: does not fit model.task_head: found True, wanted False"),
        (
            {"task_head": "rank"},
            "model.task_head: unknown: found rank, wanted none | classification | multiple_choice | span | "
            "token_classification",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            ModelSpec.from_dict(spec.to_dict() | change)
        assert str(caught.value) == message


def test_the_best_checkpoint_is_found_while_it_exists(tmp_path: Path) -> None:
    assert find_best_folder(tmp_path) == tmp_path
    write_best(tmp_path, BestCheckpoint(20, 2, "accuracy", 0.75))
    assert find_best_folder(tmp_path) == tmp_path
    (tmp_path / "iter_0000020").mkdir()
    assert find_best_folder(tmp_path) == tmp_path / "iter_0000020"
    (tmp_path / "best_checkpoint.json").write_text('{"iteration": "20"}')
    with pytest.raises(FormatError, match="is not the record of a best epoch"):
        read_best(tmp_path)
