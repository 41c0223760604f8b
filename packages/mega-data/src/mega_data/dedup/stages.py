"""The stages of a deduplication; the `run` method of each does one task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.band_store import count_documents, open_column_writer, read_entries
from mega_data.dedup.candidates import candidate_pairs
from mega_data.dedup.corpus_shards import CorpusShards
from mega_data.dedup.ids import open_id_writer, read_id
from mega_data.dedup.jaccard import SetReader, write_sets
from mega_data.dedup.minhash import band_keys, minhash_signatures
from mega_data.dedup.shingles import Shingles, text_digests
from mega_data.dedup.union_find import find_roots, union, union_similar
from mega_data.dedup.work_files import BLOCK_PAIRS, WorkFiles, locate
from mega_data.error_limit import error_counts
from mega_data.jsonl_shards import fail_on_row, output_name, read_whole_lines, skip_row
from mega_data.output_formats import open_output
from mega_data.readers.blocks import parse_json
from mega_data.task_stages import TaskResult
from mega_data.texts import dump_line, exact_numbers
from mega_schema.atomic_io import reserve


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
        count = 0
        preset = self.files.preset
        shingles = Shingles(preset)
        with ExitStack() as stack:
            put = stack.enter_context(open_column_writer(self.files.keys(shard), self.files.columns))
            skips = self.corpus.quarantine is not None
            quarantine = stack.enter_context(self.corpus.open_quarantine(shard)) if skips else None
            ids = stack.enter_context(open_id_writer(self.files.ids, shard)) if self.keeps_ids else None
            for texts, names in self.corpus.read_batches(shard, quarantine or fail_on_row):
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
class BandPairs:
    """Writes a band's pairs and the set of documents in pairs; the first band also writes shard offsets.

    Attributes:
        memory: bytes for sorting pairs.
    """

    files: WorkFiles
    shards: int
    memory: int

    def run(self, band: int) -> TaskResult:
        keys_files = [self.files.keys(shard) for shard in range(self.shards)]
        count = 0
        ends = accumulate(count_documents(file, self.files.columns) for file in keys_files)
        firsts = np.array([0, *ends], "<u8")
        if band == 0:
            with open_output(self.files.firsts) as out:
                out.write(firsts.tobytes())
        with open_output(self.files.pairs(band)) as out, open_output(self.files.pair_flags(band)) as flags:
            reserve(flags, int(firsts[-1]))
            paired = np.memmap(flags.name, bool, "r+") if firsts[-1] else np.empty(0, bool)
            for block in candidate_pairs(keys_files, band, self.files.columns, self.memory):
                out.write(block.astype("<u8").tobytes())
                paired[block.ravel().astype(np.int64)] = True
                count += len(block)
        return {"pairs": count}


@dataclass(frozen=True, slots=True)
class PairedSets:
    """Writes the shingle sets of a shard's documents that have a pair."""

    files: WorkFiles
    corpus: CorpusShards

    def run(self, shard: int) -> TaskResult:
        firsts = self.files.read_firsts()
        is_paired = np.zeros(firsts[shard + 1] - firsts[shard], bool)
        for band in range(self.files.preset.bands):
            is_paired |= np.fromfile(self.files.pair_flags(band), bool, len(is_paired), offset=firsts[shard])
        shingles = Shingles(self.files.preset)
        first = 0

        def paired_sets() -> Iterator[tuple[Any, NDArray[np.bool_]]]:
            nonlocal first
            for texts, _ in self.corpus.read_batches(shard, skip_row):
                flags = is_paired[first : first + len(texts)]
                first += len(texts)
                yield shingles.shingle_sets(list(compress(texts, flags))), flags

        write_sets(self.files.sets, shard, paired_sets())
        return {"read": self.corpus.bytes_of(shard), "documents": int(np.count_nonzero(is_paired))}


