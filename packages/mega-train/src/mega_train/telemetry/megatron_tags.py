"""The names that Megatron's logs give the numbers of a run, for whoever shows them by name."""

from __future__ import annotations

from collections.abc import Iterator

from mega_train.config import Log
from mega_train.telemetry.events import Began, Event, Progress, Stepped, Validated

OVER_SAMPLES = " vs samples"
_LOSS = "lm loss"
_MEMORY = (  # ours and theirs
    ("reserved", "mem-reserved-bytes"),
    ("allocated", "mem-allocated-bytes"),
    ("peak", "mem-max-allocated-bytes"),
    ("allocated_count", "mem-allocated-count"),
    ("resident", "mem-resident-bytes"),
)


class Names:
    """From events to named numbers, each with the iterations and samples done.

    A number of a step is told every --tensorboard-log-interval steps, also over the samples consumed
    ("... vs samples"); what is a mean over steps comes with the line of the log.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._world = 1

    def of(self, event: Event) -> Iterator[tuple[str, float, int]]:
        """Name, value, and the place on the axis it belongs over."""
        match event:
            case Began():
                self._world = event.world
            case Stepped() if event.iteration % self._log.tensorboard_interval == 0:
                yield from _both(self._step(event), event.iteration, event.consumed_samples)
            case Progress():
                yield from ((name, value, event.iteration) for name, value in self._line(event))
            case Validated():
                yield from _both(self._validation(event), event.iteration, event.consumed_samples)

    def _step(self, step: Stepped) -> Iterator[tuple[str, float]]:
        log = self._log
        if not log.tensorboard_no_rate:
            # Megatron's logs hold the rate of the next step, and curves are laid over its own
            yield "learning-rate", step.rate if step.next_rate is None else step.next_rate
        if log.tensorboard_batch_size:
            yield "batch-size", step.global_batch_size
        if step.loss is not None:
            yield _LOSS, step.loss
        if not log.tensorboard_no_scale:
            yield "loss-scale", step.loss_scale
        if log.tensorboard_world:
            yield "world-size", self._world
        if step.gradient_norm is not None:
            yield "grad-norm", step.gradient_norm
        yield from step.extra.items()
        if step.skipped_samples:
            yield "skipped-train-samples", step.skipped_samples

    def _line(self, now: Progress) -> Iterator[tuple[str, float]]:
        if self._log.tensorboard_timers:
            yield "iteration-time", now.step_seconds
            yield "throughput", now.tflops
            timers = {name: max(of) for name, of in now.timers_of_ranks.items()}
            yield from ((f"{name}-time", seconds) for name, seconds in timers.items())
        if self._log.tensorboard_memory:
            yield from ((theirs, now.memory[ours]) for ours, theirs in _MEMORY if ours in now.memory)

    def _validation(self, now: Validated) -> Iterator[tuple[str, float]]:
        yield f"{_LOSS} {now.of}", now.loss
        if self._log.tensorboard_perplexity:
            yield f"{_LOSS} {now.of} ppl", now.perplexity


def _both(
    named: Iterator[tuple[str, float]], iteration: int, samples: int
) -> Iterator[tuple[str, float, int]]:
    for name, value in named:
        yield name, value, iteration
        yield name + OVER_SAMPLES, value, samples
