"""The training loop: steps, lines of the log, validations, checkpoints, in Megatron's order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

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
    ) -> None:
        self.trainer, self.screen, self.record, self.clock = trainer, screen, record, clock
        self.began = clock()
        self.since: list[tuple[float, float]] = []
        self.spent = 0.0

    def run(self) -> None:
        """Train to the last iteration, or to one that --exit-interval divides."""
        trainer, said = self.trainer, self.trainer.plan.run
        iterations, exit_interval = trainer.plan.iterations, said.train.exit_interval
        if trainer.iteration >= iterations:
            self.screen.say(f"nothing is left to train: --train-iters is {iterations}")
        while trainer.iteration < iterations:
            rate, started = trainer.rate, self.clock()
            self.since.append(trainer.step(rate))
            self.spent += self.clock() - started
            self.screen.step(trainer.iteration)
            last = trainer.iteration == iterations
            leaving = last or bool(exit_interval and trainer.iteration % exit_interval == 0)
            if leaving or trainer.iteration % said.log.interval == 0:
                self._line(rate)
            if trainer.valid is not None and (last or trainer.iteration % said.evaluation.interval == 0):
                self._validation()
            if said.checkpoint.interval and trainer.iteration % said.checkpoint.interval == 0:
                trainer.save()
            if leaving:
                break
        if said.checkpoint.save is not None and trainer.saved_at != trainer.iteration:
            trainer.save()
        trainer.shards.settle()

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
