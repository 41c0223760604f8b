"""The training loop: steps, lines of the log, validations, checkpoints, in Megatron's order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mega_train.leaving import LAST, Leaving, Reason
from mega_train.metrics import Progress, Record, Screen
from mega_train.trainer import Trainer


class Loop:
    """A run's steps, and what happens between them, until it leaves.

    Attributes:
        since: loss and gradient norm of the steps since the last line of the log.
        spent: seconds in those steps alone: validations and checkpoints are not the model's pace.
    """

    def __init__(
        self,
        trainer: Trainer,
        screen: Screen,
        record: Record,
        clock: Callable[[], float] = time.perf_counter,
        leaving: Leaving | None = None,
    ) -> None:
        self.trainer, self.screen, self.record, self.clock = trainer, screen, record, clock
        self.leaving = leaving or Leaving(trainer.plan, trainer.mesh, clock=clock)
        self.began = clock()
        self.since: list[tuple[float, float]] = []
        self.spent = 0.0

    def run(self) -> Reason:
        """Train until there is a reason to leave; the last step is saved whatever it is."""
        trainer, said = self.trainer, self.trainer.plan.run
        begins, reason = trainer.iteration, self.leaving.before(trainer.iteration)
        if reason is LAST:
            self.screen.say(f"nothing is left to train: --train-iters is {trainer.plan.iterations}")
        while reason is None:
            rate, started = trainer.rate, self.clock()
            self.since.append(trainer.step(rate))
            self.spent += self.clock() - started
            self.screen.step(trainer.iteration)
            reason = self.leaving.after(trainer.iteration)
            if reason or trainer.iteration % said.log.interval == 0:
                self._line(rate)
            if trainer.valid is not None and self._validates(reason):
                self._validation()
            if said.checkpoint.interval and trainer.iteration % said.checkpoint.interval == 0:
                trainer.save()
        unsaved = trainer.saved_at != trainer.iteration and (reason is LAST or trainer.iteration > begins)
        if said.checkpoint.save is not None and unsaved:
            trainer.save()
        trainer.shards.settle()
        if reason.said:
            self.record.write("leave", {"iteration": trainer.iteration, "reason": reason.name})
            self.screen.say(f"left after iteration {trainer.iteration}: {reason.said}; {trainer.goes_on}")
        return reason

    def _validates(self, leaving: Reason | None) -> bool:
        if leaving is not None and leaving.hasty:
            return False
        due = self.trainer.iteration % self.trainer.plan.run.evaluation.interval == 0
        return due or leaving is LAST

    def _line(self, rate: float) -> None:
        trainer, plan = self.trainer, self.trainer.plan
        each = self.spent / len(self.since)
        updates = [both for both in self.since if math.isfinite(both[1])]
        now = Progress(
            iteration=trainer.iteration,
            iterations=plan.iterations,
            consumed_samples=trainer.consumed,
            loss=sum(loss for loss, _ in updates) / len(updates) if updates else None,
            rate=rate,
            gradient_norm=updates[-1][1] if updates else None,
            skipped=len(self.since) - len(updates),
            loss_scale=trainer.scale.value,
            step_seconds=each,
            tokens_per_second=plan.tokens_per_step / each,
            seconds=self.clock() - self.began,
        )
        self.record.progress(now)
        self.screen.progress(now)
        self.since, self.spent = [], 0.0

    def _validation(self) -> None:
        iteration, loss = self.trainer.iteration, self.trainer.validate()
        perplexity = math.exp(min(20, loss))  # Megatron's cap
        self.record.write("validation", {"iteration": iteration, "loss": loss, "perplexity": perplexity})
        self.screen.say(
            f"validation at iteration {iteration} | loss {loss:.4f} | perplexity {perplexity:.2f}"
        )
