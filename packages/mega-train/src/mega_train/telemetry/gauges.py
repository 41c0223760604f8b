"""Gauges of a run, with units in their names: for Prometheus and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mega_train.telemetry.events import CheckpointSaved, Event, LogLine, StepEnd, TrainStart, ValidationEnd

GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "iterations": "optimizer steps that the run is to do",
        "parameters": "parameters of the model",
        "ranks": "processes of the run",
        "started_timestamp_seconds": "when this process began to train",
        "iteration": "optimizer steps done",
        "step_timestamp_seconds": "when the last of them ended",
        "consumed_samples": "training samples consumed",
        "consumed_tokens": "of these, those that were read",
        "skipped_samples": "those of them whose step updated nothing",
        "global_batch_size": "samples of an optimizer step",
        "sequence_length": "tokens of a sample",
        "loss": "nats per token, of the last step",
        "learning_rate": "of the last step",
        "gradient_norm": "before clipping, of the last step",
        "loss_scale": "what the loss is multiplied by",
        "step_seconds": "mean over the steps since the last line of the log",
        "tokens_per_second": "of all ranks, over the steps since the last line of the log",
        "tflops_per_rank": "1e12 floating-point operations a second that the model needs",
        "mfu_ratio": "these as a share of what the device can do",
        "seconds_left": "at the pace since the last line of the log",
        "memory_bytes": "of the first rank",
        "phase_seconds": "a step of the first rank, by Megatron's names of phases",
        "validation_loss": "nats per token, by what it was taken of",
        "validation_perplexity": "e to this",
        "saved_iteration": "of the newest checkpoint",
        "save_seconds": "that training stood still for the last save",
        "save_written_seconds": "that the last save took to be written",
        "save_failed": "1 where the last save could not be written",
    }
)
LABELS: Mapping[str, str] = MappingProxyType(
    {
        "memory_bytes": "kind",
        "phase_seconds": "phase",
        "validation_loss": "of",
        "validation_perplexity": "of",
    }
)

GaugeValue = tuple[str, float, str]  # name, value, value of the label or an empty text


def gauge_values(event: Event, now: float) -> Iterator[GaugeValue]:
    """Yield the gauge values of an event.

    Args:
        now: seconds since 1970.
    """
    for name, value in _unlabelled_values(event, now):
        if value is not None:
            yield name, value, ""
    if isinstance(event, ValidationEnd):
        yield "validation_loss", event.loss, event.of
        yield "validation_perplexity", event.perplexity, event.of
    if isinstance(event, LogLine):
        for kind, num_bytes in event.memory.items():
            if kind != "allocated_count":
                yield "memory_bytes", num_bytes, kind
        for phase, seconds in event.timers.items():
            yield "phase_seconds", seconds, phase


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
            yield "sequence_length", event.seq_length
            yield "loss", event.loss
            yield "learning_rate", event.rate
            yield "gradient_norm", event.gradient_norm
            yield "loss_scale", event.loss_scale
        case LogLine():
            yield "consumed_tokens", event.consumed_tokens
            yield "step_seconds", event.step_seconds
            yield "tokens_per_second", event.tokens_per_second
            yield "tflops_per_rank", event.tflops
            yield "mfu_ratio", event.mfu
            yield "seconds_left", event.seconds_left
        case CheckpointSaved():
            yield "saved_iteration", None if event.problem else event.iteration
            yield "save_seconds", event.seconds
            yield "save_written_seconds", event.written
            yield "save_failed", float(bool(event.problem))
