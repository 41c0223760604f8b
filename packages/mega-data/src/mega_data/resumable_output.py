"""The files of an unfinished run, which only grow, and a journal of their valid sizes.

    PREFIX.unfinished/
        journal.json     hash of the run's options, its resume point, the size of each file at it
        0.ids            first key: ids end to end
        0.lengths        int32, tokens of each sequence
        0.documents      int64, first sequence of each document; ends with that of the next
        quarantine       JSON lines of the skipped rows
        inputs           JSON lines of each started input: its state, resume point and sizes before it

After a kill, the next run truncates the files to those sizes and continues from the resume point. If an input
has changed since, for example because a wrong line was corrected, the next run truncates the files to the
start of that input. Readers ignore the folder; at the end the files are renamed to a dataset, all or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_schema.atomic_io import sync_folder
from mega_schema.dataset.idx_content import CHUNK, IndexStreams
from mega_schema.dataset.indexed_dataset import DatasetInfo, sibling
from mega_schema.dataset.indexed_writer import write_index
from mega_schema.errors import ConfigError

FORMAT: Final = 2
JOURNAL: Final = "journal.json"
LOCK: Final = "lock"
QUARANTINE: Final = "quarantine"
INPUTS: Final = "inputs"
InputState = list[str | int] | None  # identifies an input and its version; None if nothing does


@dataclass(slots=True)
class InputPosition:
    """How far a run has read its inputs.

    Attributes:
        input: number of the current input.
        position: start of its next block.
        rows: its rows before that.
        size: bytes of text read from all inputs.
        consumed: bytes on disk of that text; files may be compressed.
        skipped: skipped rows.
    """

    input: int = 0
    position: int = 0
    rows: int = 0
    size: int = 0
    consumed: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """Documents under one key.

    Attributes:
        ids: ids of all documents, end to end.
        lengths: int32, tokens of each sequence.
        sequences: number of sequences of each document, 0 for an empty one.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int64]


@dataclass(slots=True)
class _KeyFiles:
    """The files of one key."""

    files: dict[str, IO[bytes]]
    sequences: int = 0
    tokens: int = 0
    documents: int = 0


