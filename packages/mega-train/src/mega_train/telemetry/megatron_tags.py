"""Megatron's names of a run's numbers, for TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator

from mega_train.config import LoggingConfig
from mega_train.telemetry.events import EvaluationEnd, Event, LogLine, StepEnd, TrainStart, ValidationEnd

SAMPLES_SUFFIX = " vs samples"
_LOSS = "lm loss"
_MEMORY = (  # kind and Megatron's tag
    ("reserved", "mem-reserved-bytes"),
    ("allocated", "mem-allocated-bytes"),
    ("peak", "mem-max-allocated-bytes"),
    ("allocated_count", "mem-allocated-count"),
    ("resident", "mem-resident-bytes"),
)


class MegatronTags:
    """Converts events to named numbers, each with iterations and samples.

    Numbers of a step come every --tensorboard-log-interval steps, also over the consumed samples ("... vs
    samples"); means over steps come with the log line.
    """

    def __init__(self, log: LoggingConfig) -> None:
        self._log = log
        self._world = 1

    def tags(self, event: Event) -> Iterator[tuple[str, float, int]]:
        """Yield name, value, and the position on its axis."""
        match event:
            case TrainStart():
                self._world = event.world
            case StepEnd() if event.iteration % self._log.tensorboard_interval == 0:
                yield from _over_both_axes(self._step_tags(event), event.iteration, event.consumed_samples)
            case LogLine():
                yield from ((name, value, event.iteration) for name, value in self._log_tags(event))
            case EvaluationEnd():
                for name, value in event.metrics.items():
                    yield f"mega-eval/{event.task}/{name}", value, event.iteration
            case ValidationEnd():
                yield from _over_both_axes(
                    self._validation_tags(event), event.iteration, event.consumed_samples
                )

    def _step_tags(self, step_end: StepEnd) -> Iterator[tuple[str, float]]:
        log = self._log
        if log.tensorboard_learning_rate:
            # Megatron logs the rate of the next step; curves must match
            yield (
                "learning-rate",
                (
                    step_end.learning_rate
                    if step_end.next_learning_rate is None
                    else step_end.next_learning_rate
                ),
            )
        if log.tensorboard_batch_size:
            yield "batch-size", step_end.global_batch_size
        if step_end.loss is not None:
            yield from (step_end.loss_terms or {_LOSS: step_end.loss}).items()
        if log.tensorboard_loss_scale:
            yield "loss-scale", step_end.loss_scale
        if log.tensorboard_world:
            yield "world-size", self._world
        if step_end.grad_norm is not None:
            yield "grad-norm", step_end.grad_norm
        yield from step_end.extra.items()
        if step_end.skipped_samples:
            yield "skipped-train-samples", step_end.skipped_samples

    def _log_tags(self, log_line: LogLine) -> Iterator[tuple[str, float]]:
        if self._log.tensorboard_timers:
            yield "iteration-time", log_line.iteration_seconds
            yield "throughput", log_line.tflops
            timers = {
                name: max(seconds_of_ranks) for name, seconds_of_ranks in log_line.timers_of_ranks.items()
            }
            yield from ((f"{name}-time", seconds) for name, seconds in timers.items())
        if self._log.tensorboard_memory:
            yield from ((tag, log_line.memory[kind]) for kind, tag in _MEMORY if kind in log_line.memory)

    def _validation_tags(self, validation: ValidationEnd) -> Iterator[tuple[str, float]]:
        for name, value in (validation.loss_terms or {_LOSS: validation.loss}).items():
            yield f"{name} {validation.split}", value
        yield from ((f"{name} {validation.split}", value) for name, value in validation.metrics.items())
        if self._log.tensorboard_perplexity and validation.perplexity is not None:
            yield f"{_LOSS} {validation.split} ppl", validation.perplexity


def _over_both_axes(
    values: Iterator[tuple[str, float]], iteration: int, samples: int
) -> Iterator[tuple[str, float, int]]:
    for name, value in values:
        yield name, value, iteration
        yield name + SAMPLES_SUFFIX, value, samples
