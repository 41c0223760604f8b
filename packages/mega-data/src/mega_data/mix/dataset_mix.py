"""Shuffle the documents of datasets by weight into a dataset for each split, as tasks.

    sort     a task per range of documents   keys and splits of the documents -> a sorted part per split
    gather   a task per split and bucket     the same range of the keys of all parts -> its place in the .bin
    index    a task per split                lengths and documents of its buckets -> .idx, .json

The order is that of random keys, so it depends on the seed and not on tasks, memory or workers. A task holds
about a quarter of `memory` of ids, which are read once and written twice in all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_data.dataset_files import publish_dataset, read_chunks, write_index_files
from mega_data.jsonl_shards import file_states
from mega_data.mix.random_keys import choose_split, count_copies, sort_copies
from mega_data.mix.sorted_parts import (
    Counts,
    DocumentBatch,
    bucket_counts,
    concatenate,
    cumulative,
    read_part,
    sum_counts,
    write_part,
)
from mega_data.mix.sources import SPLITS, DocumentRange, MixSource, divide_source
from mega_data.output_formats import open_output
from mega_data.task_stages import PLAN, TaskResult, TaskStage, open_run_folder, read_results
from mega_schema.atomic_io import full_disk_errors, write_at
from mega_schema.dataset.idx_content import IndexStreams
from mega_schema.dataset.indexed_dataset import DatasetInfo
from mega_schema.errors import ConfigError
from mega_schema.outputs import dataset_files

TRAINING: Final = 0  # index in SPLITS
_MEMORY_SHARE: Final = 4  # of a task's memory: ids, their copy in order, index, numpy's temporary arrays
_MAX_EPOCHS: Final = 10_000  # the copies of a range are sorted in memory
_DOCUMENT_BYTES: Final = 64  # keys, order and counts of a document


@dataclass(frozen=True, slots=True)
class DatasetMix:
    """A run that writes mixed datasets.

    Attributes:
        epochs: how often each source's training documents are read.
        fractions: of the documents, for each of SPLITS.
        output: folder of the datasets.
        info: content of PREFIX.json, without counts; None: the sources have none.
        memory: bytes per task.
    """

    sources: tuple[MixSource, ...]
    epochs: tuple[float, ...]
    fractions: tuple[float, ...]
    seed: int
    output: Path
    work: Path
    info: DatasetInfo | None
    memory: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.sources[0].data.dtype

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run.
        """
        files = [file for source in self.sources for file in dataset_files(source.prefix) if file.exists()]
        wanted = {
            "inputs": file_states(files),
            "epochs": self.epochs,
            "fractions": self.fractions,
            "seed": self.seed,
            "memory": self.memory,
            "output": str(self.output.resolve()),
        }
        open_run_folder(self.work, wanted)

    def ranges(self) -> list[DocumentRange]:
        """Return the ranges of documents that the tasks of the first stage read."""
        size = self.memory // _MEMORY_SHARE
        return [
            part
            for number, source in enumerate(self.sources)
            for part in divide_source(source, number, size, max(1, size // _DOCUMENT_BYTES))
        ]

    def buckets(self) -> list[tuple[int, int]]:
        """Return the split and the number in it of each bucket."""
        counts = [self._bucket_count(split) for split in range(len(SPLITS))]
        return [(split, number) for split, count in enumerate(counts) for number in range(count)]

    def _bucket_count(self, split: int) -> int:
        """Return the number of buckets of a split, each expected to fit in the memory of a task."""
        size = 0.0
        for source, epochs in zip(self.sources, self.epochs, strict=True):
            copies = epochs if split == TRAINING else 1.0
            unit = source.data.tokens * self.dtype.itemsize + source.documents * _DOCUMENT_BYTES
            size += unit * self.fractions[split] * copies
        return int(size // (self.memory // _MEMORY_SHARE)) + 1

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""
        ranges = self.ranges()
        sizes = tuple(self._range_bytes(part) for part in ranges)
        sort = TaskStage("sort", len(ranges), self.sort, sizes=sizes)
        gather = TaskStage("gather", len(self.buckets()), self.gather, after=sort)
        return [sort, gather, TaskStage("index", len(SPLITS), self.index, after=gather)]

    def _range_bytes(self, part: DocumentRange) -> int:
        data = self.sources[part.source].data
        first, last = (int(data.documents[document]) for document in (part.first, part.last))
        ends = [
            int(data.pointers[n]) if n < len(data) else data.tokens * data.dtype.itemsize
            for n in (first, last)
        ]
        return ends[1] - ends[0]

    def sort(self, task: int) -> TaskResult:
        """Write the documents of a range, sorted by key, a part for each split; return their counts."""
        part = self.ranges()[task]
        documents = self._read_range(part)
        numbers = np.arange(part.first, part.last)
        split_numbers = choose_split(self.seed, part.source, numbers, self.fractions)
        copies = count_copies(self.seed, part.source, numbers, self.epochs[part.source])
        copies[split_numbers != TRAINING] = 1
        tokens = documents.tokens
        available = list[tuple[int, int]]()
        buckets = list[list[Counts]]()
        for split in range(len(SPLITS)):
            members = np.flatnonzero(split_numbers == split)
            available.append((len(members), int(tokens[members].sum())))
            order, keys = sort_copies(self.seed, part.source, part.first, members, copies)
            selected, payload = documents.select(order, keys)
            write_part(self._part_folder(task), split, selected, payload)
            buckets.append(bucket_counts(selected, tokens[order], self._bucket_count(split)))
        counts = {"read": self._range_bytes(part), "documents": len(numbers)}
        return {"source": part.source, "available": available, "buckets": buckets, **counts}

    def _read_range(self, part: DocumentRange) -> DocumentBatch:
        data = self.sources[part.source].data
        bounds = np.array(data.documents[part.first : part.last + 1], np.int64)
        lengths = np.array(data.lengths[bounds[0] : bounds[-1]], np.int32)
        first = int(data.pointers[bounds[0]]) // data.dtype.itemsize if bounds[0] < len(data) else data.tokens
        ids = data.copy_range(first, first + int(lengths.sum(dtype=np.int64)))
        return DocumentBatch(np.zeros(len(bounds) - 1, np.uint64), np.diff(bounds), lengths, ids)

    def gather(self, task: int) -> TaskResult:
        """Write a bucket's documents, in order, to their place in the .bin of the split."""
        split, bucket = self.buckets()[task]
        results = read_results(self.stages()[0], self.work)
        parts = list[DocumentBatch]()
        for number, result in enumerate(results):
            counts = result["buckets"][split]
            before = sum_counts(counts[:bucket])
            parts.append(
                read_part(self._part_folder(number), split, self.dtype, before, tuple(counts[bucket]))
            )
        documents = concatenate(parts, self.dtype)
        del parts
        order = np.argsort(documents.keys, kind="stable")
        ordered, payload = documents.select(order, documents.keys[order])
        for name, values in (("lengths", ordered.lengths), ("sequences", ordered.sequences)):
            with open_output(self._bucket_file(split, bucket, name)) as out:
                out.write(values.tobytes())
        earlier = sum_counts([tuple(row) for r in results for row in r["buckets"][split][:bucket]])
        self._write_payload(split, earlier[2] * self.dtype.itemsize, payload)
        return {"read": documents.ids.nbytes, "documents": len(order)}

    def _write_payload(self, split: int, offset: int, payload: Iterator[bytes]) -> None:
        path = self.work / f"{split}.ids"
        with full_disk_errors(path):
            target = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                for block in payload:
                    write_at(target, memoryview(block), offset)
                    offset += len(block)
                os.fsync(target)
            finally:
                os.close(target)

    def index(self, split: int) -> TaskResult:
        """Write the index of a split and return its counts."""
        buckets = range(self._bucket_count(split))
        totals = self.totals(split)
        documents, sequences, tokens = sum_counts(totals)

        def lengths() -> Iterator[NDArray[Any]]:
            for bucket in buckets:
                yield from read_chunks(self._bucket_file(split, bucket, "lengths"), np.int32)

        def boundaries() -> Iterator[NDArray[Any]]:
            end = 0
            yield np.zeros(1, np.int64)
            for bucket in buckets:
                for chunk in read_chunks(self._bucket_file(split, bucket, "sequences"), np.int64):
                    ends = cumulative(chunk)[1:] + end
                    yield ends
                    end = int(ends[-1])

        contents = IndexStreams(self.dtype, sequences, documents + 1, lengths, boundaries)
        with full_disk_errors(self.work):
            write_index_files(self.work, split, "mmap", contents, self.info, tokens)
        return {"documents": documents, "sequences": sequences, "tokens": tokens}

    def totals(self, split: int) -> list[Counts]:
        """Return what each source gives to a split, repetitions included."""
        totals: list[Counts] = [(0, 0, 0)] * len(self.sources)
        for result in read_results(self.stages()[0], self.work):
            rows = [totals[result["source"]], *map(tuple, result["buckets"][split])]
            totals[result["source"]] = sum_counts(rows)
        return totals

    def available(self, split: int) -> list[tuple[int, int]]:
        """Return the documents and tokens of each source that are in a split, without repetitions."""
        totals = [(0, 0)] * len(self.sources)
        for result in read_results(self.stages()[0], self.work):
            documents, tokens = result["available"][split]
            before = totals[result["source"]]
            totals[result["source"]] = (before[0] + documents, before[1] + tokens)
        return totals

    def publish(self, split: int) -> None:
        """Rename the files of a split to a dataset in the output folder."""
        self.output.mkdir(parents=True, exist_ok=True)
        publish_dataset(self.work, split, self.output / dataset_name(split))

    def _part_folder(self, task: int) -> Path:
        return self.work / "parts" / f"{task:05d}"

    def _bucket_file(self, split: int, bucket: int, name: str) -> Path:
        return self.work / "buckets" / f"{split}-{bucket:05d}.{name}"


def check_mix_size(
    sources: Sequence[MixSource],
    epochs: Sequence[float],
    fractions: Sequence[float],
    work: Path,
    output: Path,
) -> None:
    """Refuse a mix that does not fit on the disk, before anything of its size is allocated.

    A run that has begun is not checked: its own files take part of the room.

    Args:
        work: folder of the parts and of the datasets before they are published.

    Raises:
        ConfigError: a source is read too often, or the disk has not enough room.
    """
    for source, count in zip(sources, epochs, strict=True):
        if count > _MAX_EPOCHS:
            found, wanted = f"{count:,.0f} epochs of {source.prefix}", f"at most {_MAX_EPOCHS:,} epochs"
            raise ConfigError("--tokens", "repeats a dataset too often", found=found, wanted=wanted)
    if (work / PLAN).exists():
        return
    size = 0.0
    for source, count in zip(sources, epochs, strict=True):
        unit = source.data.tokens * source.data.dtype.itemsize
        size += unit * (fractions[TRAINING] * count + 1 - fractions[TRAINING])
    # the parts and the datasets are in the work folder at the same time
    for option, folder, needed in (("--work-dir", work, 2 * size), ("--output", output, size)):
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            found, wanted = f"{free / 1e9:,.1f} GB in {folder}", f"{needed / 1e9:,.1f} GB"
            hint = "fewer --tokens, or a folder on a larger disk"
            raise ConfigError(option, "has not enough room", found=found, wanted=wanted, hint=hint)


def dataset_name(split: int) -> str:
    """Return the name of the prefix of a split."""
    return f"{SPLITS[split]}_document"
