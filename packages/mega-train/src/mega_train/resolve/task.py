"""Derive the duration of a fine-tuning run and its model's head from the examples of the task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import MappingProxyType

from mega_schema.app.config import config_keys
from mega_schema.errors import ConfigError, MegaError
from mega_schema.spec import ModelSpec
from mega_schema.tasks.pair_tasks import TEXT2TEXT, metrics_of_task
from mega_schema.tasks.span_options import SpanOptions
from mega_train.config import RunConfig, TaskConfig
from mega_train.config.refusals import Refusals
from mega_train.data.task_data import TaskData
from mega_train.resolve.batch import batch_sizes
from mega_train.resolve.model import add_run_head

# fields of TaskConfig that only some tasks have
_OWNERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("labels", "text_keys", "label_key", "class_weights"), "classification"),
        **dict.fromkeys(("input_key", "target_key"), TEXT2TEXT),
        **{field.name: "SQUAD" for field in fields(SpanOptions)},
    }
)


def apply_task(
    run: RunConfig, data: TaskData, world: int, loaded_spec: ModelSpec | None
) -> tuple[RunConfig, ModelSpec | None]:
    """Return the run with its steps, classes and weights, and the loaded model with the task's head.

    A validation and a checkpoint follow every epoch.

    Args:
        world: number of processes.
        loaded_spec: the model of the checkpoint.

    Raises:
        ConfigError, RefusedRunError: options do not fit the task, the examples or the checkpoint.
    """
    refusals = Refusals()
    refusals.extend(_check_options(run))
    weights = refusals.attempt(_class_weights, data) or ()
    task = replace(data.config, class_weights=tuple(map(repr, weights)))
    run = replace(run, task=task)
    duration = refusals.attempt(_apply_duration, run, data, world)
    spec = loaded_spec
    if loaded_spec is not None and not loaded_spec.causal:
        spec = refusals.attempt(_add_loaded_head, run, loaded_spec)
    refusals.raise_any()
    assert duration is not None
    return duration, spec


def check_no_task(run: RunConfig, command: str) -> None:
    """Check that a command that trains on text got no options of tasks.

    Raises:
        ConfigError: it did.
    """
    if run.task != TaskConfig():
        flag = "--task" if run.task.name else "--train-data"
        hint = "mega-train finetune, or leave the options of tasks out"
        raise ConfigError(flag, f"does not apply to mega-train {command}", found="given", hint=hint)


def _check_options(run: RunConfig) -> Iterator[MegaError]:
    """Refuse options of pretraining."""
    epochs = run.task.epochs
    if epochs is None:
        yield ConfigError("--epochs", "missing", wanted="passes over --train-data", hint="--epochs 3")
    elif epochs < 0:
        yield ConfigError("--epochs", "not a count", found=epochs, wanted="0 or more")
    data = run.data
    refused = {
        "--data-path": (bool(data.path or data.path_file or data.has_dataset_per_split), "--train-data FILE"),
        "--mock-data": (data.mock, "leave it out"),
        "--sft": (data.sft, "leave it out"),
        "--dataloader-type": (data.order == "cyclic", "leave it out: every epoch is shuffled"),
        "--rampup-batch-size": (run.batch.rampup is not None, "leave it out"),
        "--train-samples": (run.train.samples is not None, "--epochs N"),
        "--keep-last": (
            run.checkpoint.keep_last is not None,
            "leave it out: the best epoch may be an old one",
        ),
    }
    for flag, (is_given, hint) in refused.items():
        if is_given:
            yield ConfigError(flag, "does not apply to a task", found="given", hint=hint)
    yield from _check_task_options(run.task)
    assert run.task.name is not None
    metrics = metrics_of_task(run.task.name)
    if run.task.best_metric not in (None, *metrics):
        found, wanted = run.task.best_metric, " | ".join(metrics)
        yield ConfigError("--best-metric", "is not a metric of the task", found=found, wanted=wanted)
    if not run.task.valid and epochs == 0:
        yield ConfigError("--valid-data", "missing", wanted="files to evaluate")
    if epochs == 0 and run.checkpoint.load is None:
        yield ConfigError(
            "--load", "missing", wanted="a checkpoint to evaluate", hint="--epochs 3 trains one"
        )


def _check_task_options(task: TaskConfig) -> Iterator[MegaError]:
    """Refuse options of other tasks, which would change nothing."""
    default = TaskConfig()
    group = task.name if task.name in (TEXT2TEXT, "SQUAD", "TAG") else "classification"
    for key in config_keys(RunConfig):
        option = key.field.name
        owner = _OWNERS.get(option, group) if key.section == "task" else group
        is_shared = group == "TAG" and option == "labels"
        if owner != group and not is_shared:
            value = getattr(task, option)
            if value != getattr(default, option):
                found = " ".join(value) if isinstance(value, tuple) else value
                yield ConfigError(key.flag, f"is an option of {owner}", found=found, hint="leave it out")


def _class_weights(data: TaskData) -> tuple[float, ...]:
    """Return the weights of the classes; empty if all are 1.

    Raises:
        ConfigError: they are not as many numbers above 0 as there are classes.
    """
    words = data.config.class_weights
    if not words or not data.training or data.config.name in (TEXT2TEXT, "SQUAD", "TAG"):
        return ()
    if words == ("balanced",):
        return data.balanced_weights
    try:
        weights = tuple(float(word) for word in words)
    except ValueError:
        weights = ()
    if len(weights) != len(data.config.labels) or not all(0 < w < math.inf for w in weights):
        raise ConfigError(
            "--class-weights",
            "are not a weight above 0 for each class",
            found=" ".join(words),
            wanted=f"{len(data.config.labels)} numbers for {' '.join(data.config.labels)}, or balanced",
        )
    return weights


def _apply_duration(run: RunConfig, data: TaskData, world: int) -> RunConfig:
    """Return the run with its steps, and with a validation and a checkpoint after every epoch.

    Raises:
        ConfigError: the examples do not fill a batch, or --train-iters disagrees with the epochs.
    """
    epochs = run.task.epochs or 0
    if not epochs:
        # a run that takes no step reads no schedule: its own would be refused beside the checkpoint's
        optimizer = replace(run.optimizer, checkpoint_schedule=True, override_schedule=False)
        return replace(run, train=replace(run.train, skip=True), optimizer=optimizer)
    parallel = run.parallel
    _, batch = batch_sizes(run, max(1, world // (parallel.tp * parallel.pp * parallel.cp)))
    count = data.training_samples
    steps = -(-count // batch) if run.task.keep_last_batch else count // batch
    if not steps:
        raise ConfigError(
            "--train-data",
            "has fewer examples than a batch",
            found=f"{count} examples" if data.windows is None else f"{count} windows",
            wanted=f"{batch} or more",
            hint="--keep-last-batch, or a smaller --global-batch-size",
        )
    if run.train.iterations not in (None, epochs * steps):
        raise ConfigError(
            "--train-iters",
            "disagrees with --epochs",
            found=run.train.iterations,
            wanted=f"{epochs * steps} steps of {epochs} epochs",
            hint="leave it out",
        )
    interval = run.checkpoint.interval or (None if run.checkpoint.save is None else steps)
    if interval is not None and interval > 0 and steps % interval:
        raise ConfigError(
            "--save-interval",
            "leaves out epochs, of which one may be the best",
            found=interval,
            wanted=f"a divisor of {steps}, the steps of an epoch",
            hint="leave it out: every epoch is saved",
        )
    return replace(
        run,
        train=replace(run.train, iterations=epochs * steps),
        evaluation=replace(run.evaluation, interval=steps),
        checkpoint=replace(run.checkpoint, interval=interval),
    )


def _add_loaded_head(run: RunConfig, spec: ModelSpec) -> ModelSpec:
    """Return the checkpoint's model with the head of the task.

    Raises:
        ConfigError: the run resumes from a checkpoint of another head.
    """
    with_head = add_run_head(run, spec)
    if not run.checkpoint.finetune and with_head != spec:
        raise ConfigError(
            "--load",
            "is not a checkpoint of this task",
            found=f"labels {' '.join(spec.labels)}" if spec.labels else "a model without the head of a task",
            wanted=f"labels {' '.join(run.task.labels)}",
            hint=f"--pretrained-checkpoint {run.checkpoint.load} starts from its weights",
        )
    return with_head
