"""Build the log lines of a run: means and rates over the steps since the last line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mega_train.engine.trainer import Trainer
from mega_train.planning.flops import flops_per_token
from mega_train.planning.hardware import peak_flops
from mega_train.telemetry.events import LogLine, StepEnd
from mega_train.telemetry.memory_usage import memory_stats
from mega_train.telemetry.timers import reduce_timers


class TrainingLog:
    """The steps since the last log line, to be summarised in the next one.

    Attributes:
        steps: end events of the steps. Their seconds exclude validations and checkpoints, which are not the
            model's throughput.
    """

    def __init__(self, trainer: Trainer, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._trainer = trainer
        self._clock = clock
        self._wall_clock = wall_clock
        self._start_time = clock()
        self._peak_flops = _peak_flops(trainer)
        self.steps: list[StepEnd] = []

    def pop_log_line(self) -> LogLine:
        """Return the log line of the steps, and reset the means. Every rank must call it."""
        trainer = self._trainer
        config = trainer.config
        log = config.run.log
        last_step = self.steps[-1]
        steps = len(self.steps)
        seconds = sum(step.seconds for step in self.steps)
        updates = [step for step in self.steps if step.grad_norm is not None]
        losses = [step.loss for step in updates if step.loss is not None]
        terms = [step.loss_terms for step in updates if step.loss is not None]
        decoder_length = config.run.encoder_data.decoder_length
        flops = sum(
            step.tokens * flops_per_token(config.spec, step.seq_length, decoder_length) for step in self.steps
        )
        flops_per_rank = flops / seconds / config.layout.world
        timers = {name: phase_seconds / steps for name, phase_seconds in trainer.timers.pop().items()}
        log_line = LogLine(
            iteration=last_step.iteration,
            iterations=config.iterations,
            consumed_samples=last_step.consumed_samples,
            consumed_tokens=trainer.state.consumed_tokens,
            loss=sum(losses) / len(losses) if losses else None,
            loss_terms=_mean_terms(terms),
            learning_rate=last_step.learning_rate,
            grad_norm=updates[-1].grad_norm if updates else None,
            skipped=steps - len(updates),
            loss_scale=last_step.loss_scale,
            iteration_seconds=seconds / steps,
            tokens_per_second=sum(step.tokens for step in self.steps) / seconds,
            seconds=self._clock() - self._start_time,
            global_batch_size=last_step.global_batch_size,
            seq_length=last_step.seq_length,
            tflops=flops_per_rank / 1e12,
            mfu=flops_per_rank / self._peak_flops if self._peak_flops else None,
            time=self._wall_clock(),
            memory=memory_stats(trainer.mesh.device),
            timers=timers,
            timers_of_ranks=reduce_timers(timers, log.timing_level, log.timing_option, trainer.mesh),
            extra=last_step.extra,
        )
        self.steps = []
        return log_line


def _mean_terms(terms_of_steps: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return the mean of each term of the loss over the steps."""
    names = terms_of_steps[0] if terms_of_steps else ()
    return {name: sum(terms[name] for terms in terms_of_steps) / len(terms_of_steps) for name in names}


def _peak_flops(trainer: Trainer) -> float | None:
    """Return --peak-tflops, or the device's peak FLOP/s in the model's dtype, if known."""
    device = trainer.mesh.device
    peak_tflops = trainer.config.run.log.peak_tflops
    if peak_tflops is not None:
        return 1e12 * peak_tflops
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), half=trainer.rt.dtype != torch.float32)
