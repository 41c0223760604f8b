"""Events of a run, for its observers.

An event is a frozen value; its `name`, if any, is its name in `events.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStart:
    """A process starts to train, from new weights or from a checkpoint.

    Attributes:
        iteration, consumed_samples: where it starts.
        parameters: of the whole model.
        objective: what a decoder is trained on, unless each token predicts the next.
        layout: ranks by axis.
        global_batch_size: samples of the first step.
        kernels: the kernels between matrix products.
        loaded: the checkpoint it starts from; empty for new weights.
        config: the configuration, section by section.
        time: seconds since 1970.
    """

    name: ClassVar[str] = "train_start"
    iteration: int
    iterations: int
    consumed_samples: int
    family: str
    parameters: int
    layout: Mapping[str, int]
    world: int
    global_batch_size: int
    seq_length: int
    device: str
    kernels: str = ""
    loaded: str = ""
    objective: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """An optimizer step ended.

    Attributes:
        loss: in nats per token; None if it was not finite.
        loss_terms: the terms of the loss by Megatron's names; empty if it has one.
        learning_rate: of this step.
        next_learning_rate: of the next step, which Megatron logs; None if it is not known.
        grad_norm: before clipping; None if it was not finite.
        skipped_samples: of all steps so far without an update.
        loss_scale: of the next step.
        seconds: duration of the step.
        extra: numbers of --log-params-norm and --log-num-zeros-in-grad, by Megatron's names.
    """

    iteration: int
    consumed_samples: int
    loss: float | None
    loss_terms: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float
    next_learning_rate: float | None = None
    grad_norm: float | None
    skipped_samples: int
    loss_scale: float
    global_batch_size: int
    seq_length: int
    seconds: float
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the step over all ranks."""
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Progress of a run, every --log-interval steps.

    Attributes:
        consumed_tokens: tokens read from the consumed samples; a curriculum reads fewer.
        loss: mean over the steps since the last line, in nats per token; None if all were skipped.
        loss_terms: likewise, the terms of the loss by Megatron's names; empty if it has one.
        learning_rate: of the last step.
        grad_norm: of the last step with an update, before clipping.
        skipped: steps without an update, because loss or gradient were not finite. They do not count in
            `loss` and `grad_norm`.
        loss_scale: of the next step.
        iteration_seconds: mean over the steps since the last line.
        tokens_per_second: likewise, over all ranks.
        tflops: 1e12 floating-point operations a second that the model needs (`planning.flops`), per rank.
        mfu: these as a fraction of the device's peak; None if that is not known.
        seconds: since this process started to train.
        time: seconds since 1970.
        memory: bytes of rank 0 (`telemetry.memory_usage`), and the number of blocks.
        timers: seconds per step of each phase on rank 0.
        timers_of_ranks: for the phases of --timing-log-level, by --timing-log-option: the maximum of all
            ranks, minimum and maximum, or every rank's.
    """

    name: ClassVar[str] = "train_log"
    iteration: int
    iterations: int
    consumed_samples: int
    loss: float | None
    loss_terms: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float
    grad_norm: float | None
    skipped: int
    loss_scale: float
    iteration_seconds: float
    tokens_per_second: float
    seconds: float
    global_batch_size: int
    seq_length: int
    tflops: float
    consumed_tokens: int = 0
    mfu: float | None = None
    time: float = 0.0
    memory: Mapping[str, int] = field(default_factory=dict)
    timers: Mapping[str, float] = field(default_factory=dict)
    timers_of_ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def eta_seconds(self) -> float:
        """Estimated remaining seconds, at the speed since the last log line."""
        return (self.iterations - self.iteration) * self.iteration_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationEnd:
    """A validation ended.

    Attributes:
        split: the validated split: "validation", "test", or the name of one of several validation sets.
        loss: in nats per token.
        loss_terms: the terms of the loss by Megatron's names; empty if it has one.
        perplexity: e to the loss, or to its "lm loss", which is capped at 20 as in Megatron; None for a task.
        metrics: of a task, by name.
    """

    name: ClassVar[str] = "validation"
    split: str = "validation"
    iteration: int
    consumed_samples: int
    loss: float
    loss_terms: Mapping[str, float] = field(default_factory=dict)
    perplexity: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint was written, or its save failed.

    Attributes:
        blocked_seconds: how long training was blocked.
        wait_seconds: the part of `blocked_seconds` that was spent waiting for the previous checkpoint.
        write_seconds: from the start of the save to its end.
        error: why the save failed; empty if it succeeded.
    """

    name: ClassVar[str] = "checkpoint"
    iteration: int
    blocked_seconds: float
    wait_seconds: float = 0.0
    write_seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnd:
    """A program of --evaluation-commands has evaluated a checkpoint; later events may come before it.

    Attributes:
        iteration: of the checkpoint.
        task: with its convention.
        metrics: values by name.
        result: the file of the result.
        seconds: duration of the program.
    """

    name: ClassVar[str] = "evaluation"
    iteration: int
    task: str
    metrics: Mapping[str, float]
    result: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainExit:
    """A run exits before its end."""

    name: ClassVar[str] = "train_exit"
    iteration: int
    reason: str


@dataclass(frozen=True, slots=True)
class Message:
    """Text for the user."""

    text: str


Event = TrainStart | StepEnd | LogLine | ValidationEnd | CheckpointSaved | EvaluationEnd | TrainExit | Message
