"""TEXT2TEXT: T5 learns pairs of texts, decodes greedily, and refuses what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import FormatError
from mega_schema.tasks.text_pairs import is_exact_match, read_text_pairs, token_f1
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.data.encoder.t5_reader import LABEL, REAL, SOURCE, SOURCE_REAL, TOKEN
from mega_train.data.text2text import EncodedPairs, SequenceIds
from mega_train.engine.greedy_decoding import decode_greedily
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import write_corpus
from tests.train_command import run_mega_train

MODEL = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4"]
TRAINING = ["--global-batch-size", "16", "--micro-batch-size", "8", "--lr", "1e-2", "--lr-decay-style"]
TRAINING += ["constant", "--seq-length", "8", "--decoder-seq-length", "8", "--log-interval", "100"]


def _write_pairs(path: Path, count: int, seed: int, *, has_target: bool = True) -> Path:
    """Write words; the target has the first of them twice."""
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            words = [f"w{word}" for word in rng.choice([7, 8, 10, 11], 2)]
            record = {"id": f"pair-{number}", "question": " ".join(words)}
            file.write(
                json.dumps(record | ({"answer": f"{words[0]} {words[0]}"} if has_target else {})) + "\n"
            )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a vocabulary, and pairs with and without targets."""
    folder = tmp_path_factory.mktemp("text2text")
    write_corpus(folder / "toy")
    _write_pairs(folder / "train.jsonl", 64, 1)
    _write_pairs(folder / "dev.jsonl", 20, 2)
    _write_pairs(folder / "test.jsonl", 5, 3, has_target=False)
    return folder


def _finetune(folder: Path, *argv: str, code: int = 0) -> tuple[str, str]:
    words = ["--task", "TEXT2TEXT", "--input-key", "question", "--target-key", "answer"]
    words += ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(folder / "vocab.txt")]
    words += ["--train-data", str(folder / "train.jsonl"), "--valid-data", str(folder / "dev.jsonl")]
    return run_mega_train("finetune", *words, str(folder / "test.jsonl"), *TRAINING, *argv, code=code)


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    _finetune(folder, *MODEL, "--epochs", "25", "--save", str(folder / "run"))
    return folder / "run"


def test_pairs_are_learnt_and_the_best_epoch_is_recorded(run: Path) -> None:
    validations = [event for event in read_events(run) if event["event"] == "validation"]
    assert [event["iteration"] for event in validations] == [4 * epoch for epoch in range(1, 26)]
    scores = [event["metrics"]["exact_match"] for event in validations]
    assert max(scores) == 1, scores
    assert validations[-1]["loss"] < 0.1
    best = json.loads((run / "best_checkpoint.json").read_text("utf-8"))
    assert (best["metric"], best["value"], best["epoch"]) == ("exact_match", 1, 1 + scores.index(1))
    spec = Checkpoint.open(run).spec
    assert (spec.family, spec.encoder_layers, spec.task_head) == ("t5", 1, "none")


def test_predictions_are_lines_with_inputs_and_targets(run: Path) -> None:
    rows, test_rows = (
        [json.loads(line) for line in (run / f"predictions/{name}-0000100.jsonl").read_text().splitlines()]
        for name in ("dev", "test")
    )
    assert [row["id"] for row in rows] == [f"pair-{i}" for i in range(20)]
    assert all(row["prediction"] == row["target"] for row in rows)
    assert [row["target"] for row in test_rows] == [None] * 5
    assert all(row["prediction"] == " ".join([row["input"].split()[0]] * 2) for row in test_rows)


