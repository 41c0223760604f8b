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
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from mega_data.dataset_files import DatasetFiles, EncodedDocuments, open_truncated, sync
from mega_data.run_journal import INPUTS, InputPosition, InputState, RunJournal, Snapshot
from mega_schema.atomic_io import sync_folder
from mega_schema.dataset.indexed_dataset import DatasetInfo
from mega_schema.errors import ConfigError
from mega_schema.file_lock import lock_file

LOCK: Final = "lock"
QUARANTINE: Final = "quarantine"


class ResumableOutput:
    """The files of a run, open for appending.

    Attributes:
        inputs: state of each input.
        resume_point: the position up to which the inputs are processed.
        is_resumed: whether an earlier process wrote part of the files.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        dtype: np.dtype[Any],
        keys: int,
        inputs: Sequence[InputState] = (),
        *,
        skip: bool = False,
    ) -> None:
        """Open the files in `folder`, truncated to their valid part; empty if they belong to another run.

        Args:
            run: hash of the options.
            skip: wrong rows are skipped.

        Raises:
            ConfigError: another process writes there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.inputs = inputs
        self._lock = lock_unfinished(folder)
        self._journal = RunJournal(folder, run, skip)
        snapshot, self._inputs_started = self._journal.last_usable(inputs)
        self.resume_point = InputPosition(**snapshot["place"]) if snapshot else InputPosition()
        self.is_resumed = bool(snapshot)
        sizes = snapshot.get("sizes", {})
        self._datasets = [
            DatasetFiles.open(folder, key, dtype, sizes, snapshot["parts"][key] if snapshot else None)
            for key in range(keys)
        ]
        self._quarantine = open_truncated(folder / QUARANTINE, sizes.get(QUARANTINE, 0))
        self._inputs_file = open_truncated(folder / INPUTS, sizes.get(INPUTS, 0))

    @property
    def tokens(self) -> int:
        """Return the tokens of all keys."""
        return sum(dataset.tokens for dataset in self._datasets)

    @property
    def documents(self) -> int:
        """Return the documents of each key."""
        return self._datasets[0].documents

    def start_input(self, input: int) -> None:
        """Record the start of an input, and earlier inputs without rows; once per input."""
        for number in range(self._inputs_started, input + 1):
            point = InputPosition(
                number,
                size=self.resume_point.size,
                consumed=self.resume_point.consumed,
                skipped=self.resume_point.skipped,
                damage=self.resume_point.damage,
            )
            line = {"input": self.inputs[number], **self._snapshot(point)}
            self._inputs_file.write(json.dumps(line).encode() + b"\n")
        self._inputs_started = max(self._inputs_started, input + 1)

    def add(self, key: int, encoded: EncodedDocuments) -> None:
        """Append documents; they count after the next `write_journal`."""
        self._datasets[key].add(encoded)

    def quarantine(self, row: dict[str, object]) -> None:
        """Append a skipped row and its error."""
        self._quarantine.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")

    def first_error(self) -> str:
        """Return the place and the error of the first skipped row."""
        self._quarantine.flush()
        with (self.folder / QUARANTINE).open("rb") as file:
            row = json.loads(file.readline())
        what, _, _ = row["reason"].partition(": found ")
        return f"{row['file']}:{row['line']}, {what}"

    def write_journal(self) -> None:
        """Flush the files and record `resume_point`, from which a later run may resume."""
        for _, file in self._named_files():
            sync(file)
        self._journal.write(self._snapshot(self.resume_point))

    def keep_for_resume(self, unchanged: int) -> None:
        """After an error, keep the finished part for the next run; discard it if it is not reusable.

        Args:
            unchanged: number of inputs, from the first on, that have not changed.
        """
        self.write_journal()
        if not self._journal.last_usable(self.inputs[:unchanged])[0]:
            self.discard()

    def publish(
        self, prefixes: Sequence[Path], infos: Sequence[DatasetInfo], index_format: str, quarantine: Path
    ) -> None:
        """Rename the files to datasets, in place of earlier ones; remove the folder.

        Args:
            index_format: format of the index, mmap or cached.
            quarantine: path of the skipped rows, if there are any.
        """
        for dataset, info in zip(self._datasets, infos, strict=True):
            dataset.write_index(info, index_format)
        for dataset, prefix in zip(self._datasets, prefixes, strict=True):
            dataset.publish(prefix)
        if self.resume_point.skipped:
            sync(self._quarantine)
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
        self._lock.close()

    def discard(self) -> None:
        """Remove the files."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _named_files(self) -> Iterator[tuple[str, IO[bytes]]]:
        for dataset in self._datasets:
            yield from dataset.named_files()
        yield QUARANTINE, self._quarantine
        yield INPUTS, self._inputs_file

    def _snapshot(self, point: InputPosition) -> Snapshot:
        """Return a resume point with the counts and file sizes at it."""
        counts = [dataset.counts() for dataset in self._datasets]
        sizes = {name: file.tell() for name, file in self._named_files()}
        return {"place": dataclasses.asdict(point), "parts": counts, "sizes": sizes}


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder belongs to an unfinished run, even one without files yet."""
    return (folder / LOCK).is_file()


def lock_unfinished(folder: Path, *, shared: bool = False) -> IO[bytes]:
    """Lock the folder of an unfinished run for this process, until the file is closed.

    Args:
        shared: other processes may run other tasks of the same run.

    Raises:
        ConfigError: another process writes there.
    """
    file = (folder / LOCK).open("ab")
    try:
        lock_file(file.fileno(), folder, shared=shared)
    except BlockingIOError:
        file.close()
        hint = "wait for it to end, or choose another prefix"
        raise ConfigError("--output-prefix", "another run writes there", found=folder, hint=hint) from None
    return file
