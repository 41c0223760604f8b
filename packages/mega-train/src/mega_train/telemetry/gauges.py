"""Gauges of a run, with units in their names: for Prometheus and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mega_train.telemetry.events import CheckpointSaved, Event, LogLine, StepEnd, TrainStart, ValidationEnd

GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "iterations": "optimizer steps of the whole run",
        "parameters": "parameters of the model",
        "ranks": "processes of the run",
        "started_timestamp_seconds": "time at which this process started to train",
        "iteration": "completed optimizer steps",
        "step_timestamp_seconds": "time at which the last optimizer step ended",
        "consumed_samples": "training samples consumed",
        "consumed_tokens": "tokens read of the consumed samples",
        "skipped_samples": "samples of steps without an update",
        "global_batch_size": "samples of an optimizer step",
        "seq_length": "tokens of a sample",
        "loss": "nats per token, of the last step",
        "loss_term": "nats, each term of the last step's loss, such as lm loss and sop loss",
        "learning_rate": "of the last step",
        "grad_norm": "gradient norm of the last step, before clipping",
        "loss_scale": "factor by which the loss is multiplied",
        "iteration_seconds": "seconds per step, mean since the last log line",
        "tokens_per_second": "over all ranks, since the last log line",
        "tflops_per_rank": "1e12 floating-point operations a second that the model needs",
        "mfu_ratio": "model FLOPs utilization: fraction of the device's peak FLOP/s",
        "eta_seconds": "estimated remaining seconds, at the speed since the last log line",
        "memory_bytes": "memory of rank 0",
        "phase_seconds": "seconds per step of each phase on rank 0, by the names of Megatron's timers",
        "validation_loss": "nats per token, by split",
        "validation_loss_term": "nats, each term of the validation loss, by split",
        "validation_perplexity": "e to the validation loss, by split",
        "last_checkpoint_iteration": "iteration of the newest checkpoint",
        "checkpoint_blocked_seconds": "seconds that the last save blocked training",
        "checkpoint_write_seconds": "seconds from the start of the last save to its end",
        "checkpoint_failed": "1 if the last save failed, else 0",
    }
)
LABELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "loss_term": ("term",),
        "memory_bytes": ("kind",),
        "phase_seconds": ("phase",),
        "validation_loss": ("split",),
        "validation_loss_term": ("split", "term"),
        "validation_perplexity": ("split",),
    }
)

GaugeValue = tuple[str, float, tuple[str, ...]]  # name, value, values of the labels


def gauge_values(event: Event, now: float) -> Iterator[GaugeValue]:
    """Yield the gauge values of an event.

    Args:
        now: seconds since 1970.
    """
    for name, value in _unlabelled_values(event, now):
        if value is not None:
            yield name, value, ()
    if isinstance(event, StepEnd):
        for term, loss in event.loss_terms.items():
            yield "loss_term", loss, (term,)
    if isinstance(event, ValidationEnd):
        yield "validation_loss", event.loss, (event.split,)
        for term, loss in event.loss_terms.items():
            yield "validation_loss_term", loss, (event.split, term)
        if event.perplexity is not None:
            yield "validation_perplexity", event.perplexity, (event.split,)
    if isinstance(event, LogLine):
        for kind, num_bytes in event.memory.items():
            if kind != "allocated_count":
                yield "memory_bytes", num_bytes, (kind,)
        for phase, seconds in event.timers.items():
            yield "phase_seconds", seconds, (phase,)


def _unlabelled_values(event: Event, now: float) -> Iterator[tuple[str, float | None]]:
    match event:
        case TrainStart():
            yield "iterations", event.iterations
            yield "parameters", event.parameters
            yield "ranks", event.world
            yield "started_timestamp_seconds", now
            yield "iteration", event.iteration
            yield "consumed_samples", event.consumed_samples
        case StepEnd():
            yield "iteration", event.iteration
            yield "step_timestamp_seconds", now
            yield "consumed_samples", event.consumed_samples
            yield "skipped_samples", event.skipped_samples
            yield "global_batch_size", event.global_batch_size
            yield "seq_length", event.seq_length
            yield "loss", event.loss
            yield "learning_rate", event.learning_rate
            yield "grad_norm", event.grad_norm
            yield "loss_scale", event.loss_scale
        case LogLine():
            yield "consumed_tokens", event.consumed_tokens
            yield "iteration_seconds", event.iteration_seconds
            yield "tokens_per_second", event.tokens_per_second
            yield "tflops_per_rank", event.tflops
            yield "mfu_ratio", event.mfu
            yield "eta_seconds", event.eta_seconds
        case CheckpointSaved():
            yield "last_checkpoint_iteration", None if event.error else event.iteration
            yield "checkpoint_blocked_seconds", event.blocked_seconds
            yield "checkpoint_write_seconds", event.write_seconds
            yield "checkpoint_failed", float(bool(event.error))