@dataclass(frozen=True, slots=True)
class DuplicateGroups:
    """Writes the root of each document."""

    files: WorkFiles

    def run(self, _: int) -> TaskResult:
        preset = self.files.preset
        firsts = self.files.read_firsts()
        total = firsts[-1]
        with open_output(self.files.roots) as out:
            for start in range(0, total, BLOCK_PAIRS):
                out.write(np.arange(start, min(start + BLOCK_PAIRS, total), dtype="<u8").tobytes())
        if not total:
            return {"documents": 0}
        roots_file = np.memmap(self.files.roots, "<u8", "r+")
        parents = roots_file.view(np.ndarray)
        if preset.jaccard is not None:
            sets = SetReader(self.files.sets, firsts[:-1])
            union_similar(
                parents, self.files.read_pairs(), partial(sets.is_similar, threshold=preset.jaccard)
            )
        else:
            for block in self.files.read_pairs():
                union(parents, self._equal_hashes(block, firsts) if preset.unit == "text" else block)
        for start in range(0, total, BLOCK_PAIRS):
            numbers = np.arange(start, min(start + BLOCK_PAIRS, total))
            parents[numbers] = find_roots(parents, numbers)
        roots_file.flush()
        return {"documents": total}

    def _equal_hashes(self, block: NDArray[np.uint64], firsts: list[int]) -> NDArray[np.uint64]:
        """Select the pairs that agree in the second half of the hash too."""
        halves = np.empty(block.shape, np.uint64)
        shard = np.searchsorted(firsts, block, "right") - 1
        for number in np.unique(shard):
            in_shard = shard == number
            indices = block[in_shard] - np.uint64(firsts[number])
            halves[in_shard] = read_entries(self.files.keys(int(number)), 1, self.files.columns, indices)
        equal: NDArray[np.uint64] = block[halves[:, 0] == halves[:, 1]]
        return equal


@dataclass(frozen=True, slots=True)
class DocumentFilter:
    """Writes the kept lines of a shard; counts the dropped ones.

    Attributes:
        output: folder of the kept lines.
        dropped: folder of the dropped documents; None does not write them.
        suffix: suffix of the format of the kept lines, see `output_formats`.
    """

    files: WorkFiles
    corpus: CorpusShards
    output: Path
    dropped: Path | None
    suffix: str

    def run(self, shard: int) -> TaskResult:
        firsts = self.files.read_firsts()
        source = self.corpus.inputs[shard]
        numbers = slice(firsts[shard], firsts[shard + 1])
        document_roots = (
            np.memmap(self.files.roots, "<u8", "r")[numbers]
            if numbers.stop > numbers.start
            else np.empty(0, np.uint64)
        )
        skips = self.corpus.quarantine is not None
        quarantined = self.corpus.open_quarantine(shard).line_numbers() if skips else set()
        counts = dict.fromkeys(("documents", "bytes", "kept", "kept_bytes"), 0)
        counts |= {"skipped": len(quarantined), "read": self.corpus.bytes_of(shard)}
        paths = [self.output / output_name(source, self.suffix)]
        if self.dropped is not None:
            paths.append(self.dropped / output_name(source))
        with _open_all(paths) as outs:
            lines = read_whole_lines(source, skip_row if skips else fail_on_row)
            for row, (number, line) in enumerate(lines):
                if number in quarantined or not line.strip():
                    continue
                counts["documents"] += 1
                counts["bytes"] += len(line)
                if int(document_roots[row]) == firsts[shard] + row:
                    counts["kept"] += 1
                    counts["kept_bytes"] += len(line)
                    outs[0].write(line if line.endswith(b"\n") else line + b"\n")
                elif self.dropped is not None:
                    kept_document = self._document_name(int(document_roots[row]), firsts)
                    values = exact_numbers(line, parse_json(line))
                    outs[1].write(dump_line({**values, "dropped": f"like {kept_document}"}))
        return counts

    def _document_name(self, document: int, firsts: list[int]) -> str:
        """Return a document's id, or its file and line."""
        shard, index = locate(document, firsts)
        if self.corpus.id_key:
            return read_id(self.files.ids, shard, index)
        return f"{self.corpus.inputs[shard].name}:{index + 1}"


@contextmanager
def _open_all(paths: Sequence[Path]) -> Iterator[list[IO[bytes]]]:
    """Open files to write; all are published when the block ends without an error."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_output(path)) for path in paths]
