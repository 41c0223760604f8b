"""Shuffle the lines of JSON-lines sources by weight into files for each split, as tasks.

    count    a task per file               lines and bytes
    sort     a task per file               lines, by random keys -> sorted parts of bounded size
    gather   a task per split and bucket   the same range of the keys of all parts -> SPLIT-NUMBER.jsonl

As in `dataset_mix`, the order of the lines depends on the seed alone. The number of files of a split depends
on `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mega_data.jsonl_shards import fail_on_row, file_bytes, file_states, find_shards, read_whole_lines
from mega_data.mix.mix_report import add_shares
from mega_data.mix.random_keys import choose_split, count_copies, sort_copies
from mega_data.mix.sorted_parts import (
    DocumentBatch,
    bucket_counts,
    concatenate,
    read_part,
    sum_counts,
    write_part,
)
from mega_data.mix.sources import SPLITS, balance_epochs, parse_weights
from mega_data.output_formats import open_output
from mega_data.task_stages import TaskResult, TaskStage, open_run_folder, read_results
from mega_schema.errors import ConfigError

OPTION: Final = "--input"
_TRAINING: Final = 0  # index in SPLITS
_MEMORY_SHARE: Final = 6  # of a task's memory: lines, their bytes end to end, and these in order
_LINE_BYTES: Final = 128  # of a line besides its text: a Python object, keys and order
_COMPRESSION: Final = 6  # expected ratio, for the number of files
_PLAIN: Final = frozenset({".jsonl", ".json", ".csv", ".tsv"})
_BYTES: Final = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class TextSource:
    """Files and their share.

    Attributes:
        word: the word that names them.
        weight: relative share of the bytes; None: as many as the files have.
    """

    word: Path
    files: tuple[Path, ...]
    weight: float | None


def find_text_sources(words: Sequence[str]) -> tuple[TextSource, ...]:
    """Return the sources that the words name: files, globs or folders, with a weight before each or none.

    Raises:
        ConfigError: as `parse_weights`; a word names no file, or two words name the same file.
    """
    sources = tuple(
        TextSource(word, tuple(find_shards([word])), weight)
        for word, weight in parse_weights(OPTION, words, "")
    )
    seen = set[Path]()
    for file in (file for source in sources for file in source.files):
        if file.resolve() in seen:
            hint = "name it once, with the sum of the weights"
            raise ConfigError(OPTION, "names a file twice", found=file, hint=hint)
        seen.add(file.resolve())
    return sources


@dataclass(frozen=True, slots=True)
class TextMix:
    """A run that mixes lines.

    Attributes:
        fractions: of the lines, for each of SPLITS.
        output: folder of the files.
        memory: bytes per task.
    """

    sources: tuple[TextSource, ...]
    fractions: tuple[float, ...]
    seed: int
    output: Path
    work: Path
    memory: int

    @property
    def files(self) -> list[Path]:
        """Return the files of all sources; each is a task."""
        return [file for source in self.sources for file in source.files]

    @property
    def owners(self) -> list[int]:
        """Return the number of the source of each file."""
        return [number for number, source in enumerate(self.sources) for _ in source.files]

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run.
        """
        weights = [(str(source.word), source.weight) for source in self.sources]
        wanted = {"inputs": file_states(self.files), "weights": weights, "fractions": self.fractions}
        numbers = {"seed": self.seed, "memory": self.memory, "output": str(self.output.resolve())}
        open_run_folder(self.work, {**wanted, **numbers})

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""
        sizes = tuple(map(file_bytes, self.files))
        count = TaskStage("count", len(sizes), self.count, sizes=sizes)
        sort = TaskStage("sort", len(sizes), self.sort, after=count, sizes=sizes)
        return [count, sort, TaskStage("gather", len(self.buckets()), self.gather, after=sort)]

    def buckets(self) -> list[tuple[int, int]]:
        """Return the split and the number in it of each output file."""
        return [(split, n) for split in range(len(SPLITS)) for n in range(self._bucket_count(split))]

    def _bucket_count(self, split: int) -> int:
        ratios = [1 if file.suffix in _PLAIN else _COMPRESSION for file in self.files]
        size = sum(file_bytes(file) * ratio for file, ratio in zip(self.files, ratios, strict=True))
        return int(size * self.fractions[split] // (self.memory // _MEMORY_SHARE)) + 1

    def count(self, task: int) -> TaskResult:
        """Count the lines of a file that are not blank, and their bytes with line breaks."""
        lines = size = 0
        for line in self._lines(task):
            lines += 1
            size += len(line)
        return {"lines": lines, "bytes": size, "read": file_bytes(self.files[task]), "documents": lines}

    def _lines(self, task: int) -> Iterator[bytes]:
        for _, line in read_whole_lines(self.files[task], fail_on_row):
            if line.strip():
                yield line if line.endswith(b"\n") else line + b"\n"

    def epochs(self) -> tuple[float, ...]:
        """Return how often each source's training lines are read."""
        available = [0.0] * len(self.sources)
        for owner, result in zip(self.owners, read_results(self.stages()[0], self.work), strict=True):
            available[owner] += result["bytes"] * self.fractions[_TRAINING]
        return balance_epochs(available, [source.weight for source in self.sources], None)

    def sort(self, task: int) -> TaskResult:
        """Write the lines of a file as sorted parts; return their counts."""
        epochs = self.epochs()[self.owners[task]]
        parts = list[dict[str, Any]]()
        first = 0
        for lines in self._batches(task):
            parts.append(self._write_part(task, len(parts), first, lines, epochs))
            first += len(lines)
        return {"parts": parts, "read": file_bytes(self.files[task]), "documents": first}

    def _batches(self, task: int) -> Iterator[list[bytes]]:
        """Yield the lines in lists that fit in the memory of a task."""
        lines = list[bytes]()
        size = 0
        for line in self._lines(task):
            lines.append(line)
            size += len(line) + _LINE_BYTES
            if size >= self.memory // _MEMORY_SHARE:
                yield lines
                lines = []
                size = 0
        if lines:
            yield lines

    def _write_part(
        self, task: int, part: int, first: int, lines: list[bytes], epochs: float
    ) -> dict[str, Any]:
        numbers = np.arange(first, first + len(lines))
        split_numbers = choose_split(self.seed, task, numbers, self.fractions)
        copies = count_copies(self.seed, task, numbers, epochs)
        copies[split_numbers != _TRAINING] = 1
        lengths = np.array([len(line) for line in lines], np.int64)
        ones = np.ones(len(lines), np.int64)
        ids = np.frombuffer(b"".join(lines), _BYTES)
        batch = DocumentBatch(np.zeros(len(lines), np.uint64), ones, lengths.astype(np.int32), ids)
        available, buckets = [], []
        for split in range(len(SPLITS)):
            members = np.flatnonzero(split_numbers == split)
            available.append((len(members), int(lengths[members].sum())))
            order, keys = sort_copies(self.seed, task, first, members, copies)
            selected, payload = batch.select(order, keys)
            write_part(self._part_folder(task, part), split, selected, payload)
            buckets.append(bucket_counts(selected, lengths[order], self._bucket_count(split)))
        return {"available": available, "buckets": buckets}

    def gather(self, task: int) -> TaskResult:
        """Write a file of a split: the lines of a bucket, in order."""
        split, bucket = self.buckets()[task]
        parts = list[DocumentBatch]()
        for number, result in enumerate(read_results(self.stages()[1], self.work)):
            for part, values in enumerate(result["parts"]):
                counts = values["buckets"][split]
                before = sum_counts(counts[:bucket])
                folder = self._part_folder(number, part)
                parts.append(read_part(folder, split, _BYTES, before, tuple(counts[bucket])))
        lines = concatenate(parts, _BYTES)
        del parts
        order = np.argsort(lines.keys, kind="stable")
        _, payload = lines.select(order, lines.keys[order])
        if len(order):
            with open_output(self.output / output_file(split, bucket)) as out:
                for block in payload:
                    out.write(block)
        return {"lines": len(order)}

    def report(self) -> dict[str, Any]:
        """Return the counts of a finished mix, by split and source, and the names of its files."""
        results = read_results(self.stages()[1], self.work)
        splits = dict[str, list[dict[str, Any]]]()
        for split, name in enumerate(SPLITS):
            rows = []
            for number, source in enumerate(self.sources):
                parts = [
                    part
                    for owner, result in zip(self.owners, results, strict=True)
                    if owner == number
                    for part in result["parts"]
                ]
                documents, _, size = sum_counts([c for part in parts for c in part["buckets"][split]])
                available = [sum(part["available"][split][column] for part in parts) for column in (0, 1)]
                values = {"source": str(source.word), "weight": source.weight}
                values |= {"documents": documents, "bytes": size}
                values |= {"available_documents": available[0], "available_bytes": available[1]}
                rows.append({**values, "epochs": size / available[1] if available[1] else 0.0})
            splits[name] = rows
        counts = read_results(self.stages()[2], self.work)
        names = [
            output_file(*bucket)
            for bucket, result in zip(self.buckets(), counts, strict=True)
            if result["lines"]
        ]
        return {"seed": self.seed, "splits": add_shares(splits, "bytes"), "files": names}

    def _part_folder(self, task: int, part: int) -> Path:
        return self.work / "parts" / f"{task:05d}-{part:05d}"


def output_file(split: int, bucket: int) -> str:
    """Return the name of a file of a split."""
    return f"{SPLITS[split]}-{bucket:05d}.jsonl"