@dataclass(slots=True)
class ResumableOutput:
    """The files of a run, open for appending.

    Attributes:
        run: hash of the options.
        inputs: state of each input.
        skip: wrong rows are skipped.
    """

    folder: Path
    run: str
    dtype: np.dtype[Any]
    inputs: Sequence[InputState] = ()
    skip: bool = False
    resume_point: InputPosition = field(default_factory=InputPosition)
    is_resumed: bool = False
    _keys: list[_KeyFiles] = field(default_factory=list)
    _quarantine: IO[bytes] | None = None
    _inputs_file: IO[bytes] | None = None
    _inputs_started: int = 0
    _lock: IO[bytes] | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        run: str,
        dtype: np.dtype[Any],
        keys: int,
        inputs: Sequence[InputState] = (),
        *,
        skip: bool = False,
    ) -> ResumableOutput:
        """Open the files in `folder` as far as they are valid; empty ones if they are of another run.

        Raises:
            ConfigError: another process writes there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        output = cls(folder, run, dtype, inputs, skip)
        output._lock = (folder / LOCK).open("ab")
        try:
            fcntl.flock(output._lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            output._lock.close()
            hint = "wait for it to end, or choose another prefix"
            raise ConfigError(
                "--output-prefix", "another run writes there", found=folder, hint=hint
            ) from None
        snapshot, output._inputs_started = output._last_usable(inputs)
        sizes = snapshot.get("sizes", {})
        if snapshot:
            output.resume_point = InputPosition(**snapshot["place"])
            output.is_resumed = True
        for key in range(keys):
            names = ("ids", "lengths", "documents")
            files = {name: output._open_truncated(f"{key}.{name}", sizes) for name in names}
            output._keys.append(_KeyFiles(files, **(snapshot["parts"][key] if snapshot else {})))
            if not snapshot:
                files["documents"].write(np.zeros(1, np.int64).tobytes())
        output._quarantine = output._open_truncated(QUARANTINE, sizes)
        output._inputs_file = output._open_truncated(INPUTS, sizes)
        return output

    @property
    def tokens(self) -> int:
        """Return the tokens of all keys."""
        return sum(part.tokens for part in self._keys)

    @property
    def documents(self) -> int:
        """Return the documents of each key."""
        return self._keys[0].documents

    def start_input(self, input: int) -> None:
        """Record where an input begins, and those before it that had no rows; once per input."""
        assert self._inputs_file is not None
        for number in range(self._inputs_started, input + 1):
            point = InputPosition(
                number,
                size=self.resume_point.size,
                consumed=self.resume_point.consumed,
                skipped=self.resume_point.skipped,
            )
            line = {"input": self.inputs[number], **self._snapshot(point)}
            self._inputs_file.write(json.dumps(line).encode() + b"\n")
        self._inputs_started = max(self._inputs_started, input + 1)

    def add(self, key: int, encoded: EncodedDocuments) -> None:
        """Append documents; `write_journal` records later that they are complete."""
        part = self._keys[key]
        ends = np.cumsum(encoded.sequences, dtype=np.int64) + part.sequences
        part.files["ids"].write(encoded.ids.astype(self.dtype, copy=False).data)
        part.files["lengths"].write(encoded.lengths.astype(np.int32, copy=False).data)
        part.files["documents"].write(ends.data)
        part.sequences += len(encoded.lengths)
        part.documents += len(encoded.sequences)
        part.tokens += len(encoded.ids)

    def quarantine(self, row: dict[str, object]) -> None:
        """Append a skipped row and its error."""
        assert self._quarantine is not None
        self._quarantine.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")

    def first_error(self) -> str:
        """Return the place and the error of the first skipped row."""
        assert self._quarantine is not None
        self._quarantine.flush()
        with (self.folder / QUARANTINE).open("rb") as file:
            row = json.loads(file.readline())
        what, _, _ = row["reason"].partition(": found ")
        return f"{row['file']}:{row['line']}, {what}"

    def write_journal(self) -> None:
        """Make everything written so far durable: a later run may resume from `resume_point`."""
        for _, file in self._named_files():
            _sync(file)
        journal = {"format": FORMAT, "run": self.run, "skip": self.skip, **self._snapshot(self.resume_point)}
        temporary = self.folder / f"{JOURNAL}.new"
        with temporary.open("wb") as journal_file:
            journal_file.write(json.dumps(journal).encode())
            _sync(journal_file)
        temporary.replace(self.folder / JOURNAL)

    def keep_for_resume(self, unchanged: int) -> None:
        """After an error, keep the finished part for the next run; discard it if no run can use it.

        Args:
            unchanged: number of inputs, from the first on, that have not changed.
        """
        self.write_journal()
        if not self._last_usable(self.inputs[:unchanged])[0]:
            self.discard()

    def publish(
        self, prefixes: Sequence[Path], infos: Sequence[DatasetInfo], form: str, quarantine: Path
    ) -> None:
        """Rename the files to datasets, in place of earlier ones; remove the folder.

        Args:
            form: format of the index, mmap or cached.
            quarantine: path of the skipped rows, if there are any.
        """
        for number, (part, info) in enumerate(zip(self._keys, infos, strict=True)):
            for file in part.files.values():
                file.flush()
            counts = (part.sequences, part.documents + 1)
            lengths, documents = (self._chunk_reader(number, n) for n in ("lengths", "documents"))
            with (self.folder / f"{number}.idx").open("wb") as index:
                write_index(index, form, IndexStreams(self.dtype, *counts, lengths, documents))
                _sync(index)
            info = dataclasses.replace(
                info, documents=part.documents, sequences=part.sequences, tokens=part.tokens
            )
            with (self.folder / f"{number}.json").open("wb") as info_file:
                info_file.write((json.dumps(info.to_dict(), indent=1) + "\n").encode())
                _sync(info_file)
            _sync(part.files["ids"])
        for number, prefix in enumerate(prefixes):
            # Readers open the index first: without one there is no dataset. So the old index is removed
            # before the payload is replaced, and the new index comes last.
            for suffix in (".idx", ".json"):
                sibling(prefix, suffix).unlink(missing_ok=True)
            for name, suffix in (("ids", ".bin"), ("json", ".json"), ("idx", ".idx")):
                (self.folder / f"{number}.{name}").replace(sibling(prefix, suffix))
        if self.resume_point.skipped and self._quarantine is not None:
            _sync(self._quarantine)
            (self.folder / QUARANTINE).replace(quarantine)
        else:
            quarantine.unlink(missing_ok=True)  # of an earlier run
        sync_folder(self.folder.parent)
        self.discard()

    def close(self) -> None:
        """Close the files and keep them for a later run."""
        for _, file in self._named_files():
            with contextlib.suppress(OSError):  # data that did not fit on a full disk is not in the journal
                file.close()
        if self._lock is not None:
            self._lock.close()

    def discard(self) -> None:
        """Remove the files."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _named_files(self) -> Iterator[tuple[str, IO[bytes]]]:
        for number, part in enumerate(self._keys):
            for name, file in part.files.items():
                yield f"{number}.{name}", file
        for name, appended in ((QUARANTINE, self._quarantine), (INPUTS, self._inputs_file)):
            if appended is not None:
                yield name, appended

    def _snapshot(self, point: InputPosition) -> dict[str, Any]:
        """Return a resume point with the counts and file sizes at it."""
        counts = [{n: getattr(p, n) for n in ("sequences", "tokens", "documents")} for p in self._keys]
        sizes = {name: file.tell() for name, file in self._named_files()}
        return {"place": dataclasses.asdict(point), "parts": counts, "sizes": sizes}

    def _last_usable(self, inputs: Sequence[InputState]) -> tuple[dict[str, Any], int]:
        """Return the last snapshot of an earlier process up to which a run of these inputs writes the same.

        Returns:
            The snapshot, empty if there is none; the number of inputs started before it.
        """
        journal = self._read_journal()
        if not journal:
            return {}, 0
        lines = (self.folder / INPUTS).read_bytes()[: journal["sizes"][INPUTS]].splitlines()
        started = [json.loads(line) for line in lines]
        pairs = zip(started, inputs, strict=False)
        unchanged = sum(
            1 for _ in takewhile(lambda pair: pair[1] is not None and pair[0]["input"] == pair[1], pairs)
        )
        snapshots = [*enumerate(started[: unchanged + 1])]
        if unchanged == len(started):
            snapshots.append((unchanged, journal))
        for count, snapshot in reversed(snapshots):
            # rows that one run skips end another
            if snapshot["place"]["size"] and (
                journal["skip"] == self.skip or not snapshot["place"]["skipped"]
            ):
                return snapshot, count
        return {}, 0

    def _read_journal(self) -> dict[str, Any]:
        """Read the journal of an earlier run with these options; {} if its files are too short for it."""
        try:
            journal = json.loads((self.folder / JOURNAL).read_bytes())
            if journal["format"] != FORMAT or journal["run"] != self.run:
                return {}
            for name, size in journal["sizes"].items():
                if (self.folder / name).stat().st_size < size:
                    return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        assert isinstance(journal, dict)
        return journal

    def _open_truncated(self, name: str, sizes: dict[str, int]) -> IO[bytes]:
        file = (self.folder / name).open("ab", buffering=1 << 16)
        file.truncate(sizes.get(name, 0))
        file.seek(0, os.SEEK_END)
        return file

    def _chunk_reader(self, number: int, name: str) -> Callable[[], Iterator[NDArray[Any]]]:
        dtype = np.dtype(np.int32 if name == "lengths" else np.int64)

        def chunks() -> Iterator[NDArray[Any]]:
            with (self.folder / f"{number}.{name}").open("rb") as file:
                while part := file.read(CHUNK * dtype.itemsize):
                    yield np.frombuffer(part, dtype)

        return chunks


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder belongs to an unfinished run, even one without files yet."""
    return (folder / LOCK).is_file()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
