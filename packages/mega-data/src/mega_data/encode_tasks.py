"""Encode inputs to indexed datasets as tasks: a file, a range of a large one, or several small ones.

    PREFIX.unfinished/tasks/
        plan.json, done/    the run and its finished tasks, see `task_stages`
        parts/NUMBER/       a task's ids, lengths and documents, see `dataset_files`, and skipped rows
        offsets.npy         int64, byte of each part in the .bin of each key
        0.ids, 0.idx, ...   the dataset of the first key

Stage `encode` writes the parts. Stage `index` adds up their lengths and writes the indexes. Stage `join`
copies parts to their offsets in the .bin, then frees their blocks on the disk: the ids are not on it twice.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_data.dataset_files import (
    DatasetFiles,
    publish_dataset,
    read_chunks,
    sync,
    write_index_files,
)
from mega_data.encode_worker import BlockEncoder, EncodedBlock
from mega_data.error_limit import error_counts
from mega_data.jsonl_shards import file_states
from mega_data.merge import copy_bytes
from mega_data.readers.blocks import Block, DamagedBlock, RowError
from mega_data.readers.inputs import HUB_FORMAT, InputFile
from mega_data.readers.ranges import InputRange, count_rows_before, cuts_by_input, read_range
from mega_data.readers.streams import BLOCK_BYTES
from mega_data.resumable_output import QUARANTINE
from mega_data.task_stages import (
    FAILED,
    ReusableTasks,
    TaskResult,
    TaskStage,
    open_run_folder,
    read_results,
)
from mega_schema.atomic_io import full_disk_errors, own_partial_file
from mega_schema.dataset.idx_content import IndexStreams
from mega_schema.dataset.indexed_dataset import DatasetInfo, truncated_error
from mega_schema.errors import ConfigError, CorruptFileError, FormatError

TASKS: Final = "tasks"  # folder, in that of the unfinished run
STAGES: Final = ("encode", "index", "join")
_OFFSETS: Final = "offsets.npy"
_JOINED: Final = ".joined"
_JOIN_BYTES: Final = 1 << 26  # of inputs per task of `join`
_ROW_HINT: Final = "correct or delete the line, or skip such lines: --on-error skip"


def check_task_inputs(inputs: Sequence[InputFile], hint: str = "leave --executor out") -> None:
    """Refuse inputs that a task cannot read.

    Args:
        hint: how to run without tasks.

    Raises:
        ConfigError: an input is not a file.
    """
    for item in inputs:
        if item.is_stream or item.format == HUB_FORMAT:
            name = (
                "stdin" if item.is_stdin else "a dataset by name" if item.format == HUB_FORMAT else "a pipe"
            )
            raise ConfigError("--input", f"{name} cannot be divided into tasks", found=item.path, hint=hint)


@dataclass(frozen=True, slots=True)
class EncodingTasks:
    """A run of `preprocess` in tasks.

    Attributes:
        groups: the ranges that each task reads.
        encoder: from `pack_encoder`.
        infos: content of PREFIX.json for each key, without counts.
        skip: move wrong rows, and the rest of a damaged file, to the quarantine; else stop at the first.
        unit: unit of a document of plain text, see readers.streams.
        index_format: mmap or cached.
    """

    groups: tuple[tuple[InputRange, ...], ...]
    folder: Path
    encoder: bytes
    infos: tuple[DatasetInfo, ...]
    dtype: np.dtype[Any]
    skip: bool
    unit: str
    index_format: str

    @property
    def ranges(self) -> list[InputRange]:
        return [part for group in self.groups for part in group]

    @property
    def inputs(self) -> list[InputFile]:
        return list({part.input: part.item for part in self.ranges}.values())

    def begin(self, *, whole_run: bool) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Args:
            whole_run: no other process runs tasks. Then finished tasks are kept whose inputs are as they were
                when a process was killed, unless parts are joined already.

        Raises:
            ConfigError: the folder holds another run.
        """
        owners = [tuple(part.input for part in group) for group in self.groups]
        starts = cuts_by_input(self.ranges)
        states = file_states([item.path for item in self.inputs])
        wanted = {
            "inputs": [
                [*state, cuts, item.adapter.code if item.adapter else ""]
                for state, cuts, item in zip(states, starts, self.inputs, strict=True)
            ],
            "formats": [item.format for item in self.inputs],
            "datasets": [info.to_dict() for info in self.infos],
            "index-format": self.index_format,
            "split-mb": [len(cuts) for cuts in starts],
            "skip": self.skip,
            "tasks": [*map(len, self.groups)],
        }
        after_kill = whole_run and not (self.folder / _OFFSETS).exists()
        reuse = ReusableTasks("done/encode", owners, "skip", self.folder / "parts", after_kill)
        open_run_folder(self.folder, wanted, reuse)
        (self.folder / FAILED).unlink(missing_ok=True)

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""
        encode = TaskStage("encode", len(self.groups), self.encode, sizes=tuple(map(_bytes_of, self.groups)))
        index = TaskStage("index", 1, self.index, after=encode)
        return [encode, index, TaskStage("join", len(self._join_groups()), self.join, after=index)]

    def encode(self, task: int) -> TaskResult:
        """Write the part of a task and return its counts.

        Raises:
            FormatError: a row is wrong, and wrong rows are not skipped.
        """
        work = _open_encoder(self.encoder)
        counts = Counter[str](rows=0, bytes=0, skipped=0)
        first = ""
        damaged = list[str]()
        folder = self._part_folder(task)
        with full_disk_errors(folder), _new_folder(folder) as partial, ExitStack() as stack:
            datasets = [
                DatasetFiles.open(partial, key, self.dtype, {}, None) for key in range(len(self.infos))
            ]
            files = [file for dataset in datasets for file in dataset.files.values()]
            for file in files:
                stack.enter_context(file)
            quarantine: IO[bytes] | None = None
            for part, rows, block in self._encoded_blocks(task, work):
                for error in block.errors:
                    if not self.skip or error.is_fatal:
                        raise row_error(part, error, rows)
                    first = first or f"{part.place(rows + error.row + 1)}, {error.what}"
                    if error.ends_file:
                        damaged.append(error.damage_notice(part.item.path))
                    row = error.to_json(part.item.path, (part.first_row or 0) + rows + 1)
                    if quarantine is None:
                        quarantine = stack.enter_context((partial / QUARANTINE).open("wb"))
                        files.append(quarantine)
                    quarantine.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
                for dataset, documents in zip(datasets, block.keys, strict=True):
                    dataset.add(documents)
                counts.update(rows=block.rows, bytes=block.size, skipped=len(block.errors))
            for file in files:
                sync(file)
        by_key = [dataset.counts() for dataset in datasets]
        total = by_key[0]["documents"]
        result = {"documents": total, "read": _bytes_of(self.groups[task]), **counts, "counts": by_key}
        return {**result, **error_counts(counts["skipped"], first, total + counts["skipped"], *damaged)}

    def _encoded_blocks(
        self, task: int, work: BlockEncoder
    ) -> Iterator[tuple[InputRange, int, EncodedBlock]]:
        """Yield the blocks of a task, each with its range and the rows of the range before it."""
        for part in self.groups[task]:
            rows = 0
            for block in self._blocks(part, work.keys):
                encoded = work((part.input, block))
                yield part, rows, encoded
                rows += encoded.rows

    def _blocks(self, part: InputRange, keys: Sequence[str]) -> Iterator[Block]:
        try:
            yield from read_range(part, keys, BLOCK_BYTES, self.unit)
        except CorruptFileError as error:
            if not self.skip:
                raise
            yield DamagedBlock(error.what, str(error.values.get("found", "")))

    def index(self, _: int) -> TaskResult:
        """Write the index of each key, the offsets of the parts, and the skipped rows."""
        results = read_results(self.stages()[0], self.folder)
        offsets = np.zeros((len(self.infos), len(results) + 1), np.int64)
        with full_disk_errors(self.folder):
            for key, info in enumerate(self.infos):
                counts = [result["counts"][key] for result in results]
                tokens = [part_counts["tokens"] for part_counts in counts]
                offsets[key, 1:] = np.cumsum(tokens, dtype=np.int64) * self.dtype.itemsize
                contents = self._index_contents(
                    key,
                    [part_counts["sequences"] for part_counts in counts],
                    sum(part_counts["documents"] for part_counts in counts),
                )
                write_index_files(self.folder, key, self.index_format, contents, info, sum(tokens))
            self._write_quarantine(results)
            np.save(self.folder / _OFFSETS, offsets)
        return {}

    def _index_contents(self, key: int, sequences: Sequence[int], documents: int) -> IndexStreams:
        def lengths() -> Iterator[NDArray[Any]]:
            for task in range(len(self.groups)):
                yield from read_chunks(self._part_folder(task) / f"{key}.lengths", np.int32)

        def boundaries() -> Iterator[NDArray[Any]]:
            sequences_before = 0
            yield np.zeros(1, np.int64)
            for task, count in enumerate(sequences):
                skipped = 1  # the first boundary of a part is the last one of the part before it
                for chunk in read_chunks(self._part_folder(task) / f"{key}.documents", np.int64):
                    yield chunk[skipped:] + sequences_before
                    skipped = 0
                sequences_before += count

        return IndexStreams(self.dtype, sum(sequences), documents + 1, lengths, boundaries)

    def _write_quarantine(self, results: Sequence[TaskResult]) -> None:
        """Write the skipped rows of all parts, with the number of each in its file."""
        with (self.folder / QUARANTINE).open("wb") as out:
            rows_before = 0
            for task, (group, result) in enumerate(zip(self.groups, results, strict=True)):
                # several inputs are whole
                rows_before = rows_before if group[0].first_row is None else 0
                if result["skipped"]:
                    for line in (self._part_folder(task) / QUARANTINE).read_bytes().splitlines():
                        row = json.loads(line)
                        row["line"] += rows_before
                        out.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
                rows_before += result["rows"]
            sync(out)

    def join(self, task: int) -> TaskResult:
        """Copy parts to their place in the .bin of each key, then free their blocks on the disk."""
        parts = self._join_groups()[task]
        offsets = np.load(self.folder / _OFFSETS, mmap_mode="r")
        for key in range(len(self.infos)):
            paths = {part: self._part_folder(part) / f"{key}.ids" for part in parts}
            pending = [part for part, path in paths.items() if not path.with_suffix(_JOINED).exists()]
            if pending:
                self._copy_parts(key, {part: paths[part] for part in pending}, offsets[key])
            # a process that is killed from here on leaves the names by which the next one skips the copy
            for part in pending:
                paths[part].replace(paths[part].with_suffix(_JOINED))
            for path in paths.values():
                os.truncate(path.with_suffix(_JOINED), 0)
        return {}

    def _copy_parts(self, key: int, paths: Mapping[int, Path], offsets: NDArray[np.int64]) -> None:
        target_path = self.folder / f"{key}.ids"
        target = os.open(target_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with full_disk_errors(target_path):
                for part, path in paths.items():
                    start, end = int(offsets[part]), int(offsets[part + 1])
                    with path.open("rb") as source:
                        if copy_bytes(source.fileno(), 0, target, start, end - start) < end - start:
                            raise truncated_error(path, end - start)
                os.fsync(target)
        finally:
            os.close(target)

    def _join_groups(self) -> list[range]:
        """Return the parts that each task of `join` copies: many small ones are flushed to the disk once."""
        starts = [0]
        size = 0
        for number, group in enumerate(self.groups):
            if size >= _JOIN_BYTES:
                starts.append(number)
                size = 0
            size += _bytes_of(group)
        return [range(*ends) for ends in pairwise([*starts, len(self.groups)])]

    def publish(self, prefixes: Sequence[Path], quarantine: Path) -> None:
        """Rename the files of a finished run to datasets, in place of earlier ones.

        Args:
            quarantine: path of the skipped rows, if there are any.
        """
        for key, prefix in enumerate(prefixes):
            publish_dataset(self.folder, key, prefix)
        rows = self.folder / QUARANTINE
        if not rows.exists():
            return  # an earlier process was killed after this step
        if rows.stat().st_size:
            rows.replace(quarantine)
        else:
            quarantine.unlink(missing_ok=True)  # of an earlier run

    def _part_folder(self, task: int) -> Path:
        return self.folder / "parts" / f"{task:05d}"


def _bytes_of(group: Sequence[InputRange]) -> int:
    """Return the bytes on disk."""
    return sum(part.size for part in group)


def pack_encoder(encoder: BlockEncoder) -> bytes:
    """Return an encoder as its workers receive it: they open it after they have set one thread for it."""
    return pickle.dumps(encoder)


@lru_cache(maxsize=1)
def _open_encoder(pickled: bytes) -> BlockEncoder:
    """Open the encoder in this process; its libraries use one thread."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    encoder: BlockEncoder = pickle.loads(pickled)
    return encoder


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to `folder` if the block succeeds, else remove it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = own_partial_file(folder)
    partial.mkdir()
    try:
        yield partial
        if folder.exists():  # of a task that was killed before it wrote its marker, or whose input changed
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def row_error(part: InputRange, error: RowError, rows: int, hint: str = _ROW_HINT) -> FormatError:
    """Return the error of a row of a range with the number of the row in its file.

    Args:
        rows: rows of the range before the block of the row.
        hint: what to do about the row.
    """
    before = count_rows_before(part)
    if before is not None:
        return error.error(part.item.path, before + rows + 1, hint)
    return FormatError(part.place(rows + error.row + 1), error.what, **error.values(), hint=hint)
