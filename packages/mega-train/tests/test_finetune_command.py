"""The command that fine-tunes: it learns, evaluates every epoch, resumes, and refuses what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mega_schema.checkpoint.reader import Checkpoint
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import write_corpus
from tests.train_command import run_mega_train

MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"]
TRAINING = ["--global-batch-size", "16", "--micro-batch-size", "8", "--lr", "3e-3", "--lr-decay-style"]
TRAINING += ["constant", "--seq-length", "24", "--log-interval", "100"]


def _write_examples(path: Path, count: int, seed: int, *, labelled: bool = True) -> Path:
    """Write pairs of texts; a word of the second tells the class."""
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            words = [f"w{word}" for word in rng.choice([7, 8, 10, 11, 13, 14], 4)]
            is_same = bool(rng.integers(2))
            right = " ".join([words[2], "w40" if is_same else "w50", words[3]])
            record = {"id": f"pair-{number}", "left": f"{words[0]}  {words[1]}", "right": right}
            file.write(json.dumps(record | ({"same": is_same} if labelled else {})) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a vocabulary, a pretrained BERT, and examples with and without labels."""
    folder = tmp_path_factory.mktemp("task")
    corpus = write_corpus(folder / "toy")
    _write_examples(folder / "train.jsonl", 203, 1)
    _write_examples(folder / "dev.jsonl", 50, 2)
    _write_examples(folder / "test.jsonl", 9, 3, labelled=False)
    words = ["--train-iters", "2", "--eval-iters", "0", "--save", str(folder / "bert"), *TRAINING]
    run_mega_train("bert", "--data-path", str(corpus), *MODEL, *words)
    return folder


def _classify(folder: Path, *argv: str, code: int = 0) -> tuple[str, str]:
    words = ["--task", "CLASSIFY", "--text-keys", "left", "right", "--label-key", "same"]
    words += ["--train-data", str(folder / "train.jsonl"), "--valid-data", str(folder / "dev.jsonl")]
    return run_mega_train("finetune", *words, str(folder / "test.jsonl"), *TRAINING, *argv, code=code)


