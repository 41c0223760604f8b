"""What a run leaves of itself: `events.jsonl`, its record."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mega_schema.errors import ConfigError, FormatError
from mega_train.watch.events import Event, Said, Stepped

EVENTS = "events.jsonl"
Line = dict[str, Any]

log = logging.getLogger("mega.train")


class Record:
    """Appends one JSON object a line to a run's `events.jsonl`.

    A resumed run goes on in the same file, beginning with an event "start" that has its first iteration: what
    lies before it with a later iteration was lost when the run before ended. What cannot be written, as on a
    disk that is full, is missing from it, and the run goes on.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._torn = self._path.is_file() and not (b"\n" + _tail(self._path)).endswith(b"\n")
        self._told = False

    def see(self, event: Event) -> None:
        if isinstance(event, Stepped | Said):
            return
        line = json.dumps({"event": event.name, **asdict(event)}, default=str) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as out:
                out.write("\n" * self._torn + line)  # ends a line that a crash cut
            self._torn = False
        except OSError as error:
            self._torn = True
            if not self._told:
                log.warning("%s: events are missing from it: %s", self._path, error.strerror)
            self._told = True

    def close(self) -> None:
        """Every event is in the file already."""


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read()


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


def read_events(folder: Path) -> list[Line]:
    """The events of a run in the order they were written, without those of steps that a resume did again.

    Raises:
        FormatError: the folder holds no record of a run.
    """
    events: list[Line] = []
    for event in read_lines(folder):
        if event["event"] == "start":
            events = [earlier for earlier in events if earlier["iteration"] <= event["iteration"]]
        events.append(event)
    return events


def read_lines(folder: Path) -> list[Line]:
    """All that was ever written there. A line that a crash cut is left out.

    Raises:
        FormatError: the folder holds no record of a run.
    """
    path = folder / EVENTS
    if not path.is_file():
        raise FormatError(folder, "holds no record of a run", wanted=EVENTS)
    events: list[Line] = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            events.append(json.loads(line))
    return events
