"""C4's rule against repetition: of a span of sentences that a corpus has more than once, all but one are cut.

"To deduplicate the data set, we discarded all but one of any three-sentence span occurring more than once in
the data set" (arXiv:1910.10683, section 2.2). The one that stays is the first: shards in the order of their
names, then lines, then sentences. Its sentences stay also where another span of theirs is cut.

    spans    a task per shard    text -> the hash and place of each span, in sorted runs
    repeats  a task per range    equal hashes of all shards -> which stay and which go, by shard
    cut      a task per shard    documents without the sentences that go
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_data.clean.stats import Tally
from mega_data.jsonl_shards import documents, errors_in, parted, pass_over, refuse, size, writing
from mega_data.task_stages import Result, Stage
from mega_data.texts import dump_line, text_of

Numbers = NDArray[np.uint64]
RUN = 1 << 20  # spans sorted together
RANGE_BYTES = 1 << 30  # of input for a task of the stage `repeats`
BYTES_PER_SPAN = 64  # of hash, place, shard, order and copies while a range is sorted
# a place: the line in the shard, the span's first sentence, and in a mark whether it goes
_SENTENCE_BITS = 24
# one class of characters first: the engine looks for that alone. A dot needs white space after it
_END = re.compile(r"[\n.!?…。！？](?:(?<=[\n。！？])[。！？]*|[.!?…]*[\"'”’)\]]*(?=\s))\s*")
_STEP, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True)
class Spans:
    """Cut all but one of each span of sentences that the corpus has more than once, see above.

    Sentences are compared without regard to case and white space, by 64 bits of hash of the span.

    Attributes:
        sentences: of a span.
        fewest: a document that was cut goes where fewer sentences are left.
    """

    sentences: int = 3
    fewest: int = 3


@dataclass(frozen=True, slots=True)
class SpanPass:
    """One run.

    Attributes:
        memory: bytes the sorting of spans may take; `cut` takes 8 for each repeated span of a shard.
        dropped: folder of the documents that go, with the reason under "dropped"; None keeps them nowhere.
        quarantine: folder of the lines that are no documents; None ends the run at the first.
        id_key: where documents must have an id; "" asks for none.
    """

    work: Path
    inputs: tuple[Path, ...]
    output: Path
    name: str
    step: Spans
    key: str
    memory: int
    dropped: Path | None
    quarantine: Path | None
    id_key: str

    def stages(self) -> list[Stage]:
        sizes = tuple(map(size, self.inputs))
        spans = Stage("spans", len(self.inputs), self.spans, sizes=sizes)
        repeats = Stage("repeats", self._ranges(sizes), self.repeats, after=spans)
        return [spans, repeats, Stage("cut", len(self.inputs), self.cut, after=repeats, sizes=sizes)]

    def spans(self, shard: int) -> Result:
        """Write the hash and place of each span of a shard."""
        seen = 0
        faults = pass_over if self.quarantine else refuse
        with writing_runs(self._spans(shard)) as put:
            for number, _, values in documents(self.inputs[shard], self.key, faults, self.id_key):
                seen += 1
                keys = span_keys(sentences(text_of(values, self.key)), self.step.sentences)
                put(keys, np.arange(len(keys), dtype=np.uint64) + np.uint64(number << _SENTENCE_BITS))
        return {"read": size(self.inputs[shard]), "documents": seen}

    def repeats(self, part: int) -> Result:
        """Write which spans of a range are repeated: a chunk for each part of it that fits in memory.

        A chunk is where the marks of each shard begin, u64 for each and for their end, then the marks.
        """
        shards, count = range(len(self.inputs)), 0
        parts = self._ranges(tuple(map(size, self.inputs)))
        files = [self._spans(shard) for shard in shards]
        low, high = _edge(part, parts), _edge(part + 1, parts)
        there = sum(len(keys) for file in files for keys, _ in runs(file, low, high))
        inner = max(1, -(-there * BYTES_PER_SPAN // self.memory))
        with writing(self._repeats(part)) as out:
            for at in range(inner):
                place = part * inner + at
                edges = _edge(place, parts * inner), _edge(place + 1, parts * inner)
                held = [[*runs(file, *edges)] for file in files]
                marks = marked(held)
                begins = np.cumsum([0, *map(len, marks)])
                out.write(begins.astype("<u8").tobytes())
                out.writelines(mark.astype("<u8").tobytes() for mark in marks)
                count += int(begins[-1])
        return {"marks": count}

    def cut(self, shard: int) -> Result:
        """Write what is left of a shard, and count."""
        path, tally = self.inputs[shard], Tally(self.name)
        marks = np.sort(np.concatenate([*self._marks(shard), np.empty(0, np.uint64)]))
        with parted(path, self.output, self.dropped, self.quarantine) as (out, gone, wrong):
            for number, line, values in documents(path, self.key, wrong or refuse, self.id_key):
                text = text_of(values, self.key)
                tally.entered(text)
                edges = np.array([number, number + 1], np.uint64) << np.uint64(_SENTENCE_BITS + 1)
                start, end = np.searchsorted(marks, edges)
                left = self._left(text, marks[start:end]) if start < end else text
                if left is None:
                    reason = f"fewer than {self.step.fewest} sentences left"
                    tally.dropped(reason, text)
                    if gone:
                        row = {**values, "dropped": f"{self.name}: {reason}"}
                        gone.write(dump_line(row))
                    continue
                tally.left(left)
                tally.changed += left != text
                kept = line if left == text else dump_line({**values, self.key: left})
                out.write(kept.rstrip(b"\r\n") + b"\n")
        seen = {"read": size(path), "documents": tally.documents_in}
        return {"steps": [tally.to_dict()], **seen, **errors_in(wrong, tally.documents_in)}

    def _left(self, text: str, marks: Numbers) -> str | None:
        """A text without the sentences that go; None where too few are left."""
        pieces = sentences(text)
        stays = np.ones(len(pieces), bool)
        # those that go first: the sentences of a span that stays are not cut
        for goes in (1, 0):
            for mark in marks[(marks & np.uint64(1)) == goes].tolist():
                first = mark >> 1 & (1 << _SENTENCE_BITS) - 1
                stays[first : first + self.step.sentences] = not goes
        if stays.all():
            return text
        if np.count_nonzero(stays) < max(1, self.step.fewest):
            return None
        return "".join(piece for piece, stay in zip(pieces, stays, strict=True) if stay).strip()

    def _marks(self, shard: int) -> Iterator[Numbers]:
        shards = len(self.inputs)
        for path in sorted(self._repeats(0).parent.iterdir()):
            with path.open("rb") as file:
                while begins := file.read(8 * (shards + 1)):
                    at = file.tell()
                    start, end, last = np.frombuffer(begins, "<u8")[[shard, shard + 1, -1]].tolist()
                    file.seek(at + 8 * start)
                    yield np.frombuffer(file.read(8 * (end - start)), "<u8")
                    file.seek(at + 8 * last)

    def _ranges(self, sizes: Sequence[int]) -> int:
        return 1 + sum(sizes) // RANGE_BYTES

    def _spans(self, shard: int) -> Path:
        return self.work / "spans" / f"{shard:05d}"

    def _repeats(self, part: int) -> Path:
        return self.work / "repeats" / f"{part:05d}"


def sentences(text: str) -> list[str]:
    """The sentences of a text, each with the white space after it: together they are the text again."""
    bounds = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds) if end > start]


def span_keys(pieces: Sequence[str], count: int) -> Numbers:
    """A number for each `count` sentences that follow each other, at most 2^24."""
    words = (" ".join(piece.lower().split()).encode("utf-8", "surrogatepass") for piece in pieces)
    hashes = np.frombuffer(b"".join(blake2b(one, digest_size=8).digest() for one in words), "<u8")
    spans = min(max(0, len(pieces) - count + 1), 1 << _SENTENCE_BITS)
    keys = np.zeros(spans, np.uint64)
    for offset in range(count if spans else 0):
        keys += hashes[offset : offset + spans]
        keys *= _STEP
        keys ^= keys >> np.uint64(29)
    keys *= _MIX
    return keys


def marked(held: Sequence[Sequence[tuple[Numbers, Numbers]]]) -> list[Numbers]:
    """Of each shard the marks of spans that are repeated: place times two, plus one where it goes.

    Args:
        held: of each shard, keys and places; of one key the places come in ascending order.
    """
    flat = [run for shard in held for run in shard]
    none = np.empty(0, np.uint64)
    keys = np.concatenate([none, *(keys for keys, _ in flat)])
    places = np.concatenate([none, *(places for _, places in flat)])
    counts = [sum(len(keys) for keys, _ in shard) for shard in held]
    shards = np.repeat(np.arange(len(held), dtype=np.uint32), counts)
    order = np.argsort(keys, kind="stable")
    keys, places, shards = keys[order], places[order], shards[order]
    goes, repeated = np.zeros(len(keys), bool), np.zeros(len(keys), bool)
    np.equal(keys[1:], keys[:-1], out=goes[1:])
    repeated[:-1] = goes[1:]
    repeated |= goes
    marks = places[repeated] << np.uint64(1) | goes[repeated].astype(np.uint64)
    order = np.argsort(shards[repeated], kind="stable")
    ends = np.searchsorted(shards[repeated][order], np.arange(1, len(held)))
    return np.split(marks[order], ends)


@contextmanager
def writing_runs(path: Path) -> Iterator[Callable[[Numbers, Numbers], None]]:
    """What to call with the keys and places that come next, places ascending.

    A run is its keys, sorted, then their places.
    """
    held, count = list[tuple[Numbers, Numbers]](), 0
    with writing(path) as out:

        def put(keys: Numbers, places: Numbers) -> None:
            order = np.argsort(keys, kind="stable")
            out.write(keys[order].astype("<u8").data)
            out.write(places[order].astype("<u8").data)

        def joined() -> tuple[Numbers, Numbers]:
            return np.concatenate([keys for keys, _ in held]), np.concatenate([places for _, places in held])

        def add(keys: Numbers, places: Numbers) -> None:
            nonlocal count
            held.append((keys, places))
            count += len(keys)
            while count >= RUN:
                keys, places = joined()
                put(keys[:RUN], places[:RUN])
                held[:], count = [(keys[RUN:], places[RUN:])], count - RUN

        yield add
        if count:
            put(*joined())


def runs(path: Path, low: int, high: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Of each run the keys from `low` on and below `high`, and their places: views of the file."""
    count = path.stat().st_size // 16
    data = np.memmap(path, "<u8", "r").view(np.ndarray) if count else np.empty(0, np.uint64)
    for at in range(0, count, RUN):
        rows = min(RUN, count - at)
        keys, places = data[2 * at : 2 * at + rows], data[2 * at + rows : 2 * at + 2 * rows]
        start = int(np.searchsorted(keys, np.uint64(low)))
        end = rows if high >> 64 else int(np.searchsorted(keys, np.uint64(high)))
        if start < end:
            yield keys[start:end], places[start:end]


def _edge(part: int, parts: int) -> int:
    """The first key of a part of all keys; 2^64 after the last part."""
    return -(-(part << 64) // parts)
