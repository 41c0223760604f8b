"""Evaluate the model on the validation and test splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from mega_schema.errors import ConfigError
from mega_train.data.blend_spec import DEFAULT_SPLIT
from mega_train.data.dataloaders import SampleReader
from mega_train.engine.trainer import Trainer
from mega_train.fault_tolerance.exit_conditions import LAST_ITERATION, ExitReason
from mega_train.telemetry.events import ValidationEnd
from mega_train.telemetry.observers import Observers


class Validator:
    """Validates a run, and reports the losses to its observers."""

    def __init__(self, trainer: Trainer, observers: Observers, clock: Callable[[], float]) -> None:
        self._trainer = trainer
        self._observers = observers
        self._clock = clock

    def is_due(self, reason: ExitReason | None) -> bool:
        """Whether to validate after this step.

        Args:
            reason: the reason to exit after this step, if any.
        """
        if reason is not None and reason.is_urgent:
            return False
        due = self._trainer.state.iteration % self._trainer.config.run.evaluation.interval == 0
        return due or reason is LAST_ITERATION

    def validate(self, readers: Mapping[str, SampleReader]) -> None:
        """Evaluate some of the trainer's splits."""
        for name, reader in readers.items():
            self._validate(name, reader)

    def validate_only(self) -> None:
        """Evaluate all splits of a run that does not train.

        Raises:
            ConfigError: the splits have no samples.
        """
        trainer = self._trainer
        data = self._trainer.config.run.data
        if not trainer.valid and not trainer.test:
            if data.has_dataset_per_split:
                raise ConfigError(
                    "--valid-data-path", "missing", wanted="validation data", hint="--valid-data-path P"
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

    def _validate(self, name: str, reader: SampleReader) -> None:
        state = self._trainer.state
        start_time = self._clock()
        losses = evaluate(self._trainer, reader)
        self._observers.on_event(
            ValidationEnd(
                split=name,
                iteration=state.iteration,
                consumed_samples=state.consumed_samples,
                loss=losses.total,
                loss_terms=losses.terms,
                perplexity=math.exp(min(20, losses.terms.get("lm loss", losses.total))),  # Megatron's cap
                seconds=self._clock() - start_time,
            )
        )


@dataclass(frozen=True, slots=True)
class EvaluatedLosses:
    """The mean losses of a validation; `terms` as in `forward_backward.MeanLosses`."""

    total: float
    terms: Mapping[str, float]


@torch.no_grad()
def evaluate(trainer: Trainer, reader: SampleReader) -> EvaluatedLosses:
    """Compute the mean losses of --eval-iters batches of `valid` or `test`, in nats per token.

    Validations read successive samples every --eval-interval steps. A validation between two of those steps,
    at the end of a run, reads the samples of the previous one, so that both compare; Megatron reads further
    there.
    """
    config = trainer.config
    evaluation = config.run.evaluation
    first_batch = max(0, trainer.state.iteration // evaluation.interval - 1) * evaluation.iterations
    if reader in trainer.test.values():
        first_batch = 0
    count = config.global_batch_size
    losses = [
        trainer.forward_backward.mean_losses(
            reader, (first_batch + i) * count, count, config.seq_length, train=False
        )
        for i in range(evaluation.iterations)
    ]
    return EvaluatedLosses(
        _mean([batch.total for batch in losses]),
        {name: _mean([batch.terms[name] for batch in losses]) for name in config.loss_terms},
    )


def _mean(losses: Sequence[Tensor]) -> float:
    return float(torch.stack(list(losses)).double().mean())
