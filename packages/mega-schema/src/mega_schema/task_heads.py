"""The head of a task on an encoder: its outputs, and the model that has it in place of BERT's own heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from mega_schema.spec import ModelSpec

TaskHead = Literal["none", "classification", "multiple_choice"]
HEAD = "task_head"  # its name in the parameter table

_LANGUAGE_MODEL_FIELDS: Mapping[str, object] = MappingProxyType(
    {"binary_head": False, "head_transform": "none", "head_bias": False}
)


def add_task_head(spec: ModelSpec, head: TaskHead, labels: Sequence[str]) -> ModelSpec:
    """Return the encoder with the head of a task and a pooler, and without the heads of its pretraining."""
    fields = dict(_LANGUAGE_MODEL_FIELDS)
    return dataclasses.replace(spec, task_head=head, labels=tuple(labels), pooler=True, **fields)  # type: ignore[arg-type]  # fields of these types


def head_outputs(spec: ModelSpec) -> int:
    """Return the outputs of the task's head: one for each class, or one for a choice."""
    return 1 if spec.task_head == "multiple_choice" else len(spec.labels)


def rows_per_sample(spec: ModelSpec) -> int:
    """Return the rows of a sample: one for each choice of multiple choice, else one."""
    return len(spec.labels) if spec.task_head == "multiple_choice" else 1


def check_task_head(spec: ModelSpec) -> None:
    """Check that labels and heads fit the head of the task.

    Raises:
        ConfigError: they do not.
    """
    labels = spec.labels
    if not all(isinstance(label, str) for label in labels) or len(set(labels)) < len(labels):
        raise ConfigError("model.labels", "are not different names", found=list(labels))
    if spec.task_head == "none":
        if labels:
            raise ConfigError("model.labels", "need model.task_head", found=list(labels), wanted="none")
        return
    if len(labels) < 2:
        raise ConfigError(
            "model.labels", "are too few to choose from", found=list(labels), wanted="2 or more"
        )
    for name, value in {**_LANGUAGE_MODEL_FIELDS, "pooler": True}.items():
        if getattr(spec, name) != value:
            found = getattr(spec, name)
            raise ConfigError(f"model.{name}", "does not fit model.task_head", found=found, wanted=value)
