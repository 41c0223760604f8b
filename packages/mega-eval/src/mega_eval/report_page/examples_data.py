"""The examples of a result as the page's script reads them."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from mega_eval.result_reader import EvaluationResult
from mega_eval.task_result import Example

_MAX_PROMPT = 4000  # characters of a prompt in the page; the samples file has all of it


def render_examples_data(results: Sequence[EvaluationResult]) -> str:
    """Return JSON that is safe inside a script element: it contains no "<"."""
    content = [
        {"judges": find_judges(result), "examples": [_pack(example) for example in result.examples]}
        for result in results
    ]
    return orjson.dumps(content).decode().replace("<", "\\u003c")


def find_judges(result: EvaluationResult) -> list[str]:
    """Return the scores that are 0 or 1 in every example and belong to a metric, most important first.

    `correct` is one of them even without a metric of all examples, as in `core`.
    """
    names = dict.fromkeys([*(metric.example_score for metric in result.metrics.values()), "correct"])
    return [
        name
        for name in names
        if name is not None
        and result.examples
        and all(
            example.scores.get(name) in (0, 1) and f"{name}_weight" not in example.scores
            for example in result.examples
        )
    ]


def _pack(example: Example) -> dict[str, object]:
    prompt = example.prompt
    return {
        "id": example.id,
        "prompt": prompt if len(prompt) <= _MAX_PROMPT else f"… {prompt[-_MAX_PROMPT:]}",
        "expected": example.expected,
        "prediction": example.prediction,
        "scores": {name: float(value) for name, value in example.scores.items()},
        "tokens": [(token.text, round(token.logprob, 4), token.is_greedy) for token in example.tokens],
        "choices": example.choices,
        "tags": example.tags,
    }
