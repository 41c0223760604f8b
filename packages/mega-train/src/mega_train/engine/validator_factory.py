"""Choose the validator of a run."""

from __future__ import annotations

from collections.abc import Callable

from mega_schema.tasks.pair_tasks import TEXT2TEXT
from mega_train.engine.span_validation import SpanValidator
from mega_train.engine.tag_validation import TagValidator
from mega_train.engine.task_validation import TaskValidator
from mega_train.engine.text2text_validation import Text2TextValidator
from mega_train.engine.trainer import Trainer
from mega_train.engine.validation import Validator
from mega_train.telemetry.observers import Observers


def build_validator(trainer: Trainer, observers: Observers, clock: Callable[[], float]) -> Validator:
    """Return the validator of the run's kind of data."""
    task = trainer.config.run.task.name
    if task is None:
        return Validator(trainer, observers, clock)
    own_kinds: dict[str, type[TaskValidator]] = {
        TEXT2TEXT: Text2TextValidator,
        "SQUAD": SpanValidator,
        "TAG": TagValidator,
    }
    kind = own_kinds.get(task, TaskValidator)
    return kind(trainer, observers, clock)
