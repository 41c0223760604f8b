"""What a run says of itself: `events.jsonl`, the record, and whoever shows it to a person."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

EVENTS = "events.jsonl"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after an optimizer step.

    Attributes:
        loss: mean over the steps since the last line, in nats per token.
        rate: learning rate of the step just done.
        gradient_norm: before clipping.
        step_seconds: mean over the steps since the last line.
        tokens_per_second: likewise, all ranks together.
        seconds: since this process began to train.
    """

    iteration: int
    iterations: int
    consumed_samples: int
    loss: float
    rate: float
    gradient_norm: float
    step_seconds: float
    tokens_per_second: float
    seconds: float

    @property
    def seconds_left(self) -> float:
        """At the pace of the steps since the last line."""
        return (self.iterations - self.iteration) * self.step_seconds


class Screen(Protocol):
    """Who shows a run to a person."""

    def progress(self, now: Progress) -> None: ...
    def step(self, iteration: int) -> None: ...
    def say(self, text: str) -> None: ...


class Record:
    """Appends one JSON object a line to a run's `events.jsonl`; does nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / EVENTS if folder else None
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, values: Mapping[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"event": event, **values}) + "\n")

    def progress(self, now: Progress) -> None:
        self.write("train", asdict(now))


def read_events(folder: Path) -> list[dict[str, object]]:
    """Every event of a run, in the order they were written; a last line cut by a crash is left out."""
    lines = (folder / EVENTS).read_text("utf-8").splitlines()
    events = []
    for number, line in enumerate(lines):
        try:
            events.append(json.loads(line))
        except ValueError:
            if number + 1 < len(lines):
                raise
    return events
