"""The event log of a run, `events.jsonl`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mega_schema.checkpoint.checkpoint_dir import EVENTS as EVENTS
from mega_schema.checkpoint.run_lock import lock_run_folder
from mega_schema.errors import FormatError
from mega_train.telemetry.events import Event, Message, StepEnd, TrainStart

EventDict = dict[str, Any]
_MAX_LINE_BYTES = 1 << 20  # a first line of an event log has a few thousand bytes

log = logging.getLogger("mega.train")


class EventLog:
    """Appends one JSON object per line to a run's `events.jsonl`.

    A resumed run appends to the same file, starting with a `train_start` event that has its first iteration:
    earlier lines with a later iteration were lost when the previous process ended. Lines that cannot be
    written, such as on a full disk, are dropped, and the run continues.
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
                # a crash may have truncated the last line: end it first, or the new one would be lost with it
                out.write(("\n" if self._ends_mid_line else "") + line)
            self._ends_mid_line = False
        except OSError as error:
            self._ends_mid_line = True
            if not self._has_warned:
                log.warning("%s: some events were not written: %s", self._path, error.strerror)
            self._has_warned = True

    def close(self) -> None:
        """Do nothing: every event is already written."""


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read()


@contextmanager
def lock_run(folder: Path | None) -> Iterator[None]:
    """Lock a run's folder, so that no other process writes its event log and checkpoints.

    Raises:
        ConfigError: another process holds it.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EVENTS).touch()
    with lock_run_folder(folder):
        yield


def read_events(folder: Path) -> list[EventDict]:
    """Read the events of a run in order, without those of steps that a resumed run repeated.

    Raises:
        FormatError: the folder holds no event log.
    """
    events: list[EventDict] = []
    for event in read_lines(folder):
        if event["event"] == TrainStart.name:
            events = [earlier for earlier in events if earlier["iteration"] <= event["iteration"]]
        events.append(event)
    return events


def check_event_log(folder: Path) -> None:
    """Check the first line of the event log in a folder, if there is one.

    Raises:
        FormatError: the file belongs to another program; a run would append to it.
    """
    if (folder / EVENTS).is_file():
        with (folder / EVENTS).open("rb") as file:
            _parse_line(folder / EVENTS, 1, file.readline(_MAX_LINE_BYTES))


def read_lines(folder: Path) -> list[EventDict]:
    """Read all lines of the event log, without one that a crash truncated.

    Raises:
        FormatError: the folder holds no event log, or the file belongs to another program.
    """
    path = folder / EVENTS
    if not path.is_file():
        raise FormatError(folder, "contains no event log of a run", wanted=EVENTS)
    parsed = (
        _parse_line(path, number, line) for number, line in enumerate(path.read_bytes().splitlines(), 1)
    )
    events = [event for event in parsed if event is not None]
    if not events and path.stat().st_size:
        raise FormatError(f"{path}:1", "is not a line of an event log", wanted="JSON")
    return events


def _parse_line(path: Path, number: int, line: bytes) -> EventDict | None:
    """Parse one line of an event log; None for one that a crash truncated."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or "event" not in event:
        wanted = 'an object with a key "event"'
        raise FormatError(f"{path}:{number}", "is not a line of an event log", wanted=wanted)
    return event
