"""`mega-eval` of a fine-tuned BERT gives the figures of its training, from transformers' class too."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mega_ckpt.cli import cli as convert_cli
from mega_eval.cli import cli
from mega_eval.result_reader import read_result
from mega_schema.atomic_io import write_text
from mega_train.cli import main
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import toy_pieces

TRAINING = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "24"]
TRAINING += ["--micro-batch-size", "16", "--lr", "3e-3", "--no-bias-gelu-fusion", "--epochs", "3"]
TRAINING += ["--tokenizer-type", "BertWordPieceCase"]
LABELS = ("contradiction", "entailment", "neutral")


def _write_mnli(path: Path, count: int, seed: int) -> Path:
    """Write a file in the columns of MNLI; a word of the second text tells the class, mostly."""
    rng = np.random.default_rng(seed)
    rows = ["\t".join([f"name{column}" for column in range(10)] + ["label1", "gold_label"])]
    for number in range(count):
        label = int(rng.integers(3))
        clue = label if rng.random() < 0.8 else int(rng.integers(3))
        first = " ".join(f"w{word}" for word in rng.choice([7, 8, 10, 11], 3))
        second = f"w{(40, 50, 61)[clue]} w{rng.choice([13, 14])}"
        rows.append("\t".join([str(number), *["x"] * 7, first, second, "y", LABELS[label]]))
    write_text(path, "\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a classifier of MNLI after three epochs, and the files that it was evaluated on."""
    folder = tmp_path_factory.mktemp("finetuned")
    write_text(folder / "vocab.txt", "\n".join(toy_pieces(sentinels=0)[:-2]) + "\n")
    _write_mnli(folder / "train.tsv", 200, 1)
    files = [
        str(_write_mnli(folder / f"dev_{name}matched.tsv", 37, seed)) for seed, name in ((2, ""), (3, "mis"))
    ]
    words = ["finetune", "--task", "MNLI", "--train-data", str(folder / "train.tsv"), "--valid-data", *files]
    words += [*TRAINING, "--vocab-file", str(folder / "vocab.txt"), "--save", str(folder / "run")]
    err = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0, err.getvalue()
    return folder


def _evaluate(task: str, load: Path, output: Path, *words: object, code: int = 0) -> dict[str, Any]:
    """The result of a command, or with another exit code its error."""
    argv = [task, "--load", str(load), "--output", str(output), *map(str, words)]
    outcome = CliRunner().invoke(cli, argv)
    if code:
        return {"error": str(outcome.exception)}
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    assert read_result(output).examples  # it satisfies the schema, and so do its examples
    result: dict[str, Any] = json.loads(output.read_text("utf-8"))
    return result


def _values(result: dict[str, Any]) -> dict[str, float]:
    return {name: metric["value"] for name, metric in result["metrics"].items()}


def test_a_run_has_the_figures_of_its_best_epoch(folder: Path, tmp_path: Path) -> None:
    best = json.loads((folder / "run/best_checkpoint.json").read_text("utf-8"))
    events = [event for event in read_events(folder / "run") if event["event"] == "validation"]
    expected = {event["split"]: event for event in events if event["iteration"] == best["iteration"]}
    assert set(expected) == {"dev_matched", "dev_mismatched"}
    for name, event in expected.items():
        result = _evaluate(
            "mnli", folder / "run", tmp_path / f"{name}.json", folder / f"{name}.tsv", "--report"
        )
        assert result["model"]["iteration"] == best["iteration"]
        values = _values(result)
        assert values["accuracy"] == event["metrics"]["accuracy"]
        assert values["macro_f1"] == pytest.approx(event["metrics"]["macro_f1"])
        assert values["loss"] == pytest.approx(event["loss"], rel=1e-5)
        low, high = result["metrics"]["accuracy"]["interval"]
        assert low < values["accuracy"] < high
    assert (tmp_path / "dev_matched.html").exists()
    both = _evaluate(
        "mnli", folder / "run", tmp_path / "both.json", *(folder / f"{name}.tsv" for name in expected)
    )
    for name, event in expected.items():
        assert _values(both)[f"accuracy_{name}"] == event["metrics"]["accuracy"]
    assert _values(both)["accuracy"] > 0.5


