"""The training loop: steps, log lines, validations, checkpoints, in Megatron's order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import chain

import torch

from mega_schema.errors import ConfigError, MegaError
from mega_train.data.blend_spec import DEFAULT_SPLIT
from mega_train.data.dataloaders import SampleReader
from mega_train.engine.trainer import NonFiniteLossError, Trainer
from mega_train.fault_tolerance.exit_conditions import EVAL_ONLY, LAST_ITERATION, ExitConditions, ExitReason
from mega_train.planning.flops import flops_per_token
from mega_train.planning.hardware import peak_flops
from mega_train.telemetry.events import LogLine, Message, StepEnd, TrainExit, ValidationEnd
from mega_train.telemetry.memory_usage import memory_stats
from mega_train.telemetry.observers import Observers
from mega_train.telemetry.profiler import Profiler
from mega_train.telemetry.timers import reduce_timers

_LONG_WAIT = 1.0  # seconds of waiting for the previous checkpoint that are reported
Clock = Callable[[], float]


class TrainLoop:
    """The steps of a run, and logging, validation and checkpoints between them.

    Attributes:
        steps_since_log: steps since the last log line. Their seconds exclude validations and checkpoints,
            which are not the model's throughput.
    """

    def __init__(
        self,
        trainer: Trainer,
        observers: Observers,
        clock: Clock = time.perf_counter,
        exit_conditions: ExitConditions | None = None,
        wall_clock: Clock = time.time,
    ) -> None:
        """
        Args:
            observers: receive the events; empty on ranks other than the first.
            clock: seconds from any origin.
            wall_clock: seconds since 1970.
        """
        self.trainer = trainer
        self.observers = observers
        self.clock = clock
        self.wall_clock = wall_clock
        self.exit_conditions = exit_conditions or ExitConditions(trainer.config, trainer.mesh, clock=clock)
        self.start_time = clock()
        self.steps_since_log: list[StepEnd] = []
        log, device = trainer.config.run.log, trainer.mesh.device
        self.profiler = Profiler.from_config(trainer.config.run, trainer.mesh.rank, device)
        self.peak_flops = (
            1e12 * log.peak_tflops
            if log.peak_tflops is not None
            else _device_peak_flops(device, trainer.dtype)
        )

    def run(self) -> ExitReason:
        """Train until an exit condition holds; the last step is always saved."""
        trainer, config = self.trainer, self.trainer.config.run
        first_iteration = trainer.iteration
        reason = self.exit_conditions.check_before_run(trainer.iteration)
        if reason is EVAL_ONLY:
            self._evaluate_only()
        if reason is LAST_ITERATION:
            self.observers.on_event(
                Message(f"nothing is left to train: {trainer.config.iterations} iterations are done")
            )
        while reason is None:
            self.profiler.before_step(trainer.iteration)
            self._step()
            self.profiler.after_step(trainer.iteration)
            trainer.saver.poll()
            reason = self.exit_conditions.check_after_step(trainer.iteration)
            if self.steps_since_log and (reason or trainer.iteration % config.log.interval == 0):
                self._log()
            if self._should_validate(reason):
                for name, samples in trainer.valid.items():
                    self._validate(name, samples)
            if config.checkpoint.interval and trainer.iteration % config.checkpoint.interval == 0:
                trainer.save()
            self._report_saves()
        self.profiler.close()
        self._save_last(always=reason is LAST_ITERATION or trainer.iteration > first_iteration)
        trainer.sharding.wait_all_gather()
        if reason is LAST_ITERATION and trainer.iteration > first_iteration:
            for name, samples in trainer.test.items():
                self._validate(name, samples)
        if reason.message:
            self.observers.on_event(TrainExit(iteration=trainer.iteration, reason=reason.name))
            self.observers.on_event(
                Message(f"left after iteration {trainer.iteration}: {reason.message}; {trainer.resume_hint}")
            )
        return reason

    def _save_last(self, *, always: bool) -> None:
        """Save the last step; retry once if its save failed.

        Raises:
            MegaError: it could not be saved.
        """
        trainer = self.trainer
        saves = self.trainer.saver
        run = self.trainer.config.run.checkpoint.save
        saves.finish()
        if run is not None and always and saves.saved_at != trainer.iteration:
            trainer.save()
            saves.finish()
        self._report_saves()
        if saves.last_error:
            hint = f"make room there; {trainer.resume_hint}"
            what = f"no checkpoint of iteration {trainer.iteration}, the last"
            raise MegaError(run, what, found=saves.last_error, hint=hint)

    def _report_saves(self) -> None:
        for saved in self.trainer.saver.finished:
            self.observers.on_event(saved)
            if saved.waited > _LONG_WAIT:
                condition = f"until the checkpoint before that of iteration {saved.iteration} was written"
                self.observers.on_event(Message(f"waited {saved.waited:.1f} s {condition}"))
        self.trainer.saver.finished.clear()

    def _should_validate(self, reason: ExitReason | None) -> bool:
        if reason is not None and reason.is_urgent:
            return False
        due = self.trainer.iteration % self.trainer.config.run.evaluation.interval == 0
        return due or reason is LAST_ITERATION

    def _evaluate_only(self) -> None:
        trainer, data = self.trainer, self.trainer.config.run.data
        if not trainer.valid and not trainer.test:
            if data.has_dataset_per_split:
                raise ConfigError(
                    "--valid-data-path", "missing", wanted="what to validate on", hint="--valid-data-path P"
                )
            raise ConfigError(
                "--split",
                "leaves nothing to validate",
                found=data.split or DEFAULT_SPLIT,
                wanted="a second share above 0",
                hint="--split 0,100,0",
            )
        for name, reader in chain(trainer.valid.items(), trainer.test.items()):
            self._validate(name, reader)

    def _step(self) -> None:
        """Do one step, or skip a range of --skip-train-iteration-range."""
        trainer = self.trainer
        lr = self.trainer.lr
        consumed_before = self.trainer.consumed_samples
        for steps in trainer.config.skipped_iterations:
            if trainer.iteration + 1 in steps:
                trainer.skip_to(min(steps[-1], trainer.config.iterations))
                amount = f"{trainer.consumed_samples - consumed_before} samples, --skip-train-iteration-range"
                self.observers.on_event(
                    Message(f"passed over iterations {steps[0]} to {steps[-1]} ({amount})")
                )
                return
        start_time = self.clock()
        seq_length = trainer.seq_length
        try:
            loss, norm = trainer.step(lr)
        except NonFiniteLossError:
            trainer.saver.finish()  # the run ends: finish the last good checkpoint
            raise
        step_end = StepEnd(
            iteration=trainer.iteration,
            consumed_samples=trainer.consumed_samples,
            loss=loss if math.isfinite(loss) else None,
            rate=lr,
            next_rate=trainer.lr,
            gradient_norm=norm if math.isfinite(norm) else None,
            skipped_samples=trainer.skipped_samples,
            loss_scale=trainer.loss_scaler.value,
            global_batch_size=trainer.consumed_samples - consumed_before,
            seq_length=seq_length,
            seconds=self.clock() - start_time,
            extra=dict(trainer.extra),
        )
        self.steps_since_log.append(step_end)
        self.observers.on_event(step_end)

    def _log(self) -> None:
        trainer = self.trainer
        config = self.trainer.config
        log = self.trainer.config.run.log
        last_step = self.steps_since_log[-1]
        steps = len(self.steps_since_log)
        seconds = sum(step.seconds for step in self.steps_since_log)
        updates = [step for step in self.steps_since_log if step.gradient_norm is not None]
        losses = [step.loss for step in updates if step.loss is not None]
        flops = sum(
            step.tokens * flops_per_token(config.spec, step.seq_length) for step in self.steps_since_log
        )
        flops_per_rank = flops / seconds / config.layout.world
        timers = {name: phase_seconds / steps for name, phase_seconds in trainer.timers.pop().items()}
        log_line = LogLine(
            iteration=last_step.iteration,
            iterations=config.iterations,
            consumed_samples=last_step.consumed_samples,
            consumed_tokens=trainer.consumed_tokens,
            loss=sum(losses) / len(losses) if losses else None,
            rate=last_step.rate,
            gradient_norm=updates[-1].gradient_norm if updates else None,
            skipped=steps - len(updates),
            loss_scale=last_step.loss_scale,
            step_seconds=seconds / steps,
            tokens_per_second=sum(step.tokens for step in self.steps_since_log) / seconds,
            seconds=self.clock() - self.start_time,
            global_batch_size=last_step.global_batch_size,
            seq_length=last_step.seq_length,
            tflops=flops_per_rank / 1e12,
            mfu=flops_per_rank / self.peak_flops if self.peak_flops else None,
            time=self.wall_clock(),
            memory=memory_stats(trainer.mesh.device),
            timers=timers,
            timers_of_ranks=reduce_timers(timers, log.timing_level, log.timing_option, trainer.mesh),
            extra=last_step.extra,
        )
        self.observers.on_event(log_line)
        self.steps_since_log = []

    def _validate(self, name: str, reader: SampleReader) -> None:
        trainer = self.trainer
        start_time = self.clock()
        loss = trainer.evaluate(reader)
        self.observers.on_event(
            ValidationEnd(
                of=name,
                iteration=trainer.iteration,
                consumed_samples=trainer.consumed_samples,
                loss=loss,
                perplexity=math.exp(min(20, loss)),  # Megatron's cap
                seconds=self.clock() - start_time,
            )
        )


def _device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the device's peak FLOP/s in this dtype, where it is known."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), half=dtype != torch.float32)
