"""Read and write the classes of a task's head in Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_schema.errors import FormatError
from mega_schema.spec import ModelSpec
from mega_schema.task_heads import SPAN_LABELS, TaskHead

_DEFAULT_LABELS = 2  # of transformers, if a config names none
_MAX_LABELS = 1 << 20
_PROBLEM = "single_label_classification"


def read_labels(config: Mapping[str, Any], head: TaskHead, where: object) -> tuple[str, ...]:
    """Return the names of the classes in the order of the head's outputs; of spans begin and end.

    Raises:
        FormatError: they are not numbered from 0, or the head is not one of a single class.
    """
    if head == "span":
        names = config.get("id2label")
        count = config.get("num_labels", _DEFAULT_LABELS if names is None else len(names))
        if count != len(SPAN_LABELS):
            raise FormatError(f"{where}: num_labels", "is not that of begin and end", found=count, wanted=2)
        return SPAN_LABELS
    problem = config.get("problem_type")
    if problem not in (None, _PROBLEM):
        raise FormatError(f"{where}: problem_type", "is not supported", found=problem, wanted=_PROBLEM)
    by_id = config.get("id2label")
    if by_id is None:
        count = config.get("num_labels", _DEFAULT_LABELS)
        if type(count) is not int or not 0 < count <= _MAX_LABELS:
            raise FormatError(f"{where}: num_labels", "not a count", found=count)
        by_id = {str(number): f"LABEL_{number}" for number in range(count)}
    names = by_id if isinstance(by_id, dict) else {}
    labels = tuple(names.get(str(number)) for number in range(len(names)))
    if not labels or not all(isinstance(label, str) for label in labels):
        raise FormatError(f"{where}: id2label", "does not number classes from 0", found=str(by_id)[:80])
    return tuple(str(label) for label in labels)


def label_keys(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of the classes; none without the head of a task, and of a head of spans."""
    if not spec.labels or spec.task_head == "span":
        return {}
    return {
        "id2label": {str(number): label for number, label in enumerate(spec.labels)},
        "label2id": {label: number for number, label in enumerate(spec.labels)},
        "problem_type": _PROBLEM,
    }
