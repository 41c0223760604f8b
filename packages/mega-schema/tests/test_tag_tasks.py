"""Files, samples and metrics of words with tags; entities as conlleval finds them, written again."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from mega_schema.errors import ConfigError, FormatError
from mega_schema.tasks.pair_features import IGNORED, LABEL, REAL, TOKEN, SpecialIds
from mega_schema.tasks.tag_examples import TagExample, choose_tags, read_tags
from mega_schema.tasks.tag_features import EncodedTags
from mega_schema.tasks.tag_predictions import TagPredictions, are_entity_tags, find_entities
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "eu", "rej", "##ects", "german", "call"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", "utf-8")
    return open_tokenizer("BertWordPieceLowerCase", vocab_file=path)


def test_the_first_token_of_a_word_has_its_label(tokenizer: Tokenizer) -> None:
    words, tags = ("EU", "rejects", "German", "call"), ("B-ORG", "O", "B-MISC", "O")
    special = SpecialIds.from_tokenizer(tokenizer)
    samples = EncodedTags([TagExample("1", words, tags, "")], tokenizer, special, 9, ("B-MISC", "B-ORG", "O"))
    sample = samples[0]
    assert [PIECES[i] for i in sample[TOKEN]] == [
        *("[CLS]", "eu", "rej", "##ects", "german", "call", "[SEP]", "[PAD]", "[PAD]")
    ]
    assert sample[LABEL].tolist() == [IGNORED, 1, 2, IGNORED, 0, 2, IGNORED, IGNORED, IGNORED]
    assert sample[REAL].tolist() == [1] * 7 + [0] * 2
    assert samples.words_cut == 0


def test_words_that_do_not_fit_are_cut_and_counted(tokenizer: Tokenizer) -> None:
    special = SpecialIds.from_tokenizer(tokenizer)
    example = TagExample("1", ("EU", "rejects", "German", "call"), ("A", "B", "A", "B"), "")
    samples = EncodedTags([example], tokenizer, special, 4, ("A", "B"))
    assert [PIECES[i] for i in samples[0][TOKEN]] == ["[CLS]", "eu", "rej", "[SEP]"]
    assert samples[0][LABEL].tolist() == [IGNORED, 0, 1, IGNORED]
    assert samples.words_cut == 2
    assert (samples.filler()[LABEL] == IGNORED).all()


def _conlleval(tags: list[str]) -> set[tuple[str, int, int]]:
    """The entities of a sentence by the conditions of conlleval.pl and seqeval."""
    chunks, begin, last, last_type = set(), 0, "O", ""
    for i, tag in enumerate([*tags, "O"]):
        prefix, kind = tag[0], tag[2:]
        differs = kind != last_type
        ends = (
            last in "ES"
            or (last == "B" and prefix in "BSO")
            or (last == "I" and prefix in "BSO")
            or (last != "O" and differs)
        )
        starts = prefix in "BS" or (last in "ESO" and prefix in "EI") or (prefix != "O" and differs)
        if ends:
            chunks.add((last_type, begin, i - 1))
        if starts:
            begin = i
        last, last_type = prefix, kind
    return chunks


def test_entities_of_any_sequence_are_those_of_conlleval() -> None:
    rng = np.random.default_rng(1)
    tags = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "LOC-X"))]
    for _ in range(400):
        row = rng.choice(tags, rng.integers(1, 9)).tolist()
        assert find_entities(row) == _conlleval(row), row
    assert find_entities(["I-PER", "I-PER", "B-PER", "O"]) == {("PER", 0, 1), ("PER", 2, 2)}


def test_metrics_are_those_of_the_entities_and_words(tokenizer: Tokenizer) -> None:
    tags = ("B-X", "I-X", "O")
    examples = [
        TagExample("1", ("eu", "rejects", "call"), ("B-X", "I-X", "O"), ""),
        TagExample("2", ("eu", "call"), ("O", "B-X"), ""),
    ]
    samples = EncodedTags(examples, tokenizer, SpecialIds.from_tokenizer(tokenizer), 8, tags)
    logits = np.zeros((2, 8, 3))
    for sentence, guesses in enumerate((("B-X", "I-X", "B-X"), ("O", "O"))):
        for position, tag in zip(samples.positions[sentence], guesses, strict=True):
            logits[sentence, position, tags.index(tag)] = 2
    predictions = TagPredictions(samples, logits, tags)
    assert predictions.metrics() == {"f1": 0.5, "precision": 0.5, "recall": 0.5, "accuracy": 0.6}
    right, wrong = (-np.log(np.exp(x) / (np.exp(2) + 2)) for x in (2, 0))
    assert predictions.loss == pytest.approx((3 * right + 2 * wrong) / 5)
    assert next(predictions.rows())["prediction"] == ["B-X", "I-X", "B-X"]
    assert not are_entity_tags(("NOUN", "VERB"))
    other_tags = TagPredictions(samples, logits, ("NOUN", "VERB", "O"))
    assert not are_entity_tags(other_tags.tags)


def test_columns_and_json_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VB O\n\n\ncall NN O\n", "utf-8")
    examples = read_tags(path)
    assert [(e.words, e.tags) for e in examples] == [
        (("EU", "rejects"), ("B-ORG", "O")),
        (("call",), ("O",)),
    ]
    assert examples[0].where == f"{path}:3"
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"id": "x", "tokens": ["EU"], "tags": ["O"]}\n')
    assert read_tags(tmp_path / "b.jsonl.gz") == [
        TagExample("x", ("EU",), ("O",), f"{tmp_path / 'b.jsonl.gz'}:1")
    ]
    path.write_text("EU\nrejects\n", "utf-8")
    assert read_tags(path)[0].tags is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n\n", ": contains no example: found no sentence"),
        ("a.txt", "EU B\nrejects\n", ":2: another number of columns than the first line: found 1, wanted 2"),
        ("a.jsonl", '{"tags": ["O"]}', ":1: no list of texts under 'tokens': found tags"),
        ("a.jsonl", '{"tokens": ["EU", 1]}', ":1: no list of texts under 'tokens': found ['EU', 1]"),
        ("a.jsonl", '{"tokens": []}', ":1: tokens: is empty: wanted one or more words"),
        ("a.jsonl", '{"tokens": ["EU"], "tags": []}', ":1: tokens and tags differ in number: found 1 and 0"),
        (
            "a.jsonl",
            '{"tokens": ["a"], "tags": ["O"]}\n{"tokens": ["a"]}',
            ":2: has no tags: wanted tags, as",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    with pytest.raises(FormatError) as error:
        read_tags(path)
    assert str(error.value).startswith(f"{path}{message}"), error.value


def test_fewer_than_two_tags_are_one_line() -> None:
    example = TagExample("1", ("EU",), ("O",), "")
    with pytest.raises(ConfigError, match="--train-data: has fewer than two tags: found O"):
        choose_tags((), [example])
    with pytest.raises(ConfigError, match="--labels: has fewer than two tags: found X"):
        choose_tags(("X",), [example])
