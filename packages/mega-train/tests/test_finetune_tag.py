"""The command that fine-tunes on words with tags: it learns, evaluates, and refuses what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mega_schema.checkpoint.reader import Checkpoint
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import write_corpus
from tests.train_command import run_mega_train

MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"]
TRAINING = ["--micro-batch-size", "16", "--lr", "1e-2", "--seq-length", "24", "--log-interval", "1000"]
KINDS = {"X": ("w40", "w41", "w43"), "Y": ("w50", "w52", "w53")}


def _write_sentences(path: Path, count: int, seed: int) -> Path:
    """Write sentences in columns; w10 and w11 begin entities of a word of their kind and one more."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        for _ in range(rng.integers(2, 5)):
            if rng.random() < 0.5:
                kind = "XY"[rng.integers(2)]
                lines += [
                    f"{word} {prefix}-{kind}"
                    for word, prefix in zip(rng.choice(KINDS[kind], 2), "BI", strict=True)
                ]
            lines.append(f"w{rng.choice([13, 14, 16])} O")
        lines.append("")
    path.write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tag")
    write_corpus(folder / "toy")
    _write_sentences(folder / "train.conll", 120, 1)
    _write_sentences(folder / "dev.conll", 30, 2)
    (folder / "test.conll").write_text("w13\nw40\n\nw14\n", "utf-8")
    return folder


def _finetune(folder: Path, *argv: str, code: int = 0) -> tuple[str, str]:
    words = ["--task", "TAG", "--train-data", str(folder / "train.conll"), *MODEL, *TRAINING]
    words += ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(folder / "vocab.txt")]
    return run_mega_train("finetune", *words, *argv, code=code)


def test_a_run_learns_tags_and_scores_entities(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    files = ["--valid-data", str(folder / "dev.conll"), str(folder / "test.conll")]
    out, _ = _finetune(folder, *files, "--epochs", "10", "--save", str(run))
    validations = [event for event in read_events(run) if event["event"] == "validation"]
    assert set(validations[-1]["metrics"]) == {"f1", "precision", "recall", "accuracy"}
    assert validations[-1]["metrics"]["accuracy"] > 0.8, validations[-1]
    assert validations[-1]["metrics"]["f1"] > 0.5, validations[-1]
    last = validations[-1]["iteration"]
    assert f"test at iteration {last}: no labels" in out
    best = json.loads((run / "best_checkpoint.json").read_text("utf-8"))
    assert (best["metric"], best["value"]) == ("f1", max(event["metrics"]["f1"] for event in validations))
    spec = Checkpoint.open(run).spec
    assert (spec.task_head, spec.pooler) == ("token_classification", False)
    assert spec.labels == ("B-X", "B-Y", "I-X", "I-Y", "O")
    lines = (run / f"predictions/test-{last:07}.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == [["w13", "w40"], ["w14"]]


REFUSED = {
    "--text-keys words": "--text-keys: is an option of classification: found words",
    "--doc-stride 9": "--doc-stride: is an option of SQUAD: found 9; hint: leave it out",
    "--labels O B-X": "{}/train.conll:",
    "--train-data {}/test.conll": "--train-data: has fewer than two tags: found none",
    "--best-metric macro_f1": "--best-metric: is not a metric of the task: found macro_f1, wanted f1 | acc",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_do_not_fit_are_one_line(folder: Path, tmp_path: Path, words: str) -> None:
    more = ["--epochs", "1", "--save", str(tmp_path / "run"), *words.format(folder).split()]
    _, err = _finetune(folder, *more, code=2)
    assert err.splitlines()[-1].startswith(f"error: {REFUSED[words].format(folder)}"), err
    assert not list(tmp_path.glob("run/iter_*"))


def test_words_beyond_the_sample_are_left_out_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _finetune(folder, "--epochs", "1", "--seq-length", "6")
    assert "words are beyond --seq-length 6 and left out" in caplog.text
