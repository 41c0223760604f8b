"""History of a run from its event log: series, restarts and totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from mega_schema.errors import FormatError
from mega_train.telemetry.event_log import EventDict, read_events, read_lines
from mega_train.telemetry.memory_usage import used_bytes

XAxis = Literal["iteration", "samples", "tokens", "hours"]


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart of a run.

    Attributes:
        lost: steps of the previous process that were repeated.
    """

    iteration: int
    lost: int


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run from its event log, with repeated steps only once.

    Attributes:
        starts: start events of all processes.
        train_logs: log lines.
        checkpoints: save events, including failed saves.
    """

    folder: Path
    starts: Sequence[EventDict]
    train_logs: Sequence[EventDict]
    validations: Sequence[EventDict]
    checkpoints: Sequence[EventDict]
    restarts: Sequence[Restart]

    @classmethod
    def load(cls, folder: Path) -> RunHistory:
        """Read the history of a run from its event log.

        Raises:
            FormatError: the folder contains no event log of a run, or one without a loss.
        """
        events = read_events(folder)
        by_name = {
            name: [e for e in events if e["event"] == name]
            for name in ("train_log", "validation", "checkpoint")
        }
        if not by_name["train_log"]:
            raise FormatError(
                folder, "contains no loss yet", wanted="a run that reached its first --log-interval"
            )
        starts = [e for e in events if e["event"] == "train_start"]
        restarts = _find_restarts(read_lines(folder))
        return cls(
            folder, starts, by_name["train_log"], by_name["validation"], by_name["checkpoint"], restarts
        )

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def start(self) -> EventDict:
        """The start event of the newest process."""
        return self.starts[-1] if self.starts else {}

    def series(self, key: str, over: XAxis) -> tuple[list[float], list[float]]:
        """Return positions on the axis and values of one field of the log lines; NaN if it is missing."""
        return self._points([(e, e.get(key)) for e in self.train_logs], over)

    @property
    def loss_terms(self) -> list[str]:
        """The terms of the loss by Megatron's names, as lm loss and sop loss; empty if it has one."""
        return list(dict.fromkeys(name for e in self.train_logs for name in e.get("loss_terms", {})))

    def term_series(self, term: str, over: XAxis) -> tuple[list[float], list[float]]:
        """Return positions on the axis and values of a term of the loss of the log lines."""
        return self._points([(e, e.get("loss_terms", {}).get(term)) for e in self.train_logs], over)

    def term_scores(self, term: str, group: str, over: XAxis) -> tuple[list[float], list[float]]:
        """Return positions on the axis and values of a term of the loss of a group of validations."""
        return self._points([(e, e.get("loss_terms", {}).get(term)) for e in self.groups[group]], over)

    @property
    def groups(self) -> dict[str, list[EventDict]]:
        """Validations by split: one group, several blends, the test last."""
        names = dict.fromkeys(e.get("split", "validation") for e in self.validations)
        return {name: [e for e in self.validations if e.get("split", "validation") == name] for name in names}

    def scores(self, group: str, over: XAxis) -> tuple[list[float], list[float]]:
        """Return positions on the axis and losses of a group."""
        return self._points([(e, e["loss"]) for e in self.groups[group]], over)

    def memory(self, over: XAxis) -> tuple[list[float], list[float]]:
        """Return positions on the axis and used bytes of rank 0."""
        return self._points(
            [(e, used_bytes(e["memory"]) if e.get("memory") else None) for e in self.train_logs], over
        )

    def phases(self) -> dict[str, float]:
        """Return the median seconds per step of each phase of rank 0, the longest first."""
        names = {name for e in self.train_logs for name in e.get("timers", {})}
        medians = {
            name: median(e.get("timers", {}).get(name, 0.0) for e in self.train_logs) for name in names
        }
        return dict(sorted(medians.items(), key=lambda phase: -phase[1]))

    def median(self, key: str) -> float | None:
        """Return the median of one field of the log lines."""
        values = [e[key] for e in self.train_logs if _is_number(e.get(key))]
        return median(values) if values else None

    def positions(self, iterations: Sequence[float], over: XAxis) -> list[float]:
        """Convert iterations to positions on the axis, linear between two log lines."""
        logged, positions = [0.0], [0.0]
        for event in self.train_logs:
            steps = event["iteration"] - logged[-1]
            if over == "hours":  # training only, without validations, saves and pauses
                position = positions[-1] + steps * event["iteration_seconds"] / 3600
            elif over == "tokens":  # older event logs have no consumed_tokens
                length = self.start.get("seq_length", 1)
                position = event.get("consumed_tokens") or event["consumed_samples"] * length
            else:
                position = event[{"iteration": "iteration", "samples": "consumed_samples"}[over]]
            logged.append(event["iteration"])
            positions.append(position)
        return [float(x) for x in np.interp(iterations, logged, positions)]

    def _points(
        self, values: Sequence[tuple[EventDict, float | None]], over: XAxis
    ) -> tuple[list[float], list[float]]:
        numbers = [value if value is not None and _is_number(value) else math.nan for _, value in values]
        if all(map(math.isnan, numbers)):
            return [], []
        return self.positions([e["iteration"] for e, _ in values], over), numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _find_restarts(lines: Sequence[EventDict]) -> list[Restart]:
    restarts = []
    last_iteration = None
    for event in lines:
        iteration = event["iteration"]
        if event["event"] == "train_start":
            if last_iteration is not None:
                restarts.append(Restart(iteration, max(0, last_iteration - iteration)))
            last_iteration = iteration
        elif last_iteration is not None:
            last_iteration = max(last_iteration, iteration)
    return restarts