def test_a_resumed_run_repeats_the_epochs_that_follow(folder: Path, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("52")
    for later in range(56, 101, 4):
        shutil.rmtree(tmp_path / f"run/iter_{later:07}")
    words = [*MODEL, "--epochs", "25", "--save", str(tmp_path / "run")]
    resumed, _ = _finetune(folder, *words, "--load", str(tmp_path / "run"))
    last = [event for event in read_events(run) if event["event"] == "validation"][-1]
    assert f"dev at iteration 100 | loss {last['loss']:.4f} | exact_match 1.0000" in resumed, resumed


def test_zero_epochs_evaluate_only(folder: Path, run: Path) -> None:
    out, _ = _finetune(folder, "--epochs", "0", "--load", str(run))
    assert "dev at iteration 100 | loss " in out
    assert "test at iteration 100: no labels" in out


REFUSED = {
    "--labels a b": "--labels: is an option of classification: found a b; hint: leave it out",
    "--label-key a": "--label-key: is an option of classification",
    "--class-weights balanced": "--class-weights: is an option of classification",
    "--input-key a": "{}/train.jsonl:1: no text under 'a': found answer, id, question; hint: --input-key KEY",
    "--target-key a": "{}/train.jsonl:1: no text under 'a'; hint: --target-key KEY",
    "--best-metric accuracy": "--best-metric: is not a metric of the task: found accuracy, wanted exact",
    "--decoder-seq-length 9": "--decoder-seq-length: does not fit the model: found 9 tokens, wanted 1 to 8",
    "--context-parallel-size 2": "--context-parallel-size: is not supported for T5",
    "--unpad-samples": "--unpad-samples: does not apply to tasks of T5, whose rows have padding",
    "--global-batch-size 80": "--train-data: has fewer examples than a batch: found 64",
    "--tokenizer-type NullTokenizer --vocab-size 9": "--tokenizer-type: has no token for the padding of a",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_do_not_fit_are_one_line(folder: Path, tmp_path: Path, words: str) -> None:
    more = [*MODEL, "--epochs", "1", "--save", str(tmp_path / "run"), *words.split()]
    _, err = _finetune(folder, *more, code=2)
    assert err.splitlines()[-1].startswith(f"error: {REFUSED[words].format(folder)}"), err
    assert not list(tmp_path.glob("run/iter_*"))


def test_options_of_text2text_do_not_apply_to_classes(folder: Path) -> None:
    words = [
        "--task",
        "CLASSIFY",
        "--text-keys",
        "question",
        "--label-key",
        "answer",
        "--target-key",
        "answer",
    ]
    files = ["--train-data", str(folder / "train.jsonl"), "--epochs", "1"]
    _, err = run_mega_train("finetune", *words, *files, *TRAINING[:-4], code=2)
    assert "error: --target-key: is an option of TEXT2TEXT: found answer; hint: leave it out" in err, err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": contains no example: found no record"),
        ('{"input": "a", "target": 3}\n', ":1: no text under 'target': found int; hint: --target-key KEY"),
        ('{"input": "a", "target": "b"}\n{"input": "a"}\n', ":2: no key 'target': wanted a target, as other"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pairs.jsonl").write_text(text, "utf-8")
    with pytest.raises(FormatError) as raised:
        read_text_pairs(tmp_path / "pairs.jsonl", "input", "target")
    assert str(raised.value).startswith(f"{tmp_path}/pairs.jsonl{message}")


def test_a_csv_has_columns_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text('q,a\n"x, y",z\n', "utf-8")
    (pair,) = read_text_pairs(tmp_path / "pairs.csv", "q", "a")
    assert (pair.input, pair.target, pair.id) == ("x, y", "z", "2")


def test_a_sample_has_start_and_end_and_is_cut_before_the_end(folder: Path) -> None:
    tokenizer = open_tokenizer("BertWordPieceCase", vocab_file=folder / "vocab.txt", vocab_extra_ids=2)
    (folder / "one.jsonl").write_text('{"input": "w7 w8 w10", "target": "w11"}\n', "utf-8")
    pairs = read_text_pairs(folder / "one.jsonl", "input", "target")
    pieces = tokenizer.pieces(range(tokenizer.identity.vocab_size))
    bos, eos = pieces.index("[BOS]"), pieces.index("[EOS]")
    sample = EncodedPairs(pairs, tokenizer, SequenceIds.from_tokenizer(tokenizer), 3, 5)[0]
    w7, w8, w11 = (tokenizer.encode(word)[0] for word in ("w7", "w8", "w11"))
    assert sample[SOURCE].tolist() == [w7, w8, eos, 0, 0]
    assert sample[SOURCE_REAL].tolist() == [1, 1, 1, 0, 0]
    assert sample[TOKEN].tolist() == [bos, w11, 0, 0, 0]
    assert sample[LABEL].tolist() == [w11, eos, -100, -100, -100]
    assert sample[REAL].tolist() == [1, 1, 0, 0, 0]


def test_f1_counts_words_as_often_as_they_occur() -> None:
    assert token_f1("a b b", "b b  c") == pytest.approx(2 / 3)
    assert (token_f1("", ""), token_f1("a", "")) == (1, 0)
    assert is_exact_match(" a  b", "a b")
    assert not is_exact_match("b a", "a b")


@pytest.mark.parametrize("seed", range(20))
def test_greedy_decoding_of_whole_texts_is_that_of_single_tokens(seed: int) -> None:
    """The next token is any function of the tokens before it; guesses are right, wrong or partly right."""
    rng = np.random.default_rng(seed)
    limit, end = int(rng.integers(1, 12)), 3
    passes = []

    def next_token(row: int, prefix: list[int]) -> int:
        return int(np.random.default_rng([seed, row, *prefix]).integers(0, 6))

    def next_tokens(input_BW: np.ndarray) -> np.ndarray:
        passes.append(input_BW.shape[1])
        rows = enumerate(input_BW.tolist())
        return np.array([[next_token(i, row[: t + 1]) for t in range(len(row))] for i, row in rows])

    wanted, guess = [], rng.integers(0, 6, (4, limit))
    for row in range(4):
        output = [9]
        while len(output) <= limit and (token := next_token(row, output)) != end:
            output.append(token)
        wanted.append(output[1:])
        size = int(rng.integers(0, limit + 1))
        guess[row, :size] = [*output[1:], *[end] * limit][:size]
    width = int(rng.integers(1, limit + 1))
    assert decode_greedily(next_tokens, guess, start=9, end=end, width=width) == wanted
    assert len(passes) <= limit + 1
