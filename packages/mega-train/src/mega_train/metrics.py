"""What a run says of itself: `events.jsonl`, the record, and whoever shows it to a person."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from mega_schema.errors import ConfigError, FormatError

EVENTS = "events.jsonl"
Event = dict[str, Any]

log = logging.getLogger("mega.train")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after an optimizer step.

    Attributes:
        loss: mean over the steps since the last line, in nats per token; None where all were skipped.
        rate: learning rate of the step just done.
        gradient_norm: of the last of them, before clipping.
        skipped: how many of them updated nothing, since loss or gradient were not finite. They are not in the
            two numbers above.
        loss_scale: what the loss is multiplied by in the next step.
        step_seconds: mean over the steps since the last line.
        tokens_per_second: likewise, all ranks together.
        seconds: since this process began to train.
    """

    iteration: int
    iterations: int
    consumed_samples: int
    loss: float | None
    rate: float
    gradient_norm: float | None
    skipped: int
    loss_scale: float
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
    """Appends one JSON object a line to a run's `events.jsonl`; does nothing without a folder.

    A resumed run goes on in the same file, beginning with an event "start" that has its first iteration: what
    lies before it with a later iteration was lost when the run before ended.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / EVENTS if folder else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.is_file() and not (b"\n" + self._path.read_bytes()).endswith(b"\n"):
                with self._path.open("a", encoding="utf-8") as out:
                    out.write("\n")  # end a line that a crash cut

    def write(self, event: str, values: Mapping[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"event": event, **values}) + "\n")

    def progress(self, now: Progress) -> None:
        self.write("train", asdict(now))


@contextmanager
def only_run(folder: Path | None) -> Iterator[None]:
    """Hold a run's folder, so that no other run writes its record and its checkpoints there meanwhile.

    The system lets go of it when the process ends, however it ends. File systems that cannot lock are let be.

    Raises:
        ConfigError: another process holds it.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / EVENTS).open("ab") as record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "--save",
                "another run writes to this folder",
                found=folder,
                wanted="a folder of its own for every run that is going on",
                hint="wait for the other run, end it, or --save elsewhere",
            ) from None
        except OSError as error:
            log.info("%s cannot be locked (%s): nothing keeps a second run out", folder, error.strerror)
        yield


def read_events(folder: Path) -> list[Event]:
    """The events of a run in the order they were written, without those of steps that a resume did again.

    A line that a crash cut is left out.

    Raises:
        FormatError: the folder holds no record of a run.
    """
    path = folder / EVENTS
    if not path.is_file():
        raise FormatError(folder, "holds no record of a run", wanted=EVENTS)
    events: list[Event] = []
    for line in path.read_bytes().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] == "start":
            events = [earlier for earlier in events if earlier["iteration"] <= event["iteration"]]
        events.append(event)
    return events
