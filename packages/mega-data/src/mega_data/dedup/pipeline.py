"""Remove near-duplicates from a corpus in five stages of tasks that exchange files in a work folder.

    keys     a task per shard    text -> band keys, one per line and band
    pairs    a task per band     equal keys -> pairs of documents
    sets     a task per shard    shingle sets of the documents that have a pair, if pairs are checked
    groups   one task            pairs, checked -> the root of each document, its group's smallest
    filter   a task per shard    lines whose document is its own root, byte for byte

A document's number is its place: shards sorted by name, then lines. So the kept documents depend neither on
the workers nor on the executor nor on the order of the input files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, compress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.band_store import count_documents, open_column_writer, take
from mega_data.dedup.candidates import candidate_pairs
from mega_data.dedup.ids import open_id_writer, read_id
from mega_data.dedup.jaccard import SetReader, write_sets
from mega_data.dedup.minhash import band_keys, minhash_signatures
from mega_data.dedup.presets import Preset
from mega_data.dedup.shingles import Shingles, text_digests
from mega_data.dedup.union_find import find_roots, union, union_similar
from mega_data.error_limit import error_counts
from mega_data.jsonl_shards import (
    Quarantine,
    RowErrorHandler,
    fail_on_row,
    file_bytes,
    file_states,
    open_output,
    output_name,
    read_batches,
    read_whole_lines,
    skip_row,
)
from mega_data.readers.blocks import parse_json
from mega_data.task_stages import ReusableTasks, TaskResult, TaskStage, open_run_folder
from mega_data.texts import dump_line, exact_numbers
from mega_schema.atomic_io import reserve

BATCH_CHARACTERS = 1 << 17  # arrays of this length stay in a core's cache
DEFAULT_MEMORY = 256 << 20  # bytes
_PAIR_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Deduplication:
    """A deduplication run.

    Attributes:
        inputs: shards in the order of `jsonl_shards.find_shards`.
        output: folder of the kept lines, a file per shard.
        work: folder of intermediate files; may be removed after the run.
        memory: bytes for sorting pairs.
        dropped: folder of the dropped documents, each with the document that it duplicates; None does not
            write them.
        quarantine: folder of the lines that are no documents; None ends the run at the first.
        id_key: key of the id by which `dropped` names documents; "" names them by file and line.
    """

    inputs: tuple[Path, ...]
    output: Path
    work: Path
    preset: Preset
    key: str = "text"
    memory: int = DEFAULT_MEMORY
    dropped: Path | None = None
    quarantine: Path | None = None
    id_key: str = ""

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run.
        """
        options = {"preset": asdict(self.preset), "key": self.key, "id_key": self.id_key}
        folders = {"output": str(self.output.resolve()), "dropped": str(self.dropped)}
        skip = {"skip": self.quarantine is not None}
        reuse = ReusableTasks("done/keys", range(len(self.inputs)), "skip", self.output)
        open_run_folder(self.work, {"inputs": file_states(self.inputs), **folders, **options, **skip}, reuse)

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""
        shards = len(self.inputs)
        sizes = tuple(map(file_bytes, self.inputs))
        stages = [TaskStage("keys", shards, self.keys, sizes=sizes)]
        stages.append(TaskStage("pairs", self.preset.bands, self.pairs, after=stages[-1]))
        if self.preset.jaccard is not None:
            stages.append(TaskStage("sets", shards, self.sets, after=stages[-1], sizes=sizes))
        stages.append(TaskStage("groups", 1, self.groups, after=stages[-1]))
        stages.append(TaskStage("filter", shards, self.filter, after=stages[-1], sizes=sizes))
        return stages

    def keys(self, shard: int) -> TaskResult:
        """Write a shard's band keys."""
        count = 0
        shingles = Shingles(self.preset)
        with ExitStack() as stack:
            put = stack.enter_context(open_column_writer(self._keys_path(shard), self._column_count))
            quarantine = stack.enter_context(self._open_quarantine(shard)) if self.quarantine else None
            keeps_ids = self.dropped is not None and self.id_key
            ids = stack.enter_context(open_id_writer(self.work / "ids", shard)) if keeps_ids else None
            for texts, names in self._read_batches(shard, quarantine or fail_on_row):
                count += len(texts)
                if ids:
                    ids(names)
                if self.preset.unit == "text":
                    put(text_digests(texts))
                else:
                    table = minhash_signatures(shingles.keys_in_pieces(texts), len(texts), self.preset.bins)
                    put(band_keys(table, self.preset.bands))
        result = {"read": file_bytes(self.inputs[shard]), "documents": count}
        return (
            result
            if quarantine is None
            else {**result, **error_counts(quarantine.count, quarantine.first, count)}
        )

    def pairs(self, band: int) -> TaskResult:
        """Write a band's pairs and which documents are in one; the first band writes shard offsets too."""
        files = [self._keys_path(shard) for shard in range(len(self.inputs))]
        count = 0
        ends = accumulate(count_documents(file, self._column_count) for file in files)
        firsts = np.array([0, *ends], "<u8")
        if band == 0:
            with open_output(self.work / "firsts") as out:
                out.write(firsts.tobytes())
        with open_output(self._pairs_path(band)) as out, open_output(self._paired_path(band)) as flags:
            reserve(flags, int(firsts[-1]))
            paired = np.memmap(flags.name, bool, "r+") if firsts[-1] else np.empty(0, bool)
            for block in candidate_pairs(files, band, self._column_count, self.memory):
                out.write(block.astype("<u8").tobytes())
                paired[block.ravel().astype(np.int64)] = True
                count += len(block)
        return {"pairs": count}

    def sets(self, shard: int) -> TaskResult:
        """Write the shingle sets of a shard's documents that have a pair."""
        firsts = self._read_firsts()
        is_paired = np.zeros(firsts[shard + 1] - firsts[shard], bool)
        for band in range(self.preset.bands):
            is_paired |= np.fromfile(self._paired_path(band), bool, len(is_paired), offset=firsts[shard])
        shingles = Shingles(self.preset)
        first = 0

        def paired_sets() -> Iterator[tuple[Any, NDArray[np.bool_]]]:
            nonlocal first
            for texts, _ in self._read_batches(shard, skip_row):
                flags = is_paired[first : first + len(texts)]
                first += len(texts)
                yield shingles.shingle_sets(list(compress(texts, flags))), flags

        write_sets(self.work / "sets", shard, paired_sets())
        return {"read": file_bytes(self.inputs[shard]), "documents": int(np.count_nonzero(is_paired))}

    def groups(self, _: int) -> TaskResult:
        """Write the root of each document."""
        firsts = self._read_firsts()
        total = firsts[-1]
        with open_output(self._roots_path()) as out:
            for start in range(0, total, _PAIR_BLOCK):
                out.write(np.arange(start, min(start + _PAIR_BLOCK, total), dtype="<u8").tobytes())
        if not total:
            return {"documents": 0}
        roots_file = np.memmap(self._roots_path(), "<u8", "r+")
        parents = roots_file.view(np.ndarray)
        if self.preset.jaccard is not None:
            sets = SetReader(self.work / "sets", firsts[:-1])
            union_similar(
                parents, self._read_pairs(), partial(sets.is_similar, threshold=self.preset.jaccard)
            )
        else:
            for block in self._read_pairs():
                union(parents, self._equal_hashes(block, firsts) if self.preset.unit == "text" else block)
        for start in range(0, total, _PAIR_BLOCK):
            numbers = np.arange(start, min(start + _PAIR_BLOCK, total))
            parents[numbers] = find_roots(parents, numbers)
        roots_file.flush()
        return {"documents": total}

    def filter(self, shard: int) -> TaskResult:
        """Write the kept lines of a shard; count the dropped ones."""
        firsts = self._read_firsts()
        source = self.inputs[shard]
        numbers = slice(firsts[shard], firsts[shard + 1])
        document_roots = (
            np.memmap(self._roots_path(), "<u8", "r")[numbers]
            if numbers.stop > numbers.start
            else np.empty(0, np.uint64)
        )
        quarantined = self._open_quarantine(shard).line_indices() if self.quarantine else set()
        counts = dict.fromkeys(("documents", "bytes", "kept", "kept_bytes"), 0)
        counts |= {"skipped": len(quarantined), "read": file_bytes(source)}
        folders = [self.output] if self.dropped is None else [self.output, self.dropped]
        with _open_all([folder / output_name(source) for folder in folders]) as outs:
            for row, line in enumerate(
                read_whole_lines(source, skip_row if self.quarantine else fail_on_row)
            ):
                if row in quarantined or not line.strip():
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

    def _open_quarantine(self, shard: int) -> Quarantine:
        source = self.inputs[shard]
        assert self.quarantine is not None
        return Quarantine(self.quarantine / output_name(source), source)

    def _read_batches(self, shard: int, on_error: RowErrorHandler) -> Iterator[tuple[list[str], list[str]]]:
        return read_batches(self.inputs[shard], self.key, BATCH_CHARACTERS, on_error, self.id_key)

    def _equal_hashes(self, block: NDArray[np.uint64], firsts: list[int]) -> NDArray[np.uint64]:
        """Select the pairs that agree in the second half of the hash too."""
        halves = np.empty(block.shape, np.uint64)
        shard = np.searchsorted(firsts, block, "right") - 1
        for number in np.unique(shard):
            in_shard = shard == number
            places = block[in_shard] - np.uint64(firsts[number])
            halves[in_shard] = take(self._keys_path(int(number)), 1, self._column_count, places)
        equal: NDArray[np.uint64] = block[halves[:, 0] == halves[:, 1]]
        return equal

    def _read_pairs(self) -> Iterator[NDArray[np.uint64]]:
        for band in range(self.preset.bands):
            with self._pairs_path(band).open("rb") as file:
                while data := file.read(16 * _PAIR_BLOCK):
                    yield np.frombuffer(data, "<u8").reshape(-1, 2)

    def _read_firsts(self) -> list[int]:
        """Read the number of each shard's first document, and the total."""
        firsts: list[int] = np.fromfile(self.work / "firsts", "<u8").tolist()
        return firsts

    def _document_name(self, document: int, firsts: list[int]) -> str:
        """Return a document's id, or its file and line."""
        shard = int(np.searchsorted(firsts, document, "right")) - 1
        place = document - firsts[shard]
        if self.id_key:
            return read_id(self.work / "ids", shard, place)
        return f"{self.inputs[shard].name}:{place + 1}"

    @property
    def _column_count(self) -> int:
        """Return the keys per document: one per band; the two halves of the hash for whole texts."""
        return 2 if self.preset.unit == "text" else self.preset.bands

    def _keys_path(self, shard: int) -> Path:
        return self.work / "keys" / f"{shard:05d}"

    def _paired_path(self, band: int) -> Path:
        return self.work / "paired" / f"{band:03d}"

    def _pairs_path(self, band: int) -> Path:
        return self.work / "pairs" / f"{band:03d}"

    def _roots_path(self) -> Path:
        return self.work / "roots"


@contextmanager
def _open_all(paths: Sequence[Path]) -> Iterator[list[IO[bytes]]]:
    """Open files to write; all are published when the block ends without an error."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_output(path)) for path in paths]
