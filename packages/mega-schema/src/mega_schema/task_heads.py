"""The head of a task on an encoder: its outputs, and the model that has it in place of BERT's own heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from mega_schema.spec import ModelSpec

TaskHead = Literal["none", "classification", "multiple_choice", "span", "token_classification"]
HEAD = "task_head"  # its name in the parameter table
# of Hugging Face's classes
FOREIGN_HEADS: Mapping[str, TaskHead] = MappingProxyType(
    {
        "BertForSequenceClassification": "classification",
        "MegatronBertForSequenceClassification": "classification",
        "BertForQuestionAnswering": "span",
        "MegatronBertForQuestionAnswering": "span",
        "BertForTokenClassification": "token_classification",
        "MegatronBertForTokenClassification": "token_classification",
    }
)
SPAN_LABELS = ("start", "end")  # outputs of the head of spans, for every token

_LANGUAGE_MODEL_FIELDS: Mapping[str, object] = MappingProxyType(
    {"binary_head": False, "head_transform": "none", "head_bias": False}
)


def add_task_head(spec: ModelSpec, head: TaskHead, labels: Sequence[str]) -> ModelSpec:
    """Return the encoder with the head of a task instead of the heads of its pretraining.

    A head that reads only the first token of a row has a pooler.
    """
    fields = dict(_LANGUAGE_MODEL_FIELDS) | {"pooler": not reads_every_token(head)}
    return dataclasses.replace(spec, task_head=head, labels=tuple(labels), **fields)  # type: ignore[arg-type]  # fields of these types


def reads_every_token(head: TaskHead) -> bool:
    """Whether the head computes outputs for every token of a row, without a pooler."""
    return head in ("span", "token_classification")


def head_outputs(spec: ModelSpec) -> int:
    """Return the outputs of the task's head: for each class, for a choice, or for begin and end."""
    return 1 if spec.task_head == "multiple_choice" else len(spec.labels)


def outputs_per_sample(spec: ModelSpec, length: int) -> int:
    """Return the logits of a sample of `length` tokens."""
    return len(spec.labels) * (length if reads_every_token(spec.task_head) else 1)


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
    if spec.task_head == "span" and labels != SPAN_LABELS:
        raise ConfigError(
            "model.labels", "do not fit a head of spans", found=list(labels), wanted=list(SPAN_LABELS)
        )
    wanted_fields = {**_LANGUAGE_MODEL_FIELDS, "pooler": not reads_every_token(spec.task_head)}
    for name, value in wanted_fields.items():
        if getattr(spec, name) != value:
            found = getattr(spec, name)
            raise ConfigError(f"model.{name}", "does not fit model.task_head", found=found, wanted=value)
