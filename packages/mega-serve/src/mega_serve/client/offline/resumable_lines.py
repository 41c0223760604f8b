"""An output of JSON lines that a later run of the same command continues.

    {"id": "batch_req_5f1c...", "custom_id": "request-7", ...}

`id` is a hash of the request, so that an output of other requests is recognised. Lines are appended in
groups, each with one write and one flush to the disk. After a kill at most the last line is cut, and the next
run removes it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import orjson

from mega_schema.atomic_io import full_disk_errors, sync_folder
from mega_schema.errors import ConfigError, MegaError
from mega_schema.file_lock import lock_file
from mega_serve.client.http import error_text

_ID_CHARACTERS: Final = 24
_FIRST_BYTES: Final = b'{"id":"'
_BAD_REQUEST: Final = 400


def request_id(prefix: str, request: object) -> str:
    """Return the id of a request: equal for equal requests.

    Args:
        request: JSON values.
    """
    canonical = orjson.dumps(request, option=orjson.OPT_SORT_KEYS)
    return f"{prefix}{hashlib.sha256(canonical).hexdigest()[:_ID_CHARACTERS]}"


def begins_like_ours(path: Path) -> bool:
    """Whether a file is empty or begins as an output does; `ResumableLines` then checks every line."""
    with path.open("rb") as file:
        return _FIRST_BYTES.startswith(file.read(len(_FIRST_BYTES)))


class ResumableLines:
    """The output file of a run, locked against other runs. Use as a context manager.

    Attributes:
        finished: the custom_ids of all lines, those of earlier runs included.
        refusals: the messages of the lines among them that are errors, by custom_id.
    """

    def __init__(
        self,
        option: str,
        path: Path,
        ids: Mapping[str, str],
        compare: Callable[[dict[str, Any]], tuple[str, str] | None] = lambda line: None,
    ) -> None:
        """Read the file, if it exists; nothing is changed before the block is entered.

        Args:
            option: the command-line option that names the file.
            ids: id of each request of this run, by custom_id.
            compare: returns the options of a line and those of this run, where they differ; for an error.

        Raises:
            ConfigError: the file has other lines than an earlier run with these requests wrote.
        """
        self.path = path
        self._option = option
        self._ids = ids
        self._compare = compare
        self._file: IO[bytes] | None = None
        self._is_new = False
        self.finished: set[str] = set()
        self.refusals: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._is_new = not self.path.exists()
        file = self.path.open("ab+")
        try:
            lock_file(file.fileno(), self.path)
            self._truncate_torn_line(file)
        except BlockingIOError:
            file.close()
            hint = "wait for it to end, or name another file"
            raise ConfigError(self._option, "another run writes it", found=self.path, hint=hint) from None
        except BaseException:
            file.close()
            raise
        if self._is_new:
            sync_folder(self.path.parent)
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        if self._is_new and not self._file.tell():
            self.path.unlink()  # nothing was written: a failed start leaves no file
        self._file.close()

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines and flush them to the disk.

        Raises:
            MegaError: the disk is full.
        """
        assert self._file is not None, "the output is not open"
        content = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        with full_disk_errors(self.path):
            self._file.write(content)
            self._file.flush()
            os.fsync(self._file.fileno())
        for line in lines:
            self._count(line)

    def raise_refusals(self) -> None:
        """Report the requests whose lines are errors, those of earlier runs included.

        Raises:
            MegaError: there are some.
        """
        if self.refusals:
            custom_id, message = next(iter(self.refusals.items()))
            what = f"{len(self.refusals):,} of {len(self._ids):,} requests were refused"
            hint = "correct them in the input, remove their lines from this file, run the same command again"
            raise MegaError(self.path, what, found=f"{custom_id}: {message}", hint=hint)

    def _count(self, line: Mapping[str, Any]) -> None:
        self.finished.add(line["custom_id"])
        message = _read_refusal(line)
        if message is not None:
            self.refusals[line["custom_id"]] = message

    def _truncate_torn_line(self, file: IO[bytes]) -> None:
        """Check all lines and remove a last one without its line feed.

        Raises:
            ConfigError: a line is not of this run.
        """
        file.seek(0)
        size = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                # the first bytes of a line of ours, or a file of something else without line feeds
                if number == 1 and not _FIRST_BYTES.startswith(line[: len(_FIRST_BYTES)]):
                    raise self._foreign_line(number)
                break
            self._check_line(number, line)
            size += len(line)
        file.truncate(size)
        file.seek(0, os.SEEK_END)

    def _check_line(self, number: int, line: bytes) -> None:
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise self._foreign_line(number) from None
        custom_id = values.get("custom_id") if isinstance(values, dict) else None
        if not isinstance(custom_id, str) or "id" not in values:
            raise self._foreign_line(number)
        if self._ids.get(custom_id) != values["id"]:
            if difference := self._compare(values):
                earlier, present = difference
                raise ConfigError(
                    self._option,
                    "was written by a run with other options",
                    found=f"{earlier} at {self.path}:{number}",
                    wanted=present,
                    hint=f"{earlier}, or name another file",
                )
            what = "was not in the input" if custom_id not in self._ids else "was another request"
            raise ConfigError(
                self._option,
                f"was written by a run with other requests or options: {custom_id} {what}",
                found=f"{self.path}:{number}",
                hint="name another file, or remove this one",
            )
        self._count(values)

    def _foreign_line(self, number: int) -> ConfigError:
        what = "has a line that this command did not write"
        found = f"{self.path}:{number}"
        return ConfigError(self._option, what, found=found, hint="name another file")


def _read_refusal(line: Mapping[str, Any]) -> str | None:
    """Return the error of a line: a sample's "error", or the body of an answer with an error's status."""
    response = line.get("response")
    if isinstance(response, Mapping):
        status = response.get("status_code")
        if isinstance(status, int) and status >= _BAD_REQUEST:
            return error_text(response.get("body")) or f"status {status}"
    error = line.get("error")
    return None if error is None else str(error)
