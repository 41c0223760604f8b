"""The training loop: steps, lines of the log, validations, checkpoints, in Megatron's order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import chain

import torch

from mega_schema.errors import ConfigError, MegaError
from mega_train.data.blend_spec import SPLIT
from mega_train.data.dataloaders import Reading
from mega_train.engine.trainer import NotFinite, Trainer
from mega_train.fault_tolerance.exit_conditions import LAST, VALIDATED, Leaving, Reason
from mega_train.planning.flops import per_token
from mega_train.planning.hardware import peak_flops
from mega_train.telemetry.events import Left, Progress, Said, Stepped, Validated
from mega_train.telemetry.memory import memory
from mega_train.telemetry.observers import Observers
from mega_train.telemetry.profiler import Profiler
from mega_train.telemetry.timers import of_ranks

_LONG = 1.0  # seconds of waiting for a checkpoint before the next that a person should know of
Clock = Callable[[], float]


class Loop:
    """A run's steps, and what happens between them, until it leaves.

    Attributes:
        since: the steps since the last line of the log. Validations and checkpoints are not in their seconds:
            they are not the model's pace.
    """

    def __init__(
        self,
        trainer: Trainer,
        watch: Observers,
        clock: Clock = time.perf_counter,
        leaving: Leaving | None = None,
        today: Clock = time.time,
    ) -> None:
        """
        Args:
            watch: who is told; the ranks beside the first tell nobody.
            clock: seconds from any beginning.
            today: seconds since 1970.
        """
        self.trainer, self.watch, self.clock, self.today = trainer, watch, clock, today
        self.leaving = leaving or Leaving(trainer.plan, trainer.mesh, clock=clock)
        self.began = clock()
        self.since: list[Stepped] = []
        log, device = trainer.plan.run.log, trainer.mesh.device
        self.profiler = Profiler.of(trainer.plan.run, trainer.mesh.rank, device)
        self.peak = 1e12 * log.peak_tflops if log.peak_tflops is not None else _peak(device, trainer.dtype)

    def run(self) -> Reason:
        """Train until there is a reason to leave; the last step is saved whatever it is."""
        trainer, said = self.trainer, self.trainer.plan.run
        begins, reason = trainer.iteration, self.leaving.before(trainer.iteration)
        if reason is VALIDATED:
            self._only_validate()
        if reason is LAST:
            self.watch.see(Said(f"nothing is left to train: {trainer.plan.iterations} iterations are done"))
        while reason is None:
            self.profiler.before(trainer.iteration)
            self._step()
            self.profiler.after(trainer.iteration)
            trainer.saves.advance()
            reason = self.leaving.after(trainer.iteration)
            if self.since and (reason or trainer.iteration % said.log.interval == 0):
                self._line()
            if self._validates(reason):
                for name, samples in trainer.valid.items():
                    self._score(name, samples)
            if said.checkpoint.interval and trainer.iteration % said.checkpoint.interval == 0:
                trainer.save()
            self._tell_saves()
        self.profiler.close()
        self._save_last(always=reason is LAST or trainer.iteration > begins)
        trainer.shards.settle()
        if reason is LAST and trainer.iteration > begins:
            for name, samples in trainer.test.items():
                self._score(name, samples)
        if reason.said:
            self.watch.see(Left(iteration=trainer.iteration, reason=reason.name))
            self.watch.see(
                Said(f"left after iteration {trainer.iteration}: {reason.said}; {trainer.goes_on}")
            )
        return reason

    def _save_last(self, *, always: bool) -> None:
        """See that there is a checkpoint of the step just done; one that failed is tried once more.

        Raises:
            MegaError: there is none.
        """
        trainer, saves, run = self.trainer, self.trainer.saves, self.trainer.plan.run.checkpoint.save
        saves.finish()
        if run is not None and always and saves.saved_at != trainer.iteration:
            trainer.save()
            saves.finish()
        self._tell_saves()
        if saves.problem:
            hint = f"make room there; {trainer.goes_on}"
            what = f"no checkpoint of iteration {trainer.iteration}, the last"
            raise MegaError(run, what, found=saves.problem, hint=hint)

    def _tell_saves(self) -> None:
        for saved in self.trainer.saves.ended:
            self.watch.see(saved)
            if saved.waited > _LONG:
                before = f"until the checkpoint before that of iteration {saved.iteration} was written"
                self.watch.see(Said(f"waited {saved.waited:.1f} s {before}"))
        self.trainer.saves.ended.clear()

    def _validates(self, leaving: Reason | None) -> bool:
        if leaving is not None and leaving.hasty:
            return False
        due = self.trainer.iteration % self.trainer.plan.run.evaluation.interval == 0
        return due or leaving is LAST

    def _only_validate(self) -> None:
        trainer, data = self.trainer, self.trainer.plan.run.data
        if not trainer.valid and not trainer.test:
            if data.by_use:
                raise ConfigError(
                    "--valid-data-path", "missing", wanted="what to validate on", hint="--valid-data-path P"
                )
            raise ConfigError(
                "--split",
                "leaves nothing to validate",
                found=data.split or SPLIT,
                wanted="a second share above 0",
                hint="--split 0,100,0",
            )
        for name, samples in chain(trainer.valid.items(), trainer.test.items()):
            self._score(name, samples)

    def _step(self) -> None:
        """A step, or those at once that are to be passed over."""
        trainer, rate, before = self.trainer, self.trainer.rate, self.trainer.consumed
        for steps in trainer.plan.passed_over:
            if trainer.iteration + 1 in steps:
                trainer.pass_over(min(steps[-1], trainer.plan.iterations))
                passed = f"{trainer.consumed - before} samples, --skip-train-iteration-range"
                self.watch.see(Said(f"passed over iterations {steps[0]} to {steps[-1]} ({passed})"))
                return
        started, length = self.clock(), trainer.length
        try:
            loss, norm = trainer.step(rate)
        except NotFinite:
            trainer.saves.finish()  # the run ends: what was good is kept
            raise
        now = Stepped(
            iteration=trainer.iteration,
            consumed_samples=trainer.consumed,
            loss=loss if math.isfinite(loss) else None,
            rate=rate,
            next_rate=trainer.rate,
            gradient_norm=norm if math.isfinite(norm) else None,
            skipped_samples=trainer.skipped,
            loss_scale=trainer.scale.value,
            global_batch_size=trainer.consumed - before,
            seq_length=length,
            seconds=self.clock() - started,
            extra=dict(trainer.extra),
        )
        self.since.append(now)
        self.watch.see(now)

    def _line(self) -> None:
        trainer, plan, log = self.trainer, self.trainer.plan, self.trainer.plan.run.log
        now, count = self.since[-1], len(self.since)
        seconds = sum(step.seconds for step in self.since)
        updates = [step for step in self.since if step.gradient_norm is not None]
        losses = [step.loss for step in updates if step.loss is not None]
        flops = sum(step.tokens * per_token(plan.spec, step.seq_length) for step in self.since)
        each = flops / seconds / plan.layout.world
        timers = {name: spent / count for name, spent in trainer.timers.take().items()}
        line = Progress(
            iteration=now.iteration,
            iterations=plan.iterations,
            consumed_samples=now.consumed_samples,
            consumed_tokens=trainer.tokens,
            loss=sum(losses) / len(losses) if losses else None,
            rate=now.rate,
            gradient_norm=updates[-1].gradient_norm if updates else None,
            skipped=count - len(updates),
            loss_scale=now.loss_scale,
            step_seconds=seconds / count,
            tokens_per_second=sum(step.tokens for step in self.since) / seconds,
            seconds=self.clock() - self.began,
            global_batch_size=now.global_batch_size,
            seq_length=now.seq_length,
            tflops=each / 1e12,
            mfu=each / self.peak if self.peak else None,
            time=self.today(),
            memory=memory(trainer.mesh.device),
            timers=timers,
            timers_of_ranks=of_ranks(timers, log.timing_level, log.timing_option, trainer.mesh),
            extra=now.extra,
        )
        self.watch.see(line)
        self.since = []

    def _score(self, name: str, samples: Reading) -> None:
        trainer, started = self.trainer, self.clock()
        loss = trainer.score(samples)
        self.watch.see(
            Validated(
                of=name,
                iteration=trainer.iteration,
                consumed_samples=trainer.consumed,
                loss=loss,
                perplexity=math.exp(min(20, loss)),  # Megatron's cap
                seconds=self.clock() - started,
            )
        )


def _peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of the device in this arithmetic, where they are known."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), half=dtype != torch.float32)
