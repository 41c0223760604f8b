"""The training loop: steps, log lines, validations, checkpoints, in Megatron's order."""

from __future__ import annotations

import math
import time

from mega_schema.errors import MegaError
from mega_train.engine.optimizer_step import NonFiniteLossError
from mega_train.engine.trainer import Trainer
from mega_train.engine.training_log import TrainingLog
from mega_train.engine.validator_factory import build_validator
from mega_train.fault_tolerance.exit_conditions import EVAL_ONLY, LAST_ITERATION, ExitConditions, ExitReason
from mega_train.telemetry.events import Message, StepEnd, TrainExit
from mega_train.telemetry.observers import Observers
from mega_train.telemetry.profiler import Profiler
from mega_train.telemetry.timers import Clock

_LONG_WAIT = 1.0  # seconds of waiting for the previous checkpoint that are reported


class TrainLoop:
    """The training loop: optimizer steps, with logging, validation and checkpoints between them."""

    def __init__(
        self,
        trainer: Trainer,
        observers: Observers,
        clock: Clock = time.perf_counter,
        exit_conditions: ExitConditions | None = None,
        wall_clock: Clock = time.time,
    ) -> None:
        """Build the loop of a trainer.

        Args:
            observers: receive the events; empty on ranks other than the first.
            clock: seconds from any origin.
            wall_clock: seconds since 1970.
        """
        self.trainer = trainer
        self.observers = observers
        self.clock = clock
        self.exit_conditions = exit_conditions or ExitConditions(trainer.config, trainer.mesh, clock=clock)
        self.log = TrainingLog(trainer, clock, wall_clock)
        self.validator = build_validator(trainer, observers, clock)
        self.profiler = Profiler.from_config(trainer.config.run, trainer.mesh.rank, trainer.mesh.device)

    def run(self) -> ExitReason:
        """Train until an exit condition holds; the last step is always saved."""
        trainer = self.trainer
        config = self.trainer.config.run
        state = self.trainer.state
        first_iteration = state.iteration
        reason = self.exit_conditions.check_before_run(state.iteration)
        if reason is EVAL_ONLY:
            self.validator.validate_only()
        if reason is LAST_ITERATION:
            self.observers.on_event(
                Message(f"nothing is left to train: {trainer.config.iterations} iterations are done")
            )
        while reason is None:
            self.profiler.before_step(state.iteration)
            self._step()
            self.profiler.after_step(state.iteration)
            trainer.saver.poll()
            reason = self.exit_conditions.check_after_step(state.iteration)
            if self.log.steps and (reason or state.iteration % config.log.interval == 0):
                self.observers.on_event(self.log.pop_log_line())
            if self.validator.is_due(reason):
                self.validator.validate(trainer.valid)
            if config.checkpoint.interval and state.iteration % config.checkpoint.interval == 0:
                trainer.save()
            self._report_saves()
        self.profiler.close()
        self._save_last(always=reason is LAST_ITERATION or state.iteration > first_iteration)
        trainer.sharding.wait_all_gather()
        if reason is LAST_ITERATION and state.iteration > first_iteration:
            self.validator.validate(trainer.test)
        if reason.message:
            hint = trainer.saver.resume_hint
            self.observers.on_event(TrainExit(iteration=state.iteration, reason=reason.name))
            self.observers.on_event(
                Message(f"exiting after iteration {state.iteration}: {reason.message}; {hint}")
            )
        return reason

    def _save_last(self, *, always: bool) -> None:
        """Save the last step; retry once if its save failed.

        Raises:
            MegaError: it could not be saved.
        """
        saver = self.trainer.saver
        iteration = self.trainer.state.iteration
        run = self.trainer.config.run.checkpoint.save
        saver.finish()
        if run is not None and always and saver.saved_at != iteration:
            self.trainer.save()
            saver.finish()
        self._report_saves()
        if saver.last_error:
            hint = f"free disk space; {saver.resume_hint}"
            what = f"no checkpoint of iteration {iteration}, the last"
            raise MegaError(run, what, found=saver.last_error, hint=hint)

    def _report_saves(self) -> None:
        for saved in self.trainer.saver.finished:
            self.observers.on_event(saved)
            if saved.wait_seconds > _LONG_WAIT:
                waited = f"waited {saved.wait_seconds:.1f} s for the previous checkpoint to finish"
                self.observers.on_event(Message(f"checkpoint {saved.iteration} {waited}"))
        self.trainer.saver.finished.clear()

    def _step(self) -> None:
        """Do one step, or skip a range of --skip-train-iteration-range."""
        trainer = self.trainer
        state = self.trainer.state
        lr = state.lr
        consumed_before = state.consumed_samples
        for steps in trainer.config.skipped_iterations:
            if state.iteration + 1 in steps:
                state.skip_to(min(steps[-1], trainer.config.iterations))
                amount = f"{state.consumed_samples - consumed_before} samples, --skip-train-iteration-range"
                self.observers.on_event(Message(f"skipped iterations {steps[0]} to {steps[-1]} ({amount})"))
                return
        start_time = self.clock()
        seq_length = state.seq_length
        try:
            loss, norm = trainer.step(lr)
        except NonFiniteLossError:
            trainer.saver.finish()  # the run ends: finish the last good checkpoint
            raise
        step_end = StepEnd(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            loss=loss if math.isfinite(loss) else None,
            loss_terms=trainer.optimizer_step.loss_terms if math.isfinite(loss) else {},
            learning_rate=lr,
            next_learning_rate=state.lr,
            grad_norm=norm if math.isfinite(norm) else None,
            skipped_samples=state.skipped_samples,
            loss_scale=trainer.loss_scaler.value,
            global_batch_size=state.consumed_samples - consumed_before,
            seq_length=seq_length,
            seconds=self.clock() - start_time,
            extra=dict(trainer.optimizer_step.extra),
        )
        self.log.steps.append(step_end)
        self.observers.on_event(step_end)