def test_transformers_class_of_the_same_weights_has_the_same_figures(folder: Path, tmp_path: Path) -> None:
    load = folder / "run"
    words = ["convert", "--from", "mega", "--to", "hf", "--load", str(load), "--save", str(tmp_path / "hf")]
    outcome = CliRunner().invoke(convert_cli, words)
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    last = load / (load / "latest_checkpointed_iteration.txt").read_text("utf-8").strip().zfill(7).join(
        ["iter_", ""]
    )
    data = folder / "dev_matched.tsv"
    ours = _evaluate("mnli", last, tmp_path / "ours.json", data)
    theirs = _evaluate("mnli", tmp_path / "hf", tmp_path / "theirs.json", data, "--seq-length", 24)
    assert _values(theirs) == pytest.approx(_values(ours), rel=1e-5)
    assert "transformers" in theirs["versions"]


def test_race_has_the_figures_of_training_by_level(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for level in ("middle", "high"):
        (tmp_path / level).mkdir()
        options = [[f"w{word}" for word in rng.choice([40, 50, 61, 70], 4)] for _ in range(11)]
        passage = {
            "article": "w7 w8.",
            "questions": ["w10 _"] * 11,
            "options": options,
            "answers": ["ABCD"[rng.integers(4)] for _ in range(11)],
        }
        write_text(tmp_path / level / "1.txt", json.dumps(passage) + "\n")
    levels = [str(tmp_path / "middle"), str(tmp_path / "high")]
    words = ["finetune", "--task", "RACE", "--train-data", levels[0], "--valid-data", *levels, *TRAINING]
    words += ["--vocab-file", str(folder / "vocab.txt"), "--save", str(tmp_path / "run"), "--keep-last"]
    err = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0, err.getvalue()
    best = json.loads((tmp_path / "run/best_checkpoint.json").read_text("utf-8"))
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "validation"]
    result = _evaluate("race", tmp_path / "run", tmp_path / "race.json", *levels, "--micro-batch-size", 3)
    for event in events:
        if event["iteration"] == best["iteration"]:
            assert _values(result)[f"accuracy_{event['split']}"] == event["metrics"]["accuracy"]
    assert result["counts"]["examples"] == 22
    assert len(result["data"]) == 2


REFUSED: Sequence[tuple[list[str], str]] = (
    (["--labels", "a,b"], "--labels: do not fit the model's outputs: found a,b, wanted 3 different names"),
    (["--labels", "a,b,c"], "{}/dev_matched.tsv:2: unknown label: found "),
    (["--seq-length", "99"], "--seq-length: is longer than the model's context: found 99, wanted at most 24"),
)


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_options_that_do_not_fit_the_model_are_one_line(
    folder: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    data = folder / "dev_matched.tsv"
    error = _evaluate("mnli", folder / "run", tmp_path / "a.json", data, *words, code=2)["error"]
    assert error.startswith(message.format(folder)), error
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_task_and_without_labels_are_one_line(folder: Path, tmp_path: Path) -> None:
    error = _evaluate("qqp", folder / "run", tmp_path / "a.json", folder / "dev_matched.tsv", code=2)["error"]
    assert error.startswith(
        f"{folder / 'dev_matched.tsv'}: does not have the columns of QQP: found 12 columns"
    )
    test_set = tmp_path / "test.tsv"
    test_set.write_text("\t".join("abcdefghij") + "\n" + "\t".join("abcdefghij") + "\n")
    error = _evaluate("mnli", folder / "run", tmp_path / "a.json", test_set, code=2)["error"]
    assert error.startswith(f"{test_set}: has no labels: wanted labels to compare with")
    twice = [folder / "dev_matched.tsv", test_set.rename(tmp_path / "dev_matched.tsv")]
    error = _evaluate("mnli", folder / "run", tmp_path / "a.json", *twice, code=2)["error"]
    assert error == "--data: two files have the same name: found dev_matched"
