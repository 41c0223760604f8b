"""What happens to a run, as its observers are told it.

An event is a frozen value; its `name`, where it has one, is its line's in `events.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStart:
    """A process begins to train, anew or from a checkpoint.

    Attributes:
        iteration, consumed_samples: where it begins.
        parameters: of the whole model.
        layout: ranks by axis.
        global_batch_size: samples of the first step.
        kernels: whose compute what lies between matrix products.
        loaded: the checkpoint it begins with; empty where its weights are new.
        config: what was said of the run, section by section.
        time: seconds since 1970.
    """

    name: ClassVar[str] = "start"
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
    config: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """An optimizer step was done.

    Attributes:
        loss: in nats per token; None where it was not finite.
        rate: the learning rate it was done with.
        next_rate: that of the next step, which Megatron logs; None where it is not known.
        gradient_norm: before clipping; None where it was not finite.
        skipped_samples: of all steps so far that updated nothing.
        loss_scale: what the loss is multiplied by in the next step.
        seconds: that it took.
        extra: what --log-params-norm and --log-num-zeros-in-grad ask for, by Megatron's names.
    """

    iteration: int
    consumed_samples: int
    loss: float | None
    rate: float
    next_rate: float | None = None
    gradient_norm: float | None
    skipped_samples: int
    loss_scale: float
    global_batch_size: int
    seq_length: int
    seconds: float
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of all ranks together."""
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Where a run stands, every --log-interval steps.

    Attributes:
        consumed_tokens: of the samples consumed, those that were read: a curriculum leaves some out.
        loss: mean over the steps since the last line, in nats per token; None where all were skipped.
        rate: learning rate of the step just done.
        gradient_norm: of the last of them, before clipping.
        skipped: how many of them updated nothing, since loss or gradient were not finite. They are not in the
            two numbers above.
        loss_scale: what the loss is multiplied by in the next step.
        step_seconds: mean over the steps since the last line.
        tokens_per_second: likewise, all ranks together.
        tflops: 1e12 floating-point operations a second that the model needs (`planning.flops`), per rank.
        mfu: these as a share of what the device can do; None where that is not known.
        seconds: since this process began to train.
        time: seconds since 1970.
        memory: bytes of the first rank (`telemetry.memory`), and how many blocks they are.
        timers: seconds a step that the first rank spent in each phase.
        timers_of_ranks: of the phases of --timing-log-level what --timing-log-option asks for: the most of
            any rank, the least and the most, or every rank's.
    """

    name: ClassVar[str] = "train"
    iteration: int
    iterations: int
    consumed_samples: int
    loss: float | None
    rate: float
    gradient_norm: float | None
    skipped: int
    loss_scale: float
    step_seconds: float
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
    def seconds_left(self) -> float:
        """At the pace of the steps since the last line."""
        return (self.iterations - self.iteration) * self.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationEnd:
    """Validation batches were scored.

    Attributes:
        of: the name of the group of samples they are from; "validation" where there is one.
        loss: in nats per token.
        perplexity: e to the loss, which is capped at 20 as in Megatron.
    """

    name: ClassVar[str] = "validation"
    of: str = "validation"
    iteration: int
    consumed_samples: int
    loss: float
    perplexity: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint was written, or could not be.

    Attributes:
        seconds: that training stood still for it.
        waited: of these, for the checkpoint before, which was still being written.
        written: seconds from when it was begun until it was there, or given up.
        problem: why it could not be written; empty where it was.
    """

    name: ClassVar[str] = "save"
    iteration: int
    seconds: float
    waited: float = 0.0
    written: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainExit:
    """A run leaves before its end."""

    name: ClassVar[str] = "leave"
    iteration: int
    reason: str


@dataclass(frozen=True, slots=True)
class Message:
    """Words for a person."""

    text: str


Event = TrainStart | StepEnd | LogLine | ValidationEnd | CheckpointSaved | TrainExit | Message
