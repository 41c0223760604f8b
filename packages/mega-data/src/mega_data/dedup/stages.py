"""The stages of a deduplication; the `run` method of each does one task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.band_store import (
    count_documents,
    join_documents,
    open_column_writer,
    read_column,
    select_documents,
)
from mega_data.dedup.candidates import BYTES_PER_DOCUMENT, candidate_pairs
from mega_data.dedup.components import write_roots
from mega_data.dedup.corpus_shards import CorpusShards
from mega_data.dedup.earlier_output import keys_path
from mega_data.dedup.ids import open_id_writer, read_id
from mega_data.dedup.jaccard import SetReader, write_sets
from mega_data.dedup.minhash import band_keys, minhash_signatures
from mega_data.dedup.shingles import Shingles, text_digests
from mega_data.dedup.sorted_runs import count_cells, write_run
from mega_data.dedup.star_groups import StarGroups
from mega_data.dedup.union_find import find_roots, union_similar
from mega_data.dedup.work_files import BLOCK_PAIRS, WorkFiles, locate
from mega_data.error_limit import error_counts
from mega_data.jsonl_shards import LineCount, fail_on_row, output_name, read_whole_lines, skip_row
from mega_data.output_formats import open_output
from mega_data.readers.blocks import parse_json
from mega_data.task_stages import TaskResult
from mega_data.texts import dump_line, exact_numbers

Span = tuple[int, int, int]  # a shard, its first document and the end
MAX_RUN_DOCUMENTS = 1 << 31  # numbers in a run are 32-bit


@dataclass(frozen=True, slots=True)
class BandKeys:
    """Writes a shard's band keys.

    Attributes:
        keeps_ids: whether to store the ids of the documents.
    """

    files: WorkFiles
    corpus: CorpusShards
    keeps_ids: bool

    def run(self, shard: int) -> TaskResult:
        if self.files.has_earlier_keys(shard):
            count = count_documents(self.files.keys(shard), self.files.columns)
            return {"read": 0, "documents": count}
        count = 0
        preset = self.files.preset
        shingles = Shingles(preset)
        with ExitStack() as stack:
            put = stack.enter_context(open_column_writer(self.files.keys(shard), self.files.columns))
            is_new = self.corpus.is_new(shard)
            quarantine = None
            if self.corpus.skips and is_new:
                quarantine = stack.enter_context(self.corpus.open_quarantine(shard))
            ids = None
            if self.keeps_ids and is_new:
                ids = stack.enter_context(open_id_writer(self.files.ids, shard))
            on_error = quarantine or (skip_row if self.corpus.skips else fail_on_row)
            for texts, names in self.corpus.read_batches(shard, on_error):
                count += len(texts)
                if ids:
                    ids(names)
                if preset.unit == "text":
                    put(text_digests(texts))
                else:
                    table = minhash_signatures(shingles.keys_in_pieces(texts), len(texts), preset.bins)
                    put(band_keys(table, preset.bands))
        result = {"read": self.corpus.bytes_of(shard), "documents": count}
        return (
            result
            if quarantine is None
            else {**result, **error_counts(quarantine.count, quarantine.first, count, quarantine.damaged)}
        )


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """Writes the keys of a group of consecutive shards as sorted runs, and the documents of each shard.

    Attributes:
        groups: the shards of each group.
        memory: bytes for sorting; decides the documents of a run.
    """

    files: WorkFiles
    groups: tuple[range, ...]
    memory: int

    def run(self, group: int) -> TaskResult:
        shards = self.groups[group]
        columns, bands = self.files.columns, self.files.preset.bands
        sizes = [count_documents(self.files.keys(shard), columns) for shard in shards]
        limit = max(1, min(self.memory // BYTES_PER_DOCUMENT, MAX_RUN_DOCUMENTS))
        run_sizes = list[int]()
        for spans in _divide(sizes, limit):

            def read_column_of(column: int, spans: Sequence[Span] = spans) -> NDArray[np.uint64]:
                blocks = [
                    block
                    for shard, start, stop in spans
                    for block in read_column(self.files.keys(shards[shard]), column, columns, start, stop)
                ]
                return np.concatenate(blocks)

            size = sum(stop - start for _, start, stop in spans)
            cells = count_cells(size, self.files.ranges)
            checks = partial(read_column_of, 1) if columns > bands else None
            write_run(self.files.run(group, len(run_sizes)), bands, cells, read_column_of, checks)
            run_sizes.append(size)
        for path, numbers in ((self.files.shard_sizes, sizes), (self.files.run_sizes, run_sizes)):
            with open_output(path(group)) as out:
                out.write(np.array(numbers, "<u8").tobytes())
        return {"documents": sum(sizes), "runs": len(run_sizes)}


def _divide(sizes: Sequence[int], limit: int) -> Iterator[list[Span]]:
    """Divide the documents of shards, in order, into parts of `limit` documents; yield the spans of each."""
    spans = list[Span]()
    free = limit
    for shard, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + free)
            spans.append((shard, start, stop))
            free -= stop - start
            start = stop
            if not free:
                yield spans
                spans = []
                free = limit
    if spans:
        yield spans


@dataclass(frozen=True, slots=True)
class BandPairs:
    """Writes the pairs of a band in a part of the key range; the first task also writes shard offsets.

    Attributes:
        memory: bytes for sorting pairs.
        stars: finds the groups in tasks, which get the pairs as edges from the larger document; None: one
            task reads the pairs in their order.
    """

    files: WorkFiles
    memory: int
    stars: StarGroups | None = None

    def run(self, task: int) -> TaskResult:
        band, part = divmod(task, self.files.ranges)
        if task == 0:
            sizes = [np.fromfile(self.files.shard_sizes(group), "<u8") for group in range(self.files.groups)]
            with open_output(self.files.firsts) as out:
                out.write(np.cumsum(np.concatenate([np.zeros(1, "<u8"), *sizes]), dtype="<u8").tobytes())
        runs = self.files.read_runs()
        pairs = candidate_pairs(runs, band, part, self.files.ranges, self.memory)
        if self.stars is not None:
            total = sum(run.documents for run in runs)
            return {"pairs": self.stars.write_pairs(task, pairs, total)}
        count = 0
        with open_output(self.files.pairs(band, part)) as out:
            for block in pairs:
                out.write(block.astype("<u8").tobytes())
                count += len(block)
        return {"pairs": count}


@dataclass(frozen=True, slots=True)
class PairFlags:
    """Writes a bit per document: whether it has a pair.

    Attributes:
        memory: bytes of flags that are set in one pass over the pairs.
    """

    files: WorkFiles
    memory: int

    def run(self, _: int) -> TaskResult:
        total = self.files.read_firsts()[-1]
        count = 0
        with open_output(self.files.pair_flags) as out:
            for start in range(0, total, 8 * self.memory):
                stop = min(total, start + 8 * self.memory)
                flags = np.zeros(-(-(stop - start) // 8), np.uint8)
                for block in self.files.read_pairs():
                    documents = block[(block >= start) & (block < stop)] - np.uint64(start)
                    bits = np.uint64(1) << (documents & np.uint64(7))
                    np.bitwise_or.at(flags, documents >> np.uint64(3), bits.astype(np.uint8))
                out.write(flags.data)
                count += int(np.count_nonzero(np.unpackbits(flags)))
        return {"documents": count}


@dataclass(frozen=True, slots=True)
class PairedSets:
    """Writes the shingle sets of a shard's documents that have a pair."""

    files: WorkFiles
    corpus: CorpusShards

    def run(self, shard: int) -> TaskResult:
        firsts = self.files.read_firsts()
        first_byte = firsts[shard] // 8
        flags = np.fromfile(
            self.files.pair_flags, np.uint8, firsts[shard + 1] // 8 + 1 - first_byte, offset=first_byte
        )
        start = firsts[shard] - 8 * first_byte
        is_paired = np.unpackbits(flags, bitorder="little")[start:][: firsts[shard + 1] - firsts[shard]].view(
            bool
        )
        shingles = Shingles(self.files.preset)
        first = 0

        def paired_sets() -> Iterator[tuple[Any, NDArray[np.bool_]]]:
            nonlocal first
            if not is_paired.any():
                if len(is_paired):
                    yield np.empty(0, np.uint64), is_paired
                return
            for texts, _ in self.corpus.read_batches(shard, skip_row):
                flags = is_paired[first : first + len(texts)]
                first += len(texts)
                yield shingles.shingle_sets(list(compress(texts, flags))), flags

        write_sets(self.files.sets, shard, paired_sets())
        return {"read": self.corpus.bytes_of(shard), "documents": int(np.count_nonzero(is_paired))}


