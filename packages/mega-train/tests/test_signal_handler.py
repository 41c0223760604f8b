"""A run that receives a signal saves after its step and exits with code 143."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Protocol

import pytest

from mega_model.distributed.mesh import Mesh
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_train.engine.train_loop import TrainLoop
from mega_train.engine.trainer import Trainer
from mega_train.fault_tolerance.exit_conditions import SIGTERM, SIGUSR1, ExitConditions
from mega_train.fault_tolerance.signal_handler import EXIT_SIGNALS, SignalHandler
from mega_train.resolve import ResolvedConfig
from mega_train.telemetry.event_log import EventLog, read_events
from mega_train.telemetry.observers import Observers


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


@pytest.mark.parametrize("number", sorted(EXIT_SIGNALS))
def test_a_signal_saves_after_the_step_and_leaves(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path, number: signal.Signals
) -> None:
    trainer = Trainer(resolve_config(checkpoint__save=str(tmp_path)), Mesh(), open_corpus)
    step = trainer.step

    def step_with_signals(rate: float) -> tuple[float, float]:
        if trainer.state.iteration == 3:
            for _ in range(3):  # a scheduler and torchrun both send it
                os.kill(os.getpid(), number)
        return step(rate)

    trainer.step = step_with_signals  # type: ignore[method-assign]
    with SignalHandler() as handler:
        leaving = ExitConditions(trainer.config, trainer.mesh, received_signal=handler.received_signal)
        reason = TrainLoop(trainer, Observers([EventLog(tmp_path)]), exit_conditions=leaving).run()
    assert reason is {signal.SIGTERM: SIGTERM, signal.SIGUSR1: SIGUSR1}[number]
    assert reason.code == 143
    assert Checkpoint.open(tmp_path).iteration == 4
    assert read_events(tmp_path)[-1] == {"event": "train_exit", "iteration": 4, "reason": "signal"}


def test_the_signals_are_given_back() -> None:
    before = {number: signal.getsignal(number) for number in EXIT_SIGNALS}
    with SignalHandler() as handler:
        assert handler.received_signal() is None
        assert not [number for number in EXIT_SIGNALS if signal.getsignal(number) == before[number]]
    assert {number: signal.getsignal(number) for number in EXIT_SIGNALS} == before