def test_a_run_learns_evaluates_every_epoch_and_records_the_best(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pretrained = ["--pretrained-checkpoint", str(folder / "bert"), "--epochs", "12", "--save", str(run)]
    out, _ = _classify(folder, *pretrained)
    validations = [event for event in read_events(run) if event["event"] == "validation"]
    assert [event["iteration"] for event in validations] == [12 * epoch for epoch in range(1, 13)]
    scores = [event["metrics"]["accuracy"] for event in validations]
    assert max(scores) > 0.9, scores
    assert "dev at iteration 144 | loss " in out
    assert "test at iteration 144: no labels" in out
    best = json.loads((run / "best_checkpoint.json").read_text("utf-8"))
    assert (best["epoch"], best["value"]) == (1 + scores.index(max(scores)), max(scores))
    spec = Checkpoint.open(run).spec
    assert (spec.task_head, spec.labels, spec.binary_head) == ("classification", ("false", "true"), False)
    lines = (run / "predictions/dev-0000144.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["id"] for row in rows] == [f"pair-{i}" for i in range(50)]
    assert np.mean([row["label"] == row["prediction"] for row in rows]) == pytest.approx(scores[-1])
    assert len((run / "predictions/test-0000144.jsonl").read_text("utf-8").splitlines()) == 9


def test_a_resumed_run_repeats_the_epochs_that_follow(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--pretrained-checkpoint", str(folder / "bert"), "--epochs", "3", "--save", str(run)]
    words += ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--class-weights", "balanced"]
    out, _ = _classify(folder, *words)
    shutil.rmtree(run / "iter_0000036")
    (run / "latest_checkpointed_iteration.txt").write_text("24")
    resumed, _ = _classify(folder, *words, "--load", str(run))
    last = [line for line in out.splitlines() if line.startswith("dev at iteration 36")]
    assert [line for line in resumed.splitlines() if line.startswith("dev at iteration")] == last


def test_zero_epochs_evaluate_only(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    out, _ = _classify(folder, *MODEL, *_vocabulary(folder), "--epochs", "1", "--save", str(run))
    evaluated, _ = _classify(folder, "--epochs", "0", "--load", str(run), "--save", str(tmp_path / "again"))
    line = next(line for line in out.splitlines() if line.startswith("dev at"))
    assert line in evaluated.splitlines()
    assert (tmp_path / "again/predictions/dev-0000012.jsonl").exists()


def test_zero_epochs_read_no_schedule(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    schedule = ["--lr-decay-style", "linear", "--save", str(run)]
    _classify(folder, "--pretrained-checkpoint", str(folder / "bert"), "--epochs", "1", *schedule)
    _, more = _classify(folder, "--epochs", "2", "--load", str(run), *schedule, code=2)
    assert more.startswith("error: --epochs: ends the decay of the learning rate elsewhere"), more
    out, _ = _classify(folder, "--epochs", "0", "--load", str(run), *schedule[:2])
    assert "dev at iteration 12 | loss " in out
    _, no_checkpoint = _classify(folder, "--epochs", "0", *MODEL, code=2)
    assert "error: --load: missing: wanted a checkpoint to evaluate" in no_checkpoint, no_checkpoint


def test_the_last_batch_is_kept_as_in_megatron(folder: Path) -> None:
    out, _ = _classify(folder, *MODEL, *_vocabulary(folder), "--epochs", "1", "--keep-last")
    assert "iteration 13/13" in out or "dev at iteration 13" in out


def test_micro_batches_do_not_change_a_step(folder: Path, tmp_path: Path) -> None:
    lines = []
    for micro in ("2", "16"):
        words = ["--epochs", "2", "--micro-batch-size", micro, "--class-weights", "1", "3"]
        out, _ = _classify(folder, *MODEL, *_vocabulary(folder), *words)
        lines.append([line.split(" | ")[1] for line in out.splitlines() if line.startswith("dev at")])
    first, second = (np.array([float(word.split()[1]) for word in run]) for run in lines)
    np.testing.assert_allclose(first, second, atol=2e-4)


def _vocabulary(folder: Path) -> list[str]:
    return ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(folder / "vocab.txt")]


def _write_race(folder: Path, count: int, seed: int) -> Path:
    """Write passages of two questions; the article contains a word of the right option."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(count):
        words, options, answers = ["w40", "w50", "w61", "w70"], [], []
        for _ in range(2):
            options.append([words[i] for i in rng.permutation(4)])
            answers.append("ABCD"[options[-1].index("w61")])
        passage = {
            "article": "w7 w8.",
            "questions": ["w10 _ .", "w11"],
            "options": options,
            "answers": answers,
        }
        (folder / f"{number}.txt").write_text(json.dumps(passage) + "\n", "utf-8")
    return folder


def test_race_is_learnt_and_has_the_accuracy_of_each_folder(folder: Path, tmp_path: Path) -> None:
    train = _write_race(tmp_path / "RACE/train/middle", 64, 1)
    dev = [
        str(_write_race(tmp_path / f"RACE/dev/{level}", 9, seed))
        for seed, level in ((2, "middle"), (3, "high"))
    ]
    run = tmp_path / "run"
    words = ["--task", "RACE", "--train-data", str(train.parent), "--valid-data", *dev, "--epochs", "6"]
    words += ["--pretrained-checkpoint", str(folder / "bert"), "--save", str(run)]
    run_mega_train("finetune", *words, *TRAINING)
    events = [event for event in read_events(run) if event["event"] == "validation"]
    assert [event["split"] for event in events[-2:]] == ["middle", "high"]
    assert min(event["metrics"]["accuracy"] for event in events[-2:]) > 0.8, events[-2:]
    spec = Checkpoint.open(run).spec
    assert (spec.task_head, spec.labels) == ("multiple_choice", ("A", "B", "C", "D"))
    (row, *rows) = (run / "predictions/high-0000048.jsonl").read_text("utf-8").splitlines()
    assert (json.loads(row)["id"], len(rows)) == ("0-1", 17)
    _, err = run_mega_train(
        "finetune", *words[:3], str(tmp_path / "absent"), "--epochs", "1", *TRAINING, code=2
    )
    assert err.splitlines()[-1] == (
        f"error: {tmp_path / 'absent'}: contains no passages of RACE: found no such folder, wanted a folder "
        "with *.txt"
    )


REFUSED = {
    "--epochs -1": "--epochs: not a count: found -1, wanted 0 or more",
    "--epochs 1 --train-iters 5": "--train-iters: disagrees with --epochs: found 5, wanted 12 steps",
    "--epochs 1 --labels true": "--labels: are not two or more classes: found true",
    "--epochs 1 --class-weights 1 2 3": "--class-weights: are not a weight above 0 for each class",
    "--epochs 1 --class-weights 1 -2": "--class-weights: are not a weight above 0 for each class",
    "--epochs 1 --keep-last 2": "--keep-last: does not apply to a task",
    "--epochs 1 --preset t5-small": "--preset: is not a model for --task CLASSIFY: found t5, wanted bert; "
    "hint: --task TEXT2TEXT",
    "--epochs 1 --save-interval 5": "--save-interval: leaves out epochs, of which one may be the best: "
    "found 5, wanted a divisor of 12, the steps of an epoch; hint: leave it out: every epoch is saved",
    "--epochs 1 --data-path toy": "--data-path: does not apply to a task: found given; hint: --train-data",
    "--epochs 1 --train-samples 9": "--train-samples: does not apply to a task",
    "--epochs 1 --text-keys a": "{}/train.jsonl:1: no text under 'a': found id, left, right, same",
    "--epochs 1 --global-batch-size 512": "--train-data: has fewer examples than a batch: found 203",
    "--epochs 1 --seq-length 3": "--seq-length: too short for [CLS] and two [SEP]: found 3",
    "--epochs 1 --context-parallel-size 2": "--context-parallel-size: is not supported for BERT",
    "--epochs 1 --best-metric f1": "--best-metric: is not a metric of the task: found f1, wanted acc",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_do_not_fit_a_task_are_one_line(folder: Path, tmp_path: Path, words: str) -> None:
    run = tmp_path / "run"
    more = [*MODEL, *_vocabulary(folder), "--save", str(run)]
    _, err = _classify(folder, *more, *words.split(), code=2)
    assert err.splitlines()[-1].startswith(f"error: {REFUSED[words].format(folder)}"), err
    assert not list(tmp_path.glob("run/iter_*"))


def test_what_a_task_needs_is_one_line(folder: Path) -> None:
    _, err = run_mega_train("finetune", *TRAINING, code=2)
    assert err.splitlines()[-1] == (
        "error: --task: missing: wanted MNLI | QQP | RACE | CLASSIFY | SQUAD | TAG | TEXT2TEXT; hint: "
        "--task MNLI"
    )
    _, err = run_mega_train("bert", "--task", "MNLI", *TRAINING, code=2)
    assert err.splitlines()[-1].startswith("error: --task: does not apply to mega-train bert: found given")
    _, err = _classify(folder, *MODEL, "--vocab-size", "204", "--epochs", "1", code=2)
    assert err.splitlines()[-1].startswith("error: --tokenizer-type: missing, and the checkpoint records no")


def test_a_checkpoint_of_another_model_or_task_is_one_line(folder: Path, tmp_path: Path) -> None:
    words = ["--epochs", "1", "--pretrained-checkpoint", str(folder / "bert"), "--num-layers", "3"]
    _, err = _classify(folder, *words, *MODEL[2:], code=2)
    assert err.splitlines()[-1].startswith("error: --num-layers: differs from the checkpoint's: found 3"), err
    _, err = _classify(folder, "--epochs", "1", "--load", str(folder / "bert"), code=2)
    assert err.splitlines()[-1] == (
        "error: --load: is not a checkpoint of this task: found a model without the head of a task, wanted "
        f"labels false true; hint: --pretrained-checkpoint {folder / 'bert'} starts from its weights"
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"left": "w7", "right": "w8", "same": 1.5}'], ":1: a label is no name: found float"),
        (["[1]"], ":1: is not an object: found list"),
        (["{"], ":1: is not JSON: found "),
        ([""], ": contains no example: found no record"),
        (
            ['{"left": "w7", "right": "w8", "same": true}', '{"left": "w7", "right": "w8"}'],
            ":2: no key 'same'",
        ),
        (['{"left": "w7", "right": "w8", "same": "maybe"}'], ":1: unknown label: found maybe, wanted false"),
    ],
)
def test_wrong_examples_are_one_line(
    folder: Path, tmp_path: Path, lines: Sequence[str], message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    words = ["--epochs", "1", "--valid-data", str(path)]
    _, err = _classify(folder, *MODEL, *_vocabulary(folder), *words, code=2)
    assert err.splitlines()[-1].startswith(f"error: {path}{message}"), err
