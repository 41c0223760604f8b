"""The command that fine-tunes on SQuAD: it learns, evaluates, resumes, and refuses what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.task_heads import SPAN_LABELS
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import write_corpus
from tests.squad_fixture import write_squad
from tests.train_command import run_mega_train

MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"]
TRAINING = ["--micro-batch-size", "16", "--lr", "1e-2", "--seq-length", "24", "--log-interval", "1000"]
WINDOWS = ["--doc-stride", "8", "--max-query-length", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a vocabulary and files of SQuAD 1.1 and 2.0."""
    folder = tmp_path_factory.mktemp("squad")
    write_corpus(folder / "toy")
    write_squad(folder / "train.json", 100, 1)
    write_squad(folder / "dev.json", 30, 2)
    write_squad(folder / "train-v2.0.json", 100, 1, unanswerable=True)
    write_squad(folder / "dev-v2.0.json", 30, 2, unanswerable=True)
    write_squad(folder / "test.json", 5, 3, labels=False)
    return folder


def _finetune(
    folder: Path, *argv: str, code: int = 0, train: str = "train.json", vocab: Path | None = None
) -> tuple[str, str]:
    words = ["--task", "SQUAD", "--train-data", str(folder / train), *TRAINING, *WINDOWS]
    words += ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str((vocab or folder) / "vocab.txt")]
    return run_mega_train("finetune", *words, *argv, code=code)


def test_a_run_learns_to_answer_and_writes_predictions_for_the_official_script(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    files = ["--valid-data", str(folder / "dev.json"), str(folder / "test.json")]
    out, _ = _finetune(folder, *MODEL, *files, "--epochs", "3", "--save", str(run))
    validations = [event for event in read_events(run) if event["event"] == "validation"]
    assert [event["split"] for event in validations] == ["dev"] * 3
    assert set(validations[0]["metrics"]) == {"exact_match", "f1"}
    assert validations[-1]["metrics"]["exact_match"] > 0.8, validations
    last = validations[-1]["iteration"]
    assert f"test at iteration {last}: no labels" in out
    best = json.loads((run / "best_checkpoint.json").read_text("utf-8"))
    assert best["metric"] == "f1"
    assert best["value"] == max(event["metrics"]["f1"] for event in validations)
    spec = Checkpoint.open(run).spec
    assert (spec.task_head, spec.labels, spec.pooler) == ("span", SPAN_LABELS, False)
    texts = json.loads((run / f"predictions/dev-{last:07}.predictions.json").read_text("utf-8"))
    content = json.loads((folder / "dev.json").read_text("utf-8"))
    questions = [q for p in content["data"][0]["paragraphs"] for q in p["qas"]]
    exact = [texts[question["id"]] == question["answers"][0]["text"] for question in questions]
    assert np.mean(exact) == pytest.approx(validations[-1]["metrics"]["exact_match"])
    lines = (run / f"predictions/dev-{last:07}.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["id"]: row["prediction"] for row in rows} == texts
    assert len(json.loads((run / f"predictions/test-{last:07}.predictions.json").read_text("utf-8"))) == 5


def test_a_resumed_run_of_squad_2_repeats_the_epochs_that_follow(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*MODEL, "--valid-data", str(folder / "dev-v2.0.json"), "--save", str(run), "--epochs", "3"]
    words += ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--best-metric", "exact_match"]
    out, _ = _finetune(folder, *words, train="train-v2.0.json")
    event = [event for event in read_events(run) if event["event"] == "validation"][-1]
    metrics = event["metrics"]
    assert metrics["NoAns_exact"] > 0.5, metrics
    assert metrics["HasAns_exact"] > 0.5, metrics
    assert metrics["best_exact"] >= metrics["exact_match"]
    last, steps = event["iteration"], event["iteration"] // 3
    shutil.rmtree(run / f"iter_{last:07}")
    (run / "latest_checkpointed_iteration.txt").write_text(str(2 * steps))
    resumed, _ = _finetune(folder, *words, "--load", str(run), train="train-v2.0.json")
    line = next(line for line in out.splitlines() if line.startswith(f"dev-v2 at iteration {last}"))
    assert [row for row in resumed.splitlines() if row.startswith("dev-v2 at iteration")] == [line]


def test_the_loss_does_not_depend_on_the_length_of_padding(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.json"
    paragraphs = json.loads((folder / "train.json").read_text("utf-8"))["data"][0]["paragraphs"]
    content = {"data": [{"paragraphs": [p for p in paragraphs if len(p["context"].split()) < 15]}]}
    short.write_text(json.dumps(content), "utf-8")
    lines = []
    for length in ("24", "32"):
        words = ["--seq-length", length, "--max-position-embeddings", "32", "--valid-data", str(short)]
        out, _ = _finetune(tmp_path, *MODEL, *words, "--epochs", "1", train="short.json", vocab=folder)
        lines.append(next(line for line in out.splitlines() if line.startswith("short at")))
    assert lines[0] == lines[1]


REFUSED = {
    "--labels start": "--labels: is an option of classification: found start; hint: leave it out",
    "--class-weights 1 2": "--class-weights: is an option of classification: found 1 2",
    "--text-keys question": "--text-keys: is an option of classification: found question",
    "--best-metric accuracy": "--best-metric: is not a metric of the task: found accuracy, wanted f1 | exact",
    "--doc-stride 17": "--doc-stride: is not less than the window of the passage: found 17, wanted less",
    "--doc-stride 0": "--doc-stride: not a count: found 0, wanted 1 or more",
    "--null-score-diff-threshold nan": "--null-score-diff-threshold: not a finite number: found nan",
    "--max-query-length 20": "--seq-length: has no place for a passage: found 24, wanted 25 or more",
    "--global-batch-size 512": "--train-data: has fewer examples than a batch: found 1",
    "--context-parallel-size 2": "--context-parallel-size: is not supported for BERT",
    "--train-data {}/test.json": "{}/test.json: data[0].paragraphs[0].qas[0] (q0): has no answers: wanted",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_do_not_fit_squad_are_one_line(folder: Path, tmp_path: Path, words: str) -> None:
    more = [*MODEL, "--epochs", "1", "--save", str(tmp_path / "run"), *words.format(folder).split()]
    _, err = _finetune(folder, *more, code=2)
    assert err.splitlines()[-1].startswith(f"error: {REFUSED[words].format(folder)}"), err
    assert not list(tmp_path.glob("run/iter_*"))


def test_windows_need_a_length_and_other_tasks_have_none(folder: Path) -> None:
    words = ["--task", "SQUAD", "--train-data", str(folder / "train.json"), "--epochs", "1", "--lr", "1e-3"]
    words += ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(folder / "vocab.txt"), *MODEL]
    _, err = run_mega_train("finetune", *words, "--micro-batch-size", "4", code=2)
    assert err.splitlines()[-1] == (
        "error: --seq-length: missing: wanted tokens of a question with a window of its passage; hint: "
        "--seq-length 384"
    )
    rows = folder / "rows.csv"
    rows.write_text("text,label\nw10,a\nw11,b\n", "utf-8")
    words = ["--task", "CLASSIFY", "--train-data", str(rows), "--epochs", "1", *words[6:], *TRAINING]
    words += ["--micro-batch-size", "1"]
    _, err = run_mega_train("finetune", *words, "--doc-stride", "9", code=2)
    assert err.splitlines()[-1] == ("error: --doc-stride: is an option of SQUAD: found 9; hint: leave it out")