@dataclass(frozen=True, slots=True)
class DuplicateGroups:
    """Writes the root of each document.

    Attributes:
        memory: bytes for the roots, unless pairs are compared.
    """

    files: WorkFiles
    memory: int

    def run(self, _: int) -> TaskResult:
        firsts = self.files.read_firsts()
        total = firsts[-1]
        if self.files.preset.jaccard is None:
            write_roots(self.files.read_pairs(), total, self.files.roots, self.files.components, self.memory)
        else:
            self._write_similar_roots(firsts, self.files.preset.jaccard)
        return {"documents": total}

    def _write_similar_roots(self, firsts: list[int], threshold: float) -> None:
        """Compare pairs in their order: which ones are compared depends on the groups so far."""
        total = firsts[-1]
        with open_output(self.files.roots) as out:
            for start in range(0, total, BLOCK_PAIRS):
                out.write(np.arange(start, min(start + BLOCK_PAIRS, total), dtype="<u8").tobytes())
        if not total:
            return
        roots_file = np.memmap(self.files.roots, "<u8", "r+")
        parents = roots_file.view(np.ndarray)
        sets = SetReader(self.files.sets, firsts[:-1])
        union_similar(parents, self.files.read_pairs(), partial(sets.is_similar, threshold=threshold))
        for start in range(0, total, BLOCK_PAIRS):
            numbers = np.arange(start, min(start + BLOCK_PAIRS, total))
            parents[numbers] = find_roots(parents, numbers)
        roots_file.flush()


