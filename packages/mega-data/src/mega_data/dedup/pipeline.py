"""Near-duplicates out of a corpus, in five stages of tasks that meet at files of a work folder.

    keys     a task per shard    text -> band keys, one per line and band
    pairs    a task per band     equal keys -> pairs of documents
    sets     a task per shard    shingle sets of the documents that have a pair, where pairs are checked
    groups   one task            pairs, checked -> the root of each document, its group's smallest
    filter   a task per shard    lines whose document is its own root, byte for byte

A document's number is its place: shards in the order of their names, then lines. So the same documents stay
whatever the workers, the executor and the order in which files are named.
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

from mega_data.dedup.band_store import documents, picked, writing_columns
from mega_data.dedup.candidates import pairs
from mega_data.dedup.ids import id_of, writing_ids
from mega_data.dedup.jaccard import SetReader, write_sets
from mega_data.dedup.minhash import band_keys, signatures
from mega_data.dedup.presets import Preset
from mega_data.dedup.shingles import Shingles, digests
from mega_data.dedup.union_find import join, join_alike, roots
from mega_data.error_limit import errors_of
from mega_data.jsonl_shards import (
    Faults,
    Quarantine,
    batches,
    identity,
    output_name,
    pass_over,
    refuse,
    size,
    whole_lines,
    writing,
)
from mega_data.readers.blocks import parse_json
from mega_data.task_stages import Result, Reuse, Stage, plan
from mega_data.texts import dump_line, exact_numbers
from mega_schema.atomic_io import reserve

BATCH_CHARACTERS = 1 << 17  # arrays of this length stay in a core's cache
MEMORY = 256 << 20  # bytes
_PAIR_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Deduplication:
    """One run.

    Attributes:
        inputs: shards, as `jsonl_shards.shards` orders them.
        output: folder of the kept lines, a file per shard.
        work: folder of what the stages leave each other; may be removed when all are done.
        memory: bytes the sorting of pairs may take.
        dropped: folder of the documents that go, with what they are like; None keeps them nowhere.
        quarantine: folder of the lines that are no documents; None ends the run at the first.
        id_key: where documents have an id, by which `dropped` names them; "" names them by file and line.
    """

    inputs: tuple[Path, ...]
    output: Path
    work: Path
    preset: Preset
    key: str = "text"
    memory: int = MEMORY
    dropped: Path | None = None
    quarantine: Path | None = None
    id_key: str = ""

    def begin(self) -> None:
        """Make the work folder, or go on in one of the same run.

        Raises:
            ConfigError: it holds another run.
        """
        options = {"preset": asdict(self.preset), "key": self.key, "id_key": self.id_key}
        folders = {"output": str(self.output.resolve()), "dropped": str(self.dropped)}
        skip = {"skip": self.quarantine is not None}
        reuse = Reuse("done/keys", range(len(self.inputs)), "skip", self.output)
        plan(self.work, {"inputs": identity(self.inputs), **folders, **options, **skip}, reuse)

    def stages(self) -> list[Stage]:
        """The stages, each to be done whole before the next begins."""
        shards, sizes = len(self.inputs), tuple(map(size, self.inputs))
        stages = [Stage("keys", shards, self.keys, sizes=sizes)]
        stages.append(Stage("pairs", self.preset.bands, self.pairs, after=stages[-1]))
        if self.preset.jaccard is not None:
            stages.append(Stage("sets", shards, self.sets, after=stages[-1], sizes=sizes))
        stages.append(Stage("groups", 1, self.groups, after=stages[-1]))
        stages.append(Stage("filter", shards, self.filter, after=stages[-1], sizes=sizes))
        return stages

    def keys(self, shard: int) -> Result:
        """Write a shard's band keys."""
        count, shingles = 0, Shingles(self.preset)
        with ExitStack() as stack:
            put = stack.enter_context(writing_columns(self._keys(shard), self._columns))
            wrong = stack.enter_context(self._wrong(shard)) if self.quarantine else None
            named = self.dropped is not None and self.id_key
            ids = stack.enter_context(writing_ids(self.work / "ids", shard)) if named else None
            for texts, names in self._batches(shard, wrong or refuse):
                count += len(texts)
                if ids:
                    ids(names)
                if self.preset.unit == "text":
                    put(digests(texts))
                else:
                    table = signatures(shingles.in_pieces(texts), len(texts), self.preset.bins)
                    put(band_keys(table, self.preset.bands))
        found = {"read": size(self.inputs[shard]), "documents": count}
        return found if wrong is None else {**found, **errors_of(wrong.count, wrong.first, count)}

    def pairs(self, band: int) -> Result:
        """Write a band's pairs, and which documents are in one; the first band, also where shards begin."""
        files, count = [self._keys(shard) for shard in range(len(self.inputs))], 0
        ends = accumulate(documents(file, self._columns) for file in files)
        firsts = np.array([0, *ends], "<u8")
        if band == 0:
            with writing(self.work / "firsts") as out:
                out.write(firsts.tobytes())
        with writing(self._pairs(band)) as out, writing(self._paired(band)) as flags:
            reserve(flags, int(firsts[-1]))
            paired = np.memmap(flags.name, bool, "r+") if firsts[-1] else np.empty(0, bool)
            for found in pairs(files, band, self._columns, self.memory):
                out.write(found.astype("<u8").tobytes())
                paired[found.ravel().astype(np.int64)] = True
                count += len(found)
        return {"pairs": count}

    def sets(self, shard: int) -> Result:
        """Write the shingle sets of a shard's documents that have a pair."""
        firsts = self._firsts()
        wanted = np.zeros(firsts[shard + 1] - firsts[shard], bool)
        for band in range(self.preset.bands):
            wanted |= np.fromfile(self._paired(band), bool, len(wanted), offset=firsts[shard])
        shingles, at = Shingles(self.preset), 0

        def chosen() -> Iterator[tuple[Any, NDArray[np.bool_]]]:
            nonlocal at
            for texts, _ in self._batches(shard, pass_over):
                flags = wanted[at : at + len(texts)]
                at += len(texts)
                yield shingles.sets(list(compress(texts, flags))), flags

        write_sets(self.work / "sets", shard, chosen())
        return {"read": size(self.inputs[shard]), "documents": int(np.count_nonzero(wanted))}

    def groups(self, _: int) -> Result:
        """Write the root of each document."""
        firsts = self._firsts()
        total = firsts[-1]
        with writing(self._roots()) as out:
            for at in range(0, total, _PAIR_BLOCK):
                out.write(np.arange(at, min(at + _PAIR_BLOCK, total), dtype="<u8").tobytes())
        if not total:
            return {"documents": 0}
        roots_file = np.memmap(self._roots(), "<u8", "r+")
        parents = roots_file.view(np.ndarray)
        if self.preset.jaccard is not None:
            sets = SetReader(self.work / "sets", firsts[:-1])
            join_alike(parents, self._all_pairs(), partial(sets.alike, least=self.preset.jaccard))
        else:
            for block in self._all_pairs():
                join(parents, self._equal(block, firsts) if self.preset.unit == "text" else block)
        for at in range(0, total, _PAIR_BLOCK):
            numbers = np.arange(at, min(at + _PAIR_BLOCK, total))
            parents[numbers] = roots(parents, numbers)
        roots_file.flush()
        return {"documents": total}

    def filter(self, shard: int) -> Result:
        """Write the lines that stay; count those that go."""
        firsts, source = self._firsts(), self.inputs[shard]
        mine = slice(firsts[shard], firsts[shard + 1])
        above = (
            np.memmap(self._roots(), "<u8", "r")[mine] if mine.stop > mine.start else np.empty(0, np.uint64)
        )
        wrong = self._wrong(shard).places() if self.quarantine else set()
        counts = dict.fromkeys(("documents", "bytes", "kept", "kept_bytes"), 0)
        counts |= {"skipped": len(wrong), "read": size(source)}
        folders = [self.output] if self.dropped is None else [self.output, self.dropped]
        with _all([folder / output_name(source) for folder in folders]) as outs:
            for place, line in enumerate(whole_lines(source, pass_over if self.quarantine else refuse)):
                if place in wrong or not line.strip():
                    continue
                counts["documents"] += 1
                counts["bytes"] += len(line)
                if int(above[place]) == firsts[shard] + place:
                    counts["kept"] += 1
                    counts["kept_bytes"] += len(line)
                    outs[0].write(line if line.endswith(b"\n") else line + b"\n")
                elif self.dropped is not None:
                    like = self._name(int(above[place]), firsts)
                    values = exact_numbers(line, parse_json(line))
                    outs[1].write(dump_line({**values, "dropped": f"like {like}"}))
        return counts

    def _wrong(self, shard: int) -> Quarantine:
        source = self.inputs[shard]
        assert self.quarantine is not None
        return Quarantine(self.quarantine / output_name(source), source)

    def _batches(self, shard: int, faults: Faults) -> Iterator[tuple[list[str], list[str]]]:
        return batches(self.inputs[shard], self.key, BATCH_CHARACTERS, faults, self.id_key)

    def _equal(self, block: NDArray[np.uint64], firsts: list[int]) -> NDArray[np.uint64]:
        """The pairs that agree in the second half of the hash too."""
        halves = np.empty(block.shape, np.uint64)
        shard = np.searchsorted(firsts, block, "right") - 1
        for number in np.unique(shard):
            chosen = shard == number
            places = block[chosen] - np.uint64(firsts[number])
            halves[chosen] = picked(self._keys(int(number)), 1, self._columns, places)
        equal: NDArray[np.uint64] = block[halves[:, 0] == halves[:, 1]]
        return equal

    def _all_pairs(self) -> Iterator[NDArray[np.uint64]]:
        for band in range(self.preset.bands):
            with self._pairs(band).open("rb") as file:
                while data := file.read(16 * _PAIR_BLOCK):
                    yield np.frombuffer(data, "<u8").reshape(-1, 2)

    def _firsts(self) -> list[int]:
        """The number of each shard's first document, and the number of all."""
        found: list[int] = np.fromfile(self.work / "firsts", "<u8").tolist()
        return found

    def _name(self, document: int, firsts: list[int]) -> str:
        """A document's id, or where it is."""
        shard = int(np.searchsorted(firsts, document, "right")) - 1
        place = document - firsts[shard]
        if self.id_key:
            return id_of(self.work / "ids", shard, place)
        return f"{self.inputs[shard].name}:{place + 1}"

    @property
    def _columns(self) -> int:
        """Keys of a document: one a band; of a whole text the two halves of its hash, the first its band."""
        return 2 if self.preset.unit == "text" else self.preset.bands

    def _keys(self, shard: int) -> Path:
        return self.work / "keys" / f"{shard:05d}"

    def _paired(self, band: int) -> Path:
        return self.work / "paired" / f"{band:03d}"

    def _pairs(self, band: int) -> Path:
        return self.work / "pairs" / f"{band:03d}"

    def _roots(self) -> Path:
        return self.work / "roots"


@contextmanager
def _all(paths: Sequence[Path]) -> Iterator[list[IO[bytes]]]:
    """Files to write, all of which get their names when the block ends well."""
    with ExitStack() as stack:
        yield [stack.enter_context(writing(path)) for path in paths]
