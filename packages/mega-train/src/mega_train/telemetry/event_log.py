"""What a run leaves of itself: `events.jsonl`, its record."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mega_schema.checkpoint.checkpoint_dir import EVENTS as EVENTS
from mega_schema.checkpoint.run_lock import hold_run_folder
from mega_schema.errors import FormatError
from mega_train.telemetry.events import Event, Message, StepEnd

EventDict = dict[str, Any]
_MAX_LINE_BYTES = 1 << 20  # bytes of a first line; one of ours has some thousand

log = logging.getLogger("mega.train")


class EventLog:
    """Appends one JSON object a line to a run's `events.jsonl`.

    A resumed run goes on in the same file, beginning with an event "start" that has its first iteration: what
    lies before it with a later iteration was lost when the run before ended. What cannot be written, as on a
    disk that is full, is missing from it, and the run goes on.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._ends_mid_line = self._path.is_file() and not (b"\n" + _last_byte(self._path)).endswith(b"\n")
        self._has_warned = False

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepEnd | Message):
            return
        line = json.dumps({"event": event.name, **asdict(event)}, default=str) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as out:
                out.write("\n" * self._ends_mid_line + line)  # ends a line that a crash cut
            self._ends_mid_line = False
        except OSError as error:
            self._ends_mid_line = True
            if not self._has_warned:
                log.warning("%s: events are missing from it: %s", self._path, error.strerror)
            self._has_warned = True

    def close(self) -> None:
        """Every event is in the file already."""


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read()


@contextmanager
def lock_run(folder: Path | None) -> Iterator[None]:
    """Hold a run's folder, so that nobody else writes its record and its checkpoints there meanwhile.

    Raises:
        ConfigError: another process holds it.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EVENTS).touch()
    with hold_run_folder(folder):
        yield


def read_events(folder: Path) -> list[EventDict]:
    """The events of a run in the order they were written, without those of steps that a resume did again.

    Raises:
        FormatError: the folder holds no record of a run.
    """
    events: list[EventDict] = []
    for event in read_lines(folder):
        if event["event"] == "start":
            events = [earlier for earlier in events if earlier["iteration"] <= event["iteration"]]
        events.append(event)
    return events


def check_event_log(folder: Path) -> None:
    """Look at the first line of the record in a folder, if there is one.

    Raises:
        FormatError: the file is of another program: a run appends to its record.
    """
    if (folder / EVENTS).is_file():
        with (folder / EVENTS).open("rb") as file:
            _parse_line(folder / EVENTS, 1, file.readline(_MAX_LINE_BYTES))


def read_lines(folder: Path) -> list[EventDict]:
    """All that was ever written there. A line that a crash cut is left out.

    Raises:
        FormatError: the folder holds no record of a run, or the file is of another program.
    """
    path = folder / EVENTS
    if not path.is_file():
        raise FormatError(folder, "holds no record of a run", wanted=EVENTS)
    parsed = (
        _parse_line(path, number, line) for number, line in enumerate(path.read_bytes().splitlines(), 1)
    )
    return [event for event in parsed if event is not None]


def _parse_line(path: Path, number: int, line: bytes) -> EventDict | None:
    """One line of a record; None for one that a crash cut."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or "event" not in event:
        wanted = 'an object with a key "event"'
        raise FormatError(f"{path}:{number}", "is not of the record of a run", wanted=wanted)
    return event