@dataclass(frozen=True, slots=True)
class DocumentFilter:
    """Writes the kept lines of a shard of the run; counts the dropped ones.

    Attributes:
        kept_keys: folder of the keys of the kept documents; None does not write them.
    """

    files: WorkFiles
    corpus: CorpusShards
    kept_keys: Path | None = None

    def run(self, task: int) -> TaskResult:
        outputs = self.corpus.outputs
        shard = len(self.corpus.earlier) + task
        firsts = self.files.read_firsts()
        numbers = slice(firsts[shard], firsts[shard + 1])
        document_roots = (
            np.memmap(self.files.roots, "<u8", "r")[numbers]
            if numbers.stop > numbers.start
            else np.empty(0, np.uint64)
        )
        skips = self.corpus.skips
        quarantined = self.corpus.open_quarantine(shard).line_numbers() if skips else set()
        counts = dict.fromkeys(("documents", "bytes", "kept", "kept_bytes"), 0)
        counts |= {"skipped": len(quarantined), "read": self.corpus.bytes_of(shard)}
        paths = [outputs.output_path(task)]
        if outputs.dropped is not None:
            paths.append(outputs.dropped_path(task))
        is_kept = np.zeros(firsts[shard + 1] - firsts[shard], bool)
        # a number in a list is read several times as fast as one in an array
        is_root = (document_roots == np.arange(numbers.start, numbers.stop, dtype=np.uint64)).tolist()
        count = LineCount()
        with _open_all(paths) as outs:
            on_error = skip_row if skips else fail_on_row
            lines = read_whole_lines(outputs.ranges[task], on_error, count=count)
            for row, (number, line) in enumerate(lines):
                if number in quarantined or not line.strip():
                    continue
                counts["documents"] += 1
                counts["bytes"] += len(line)
                if is_root[row]:
                    is_kept[row] = True
                    counts["kept"] += 1
                    counts["kept_bytes"] += len(line)
                    outs[0].write(line if line.endswith(b"\n") else line + b"\n")
                elif outputs.dropped is not None:
                    kept_document = self._document_name(int(document_roots[row]), firsts)
                    values = exact_numbers(line, parse_json(line))
                    outs[1].write(dump_line({**values, "dropped": f"like {kept_document}"}))
        if self.kept_keys is not None:
            keys = self._kept_keys_path(task)
            select_documents(self.files.keys(shard), self.files.columns, is_kept, keys)
        return {**counts, "lines": count.value}

    def join_keys(self, tasks: range) -> None:
        """Write the keys of the kept documents of a divided input."""
        if self.kept_keys is not None:
            outputs = self.corpus.outputs
            name = output_name(outputs.ranges[tasks[0]].item.path, outputs.suffix)
            paths = map(self._kept_keys_path, tasks)
            join_documents(paths, self.files.columns, keys_path(self.kept_keys, name))

    def _kept_keys_path(self, task: int) -> Path:
        assert self.kept_keys is not None
        outputs = self.corpus.outputs
        name = output_name(outputs.ranges[task].item.path, outputs.suffix)
        return outputs.side_path(task, self.kept_keys, keys_path(self.kept_keys, name).name)

    def _document_name(self, document: int, firsts: list[int]) -> str:
        """Return a document's id, or its file and line; the path of an earlier file."""
        shard, index = locate(document, firsts)
        if self.corpus.is_new(shard) and self.corpus.id_key:
            return read_id(self.files.ids, shard, index)
        return self.corpus.name_of(document, firsts)


@contextmanager
def _open_all(paths: Sequence[Path]) -> Iterator[list[IO[bytes]]]:
    """Open files to write; all are published when the block ends without an error."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_output(path)) for path in paths]
