"""Results with made-up numbers, written as a task writes them."""

from __future__ import annotations

from pathlib import Path

from mega_eval import metrics, result
from mega_eval.models.interface import ModelIdentity
from mega_eval.result import Provenance
from mega_eval.result_reader import EvaluationResult, read_result
from mega_eval.task_result import Example, TargetToken, TaskResult

HOSTILE = "<img src=x onerror=\"document.title='hit'\"></script><script>document.title='hit'</script>&amp;"


def make_examples(correct, nats=None, weights=None):
    """Return an example per verdict, with ids 0, 1 and on, and nats of its target."""
    nats = nats or [1.0 + index % 5 for index in range(len(correct))]
    weights = weights or [1.0] * len(correct)
    return [
        Example(
            id=str(index),
            prompt=f"prompt {index}",
            expected=f"word{index}",
            prediction=f"word{index}" if verdict else "another",
            scores={"correct": float(verdict), "nats": loss, "nats_weight": weight},
            tokens=(TargetToken(f"word{index}", -loss, bool(verdict)),),
            tags={"subject": "odd" if index % 2 else "even"},
        )
        for index, (verdict, loss, weight) in enumerate(zip(correct, nats, weights, strict=True))
    ]


def write_made_up(
    path: Path,
    examples,
    *,
    task="lambada",
    convention="strict",
    model="a",
    data="d",
    is_whole=True,
    options=None,
    extra=None,
    identity=None,
) -> EvaluationResult:
    """Write a result of these examples with an accuracy, a loss and its perplexity, and read it back."""
    loss = metrics.ratio(
        [example.scores["nats"] for example in examples],
        [example.scores["nats_weight"] for example in examples],
        "nats per token",
        higher_is_better=False,
        example_score="nats",
    )
    task_result = TaskResult(
        task=task,
        convention=convention,
        metrics={
            "accuracy": metrics.proportion(
                [example.scores["correct"] == 1 for example in examples],
                "right <answers>",
                example_score="correct",
            ),
            "loss": loss,
            "perplexity": metrics.exponential(loss, "exp of the loss"),
            **(extra or {}),
        },
        counts={"examples": len(examples)},
        examples=examples,
        is_whole=is_whole,
        tokens_read=300,
    )
    provenance = Provenance(
        model=ModelIdentity(
            source=f"/runs/{model}/iter_0000010",
            sha256=model.encode().hex().ljust(64, "0"),
            tokenizer_sha256="f" * 64,
            iteration=10,
            dtype="float32",
            device="cpu",
            parameters=1000,
            **(identity or {}),
        ),
        data=[{"path": "/data/file.jsonl", "bytes": 7, "sha256": data.encode().hex().ljust(64, "0")}],
        options=options or {"strict": True, "limit": None},
        versions={"mega-eval": "0.1.0", "torch": "2", "python": "3.11"},
        command=("mega-eval", task, "--data", "a b"),
        date="2026-01-02T03:04:05+00:00",
    )
    result.write_result(path, result.build_record(task_result, provenance, seconds=2.0), examples)
    return read_result(path)
