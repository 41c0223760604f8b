"""Keep one occurrence of each repeated span of sentences, as C4 does.

"To deduplicate the data set, we discarded all but one of any three-sentence span occurring more than once in
the data set" (arXiv:1910.10683, section 2.2). The first occurrence is kept, in the order of shard names,
lines and sentences. Its sentences are kept even if another span that contains them is removed.

    spans    a task per shard    text -> the hash and place of each span, in sorted runs
    repeats  a task per range    equal hashes of all shards -> which spans are kept and removed, by shard
    cut      a task per shard    documents without the cut sentences
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

from mega_data.clean.stats import StepStats
from mega_data.jsonl_shards import LineCount, fail_on_row, quarantine_counts, read_documents, skip_row
from mega_data.output_formats import open_output
from mega_data.range_outputs import RangeOutputs, range_bytes
from mega_data.readers.nested_keys import replace_value
from mega_data.readers.ranges import InputRange
from mega_data.task_stages import TaskResult, TaskStage
from mega_data.texts import dump_line, text_of

Numbers = NDArray[np.uint64]
RUN_SPANS = 1 << 20  # spans sorted together
RANGE_BYTES = 1 << 30  # of input per task of the stage `repeats`
BYTES_PER_SPAN = 64  # hash, place, shard, order and copies while a range is sorted
# a place: the line in the shard and the span's first sentence; a mark adds whether the span is cut
_SENTENCE_BITS = 24
# a single character class comes first, which the engine searches fast. A dot needs white space after it
_SENTENCE_END = re.compile(r"[\n.!?…。！？](?:(?<=[\n。！？])[。！？]*|[.!?…]*[\"'”’)\]]*(?=\s))\s*")
_MULTIPLIER, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True)
class SentenceDedupStep:
    """Remove all but one occurrence of each span of sentences that is repeated in the corpus.

    Spans are compared by a 64-bit hash that ignores case and white space.

    Attributes:
        sentences: number of sentences in a span.
        fewest: drop a cut document with fewer remaining sentences.
    """

    sentences: int = 3
    fewest: int = 3


@dataclass(frozen=True, slots=True)
class SentenceDedup:
    """One run over the corpus.

    Attributes:
        memory: bytes for sorting spans; `cut` needs 8 more for each repeated span of a shard.
        outputs: of each task; dropped documents have the reason under "dropped".
        id_key: key of the id that each document must have; "" requires none.
    """

    work: Path
    outputs: RangeOutputs
    name: str
    step: SentenceDedupStep
    key: str
    memory: int
    id_key: str = ""

    @property
    def inputs(self) -> tuple[InputRange, ...]:
        return self.outputs.ranges

    def stages(self) -> list[TaskStage]:
        sizes = tuple(map(range_bytes, self.inputs))
        spans = TaskStage("spans", len(self.inputs), self.spans, sizes=sizes)
        repeats = TaskStage("repeats", self._count_ranges(sizes), self.repeats, after=spans)
        cut = TaskStage("cut", len(self.inputs), self.cut, after=repeats, sizes=sizes)
        return self.outputs.add_join([spans, repeats, cut], self.work)

    def spans(self, shard: int) -> TaskResult:
        """Write the hash and place of each span of a shard."""
        documents = 0
        on_error = skip_row if self.outputs.quarantine else fail_on_row
        with open_run_writer(self._spans_path(shard)) as put:
            for number, _, values in read_documents(self.inputs[shard], self.key, on_error, self.id_key):
                documents += 1
                keys = span_keys(split_sentences(text_of(values, self.key)), self.step.sentences)
                put(keys, np.arange(len(keys), dtype=np.uint64) + np.uint64(number << _SENTENCE_BITS))
        return {"read": range_bytes(self.inputs[shard]), "documents": documents}

    def repeats(self, part: int) -> TaskResult:
        """Write the repeated spans of a key range: a chunk for each part that fits in memory.

        A chunk has the u64 offsets of each shard's marks, the end of the marks, then the marks.
        """
        shards = range(len(self.inputs))
        count = 0
        parts = self._count_ranges(tuple(map(range_bytes, self.inputs)))
        files = [self._spans_path(shard) for shard in shards]
        low, high = _first_key(part, parts), _first_key(part + 1, parts)
        spans = sum(len(keys) for file in files for keys, _ in read_runs(file, low, high))
        inner = max(1, -(-spans * BYTES_PER_SPAN // self.memory))
        with open_output(self._repeats_path(part)) as out:
            for index in range(inner):
                inner_part = part * inner + index
                edges = _first_key(inner_part, parts * inner), _first_key(inner_part + 1, parts * inner)
                shard_runs = [[*read_runs(file, *edges)] for file in files]
                marks = repeated_spans(shard_runs)
                starts = np.cumsum([0, *map(len, marks)])
                out.write(starts.astype("<u8").tobytes())
                out.writelines(mark.astype("<u8").tobytes() for mark in marks)
                count += int(starts[-1])
        return {"marks": count}

    def cut(self, shard: int) -> TaskResult:
        """Write the documents of a shard without the cut sentences, and return the counts."""
        part = self.inputs[shard]
        stats = StepStats(self.name)
        marks = np.sort(np.concatenate([*self._read_marks(shard), np.empty(0, np.uint64)]))
        lines = LineCount()
        with self.outputs.open(shard) as (out, dropped, quarantine):
            on_error = quarantine or fail_on_row
            for number, line, values in read_documents(part, self.key, on_error, self.id_key, lines):
                text = text_of(values, self.key)
                stats.count_in(text)
                edges = np.array([number, number + 1], np.uint64) << np.uint64(_SENTENCE_BITS + 1)
                start, end = np.searchsorted(marks, edges)
                remaining = self._remaining_text(text, marks[start:end]) if start < end else text
                if remaining is None:
                    reason = f"fewer than {self.step.fewest} sentences left"
                    stats.count_dropped(reason, text)
                    if dropped:
                        row = {**values, "dropped": f"{self.name}: {reason}"}
                        dropped.write(dump_line(row))
                    continue
                stats.count_out(remaining)
                stats.changed += remaining != text
                output_line = (
                    line if remaining == text else dump_line(replace_value(values, self.key, remaining))
                )
                out.write(output_line.rstrip(b"\r\n") + b"\n")
        counts = {"read": range_bytes(part), "documents": stats.documents_in, "lines": lines.value}
        return {"steps": [stats.to_dict()], **counts, **quarantine_counts(quarantine, stats.documents_in)}

    def _remaining_text(self, text: str, marks: Numbers) -> str | None:
        """Return a text without the cut sentences; None if too few remain."""
        pieces = split_sentences(text)
        is_kept = np.ones(len(pieces), bool)
        # cut spans first: the sentences of a kept span are not cut
        for is_cut in (1, 0):
            for mark in marks[(marks & np.uint64(1)) == is_cut].tolist():
                first = mark >> 1 & (1 << _SENTENCE_BITS) - 1
                is_kept[first : first + self.step.sentences] = not is_cut
        if is_kept.all():
            return text
        if np.count_nonzero(is_kept) < max(1, self.step.fewest):
            return None
        return "".join(piece for piece, keep in zip(pieces, is_kept, strict=True) if keep).strip()

    def _read_marks(self, shard: int) -> Iterator[Numbers]:
        shards = len(self.inputs)
        for path in sorted(self._repeats_path(0).parent.iterdir()):
            with path.open("rb") as file:
                while header := file.read(8 * (shards + 1)):
                    offset = file.tell()
                    start, end, last = np.frombuffer(header, "<u8")[[shard, shard + 1, -1]].tolist()
                    file.seek(offset + 8 * start)
                    yield np.frombuffer(file.read(8 * (end - start)), "<u8")
                    file.seek(offset + 8 * last)

    def _count_ranges(self, sizes: Sequence[int]) -> int:
        return 1 + sum(sizes) // RANGE_BYTES

    def _spans_path(self, shard: int) -> Path:
        return self.work / "spans" / f"{shard:05d}"

    def _repeats_path(self, part: int) -> Path:
        return self.work / "repeats" / f"{part:05d}"


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, each with the white space after it; joined they are the text."""
    bounds = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds) if end > start]


def span_keys(pieces: Sequence[str], count: int) -> Numbers:
    """Hash each run of `count` consecutive sentences; at most 2^24 runs."""
    words = (" ".join(piece.lower().split()).encode("utf-8", "surrogatepass") for piece in pieces)
    hashes = np.frombuffer(b"".join(blake2b(sentence, digest_size=8).digest() for sentence in words), "<u8")
    spans = min(max(0, len(pieces) - count + 1), 1 << _SENTENCE_BITS)
    keys = np.zeros(spans, np.uint64)
    for offset in range(count if spans else 0):
        keys += hashes[offset : offset + spans]
        keys *= _MULTIPLIER
        keys ^= keys >> np.uint64(29)
    keys *= _MIX
    return keys


def repeated_spans(shard_runs: Sequence[Sequence[tuple[Numbers, Numbers]]]) -> list[Numbers]:
    """Return the marks of repeated spans by shard: place times two, plus one if the span is removed.

    Args:
        shard_runs: keys and places of each shard; the places of one key ascend.
    """
    all_runs = [run for shard in shard_runs for run in shard]
    empty = np.empty(0, np.uint64)
    keys = np.concatenate([empty, *(keys for keys, _ in all_runs)])
    places = np.concatenate([empty, *(places for _, places in all_runs)])
    counts = [sum(len(keys) for keys, _ in shard) for shard in shard_runs]
    shards = np.repeat(np.arange(len(shard_runs), dtype=np.uint32), counts)
    order = np.argsort(keys, kind="stable")
    keys, places, shards = keys[order], places[order], shards[order]
    is_cut = np.zeros(len(keys), bool)
    repeated = np.zeros(len(keys), bool)
    np.equal(keys[1:], keys[:-1], out=is_cut[1:])
    repeated[:-1] = is_cut[1:]
    repeated |= is_cut
    marks = places[repeated] << np.uint64(1) | is_cut[repeated].astype(np.uint64)
    order = np.argsort(shards[repeated], kind="stable")
    ends = np.searchsorted(shards[repeated][order], np.arange(1, len(shard_runs)))
    return np.split(marks[order], ends)


@contextmanager
def open_run_writer(path: Path) -> Iterator[Callable[[Numbers, Numbers], None]]:
    """Yield a function that writes keys and their places; places ascend.

    A run has its sorted keys, then their places.
    """
    pending = list[tuple[Numbers, Numbers]]()
    count = 0
    with open_output(path) as out:

        def put(keys: Numbers, places: Numbers) -> None:
            order = np.argsort(keys, kind="stable")
            out.write(keys[order].astype("<u8").data)
            out.write(places[order].astype("<u8").data)

        def concatenate() -> tuple[Numbers, Numbers]:
            return np.concatenate([keys for keys, _ in pending]), np.concatenate(
                [places for _, places in pending]
            )

        def add(keys: Numbers, places: Numbers) -> None:
            nonlocal count
            pending.append((keys, places))
            count += len(keys)
            while count >= RUN_SPANS:
                keys, places = concatenate()
                put(keys[:RUN_SPANS], places[:RUN_SPANS])
                pending[:] = [(keys[RUN_SPANS:], places[RUN_SPANS:])]
                count -= RUN_SPANS

        yield add
        if count:
            put(*concatenate())


def read_runs(path: Path, low: int, high: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield from each run the keys in `low` to `high`, and their places: views of the file."""
    count = path.stat().st_size // 16
    data = np.memmap(path, "<u8", "r").view(np.ndarray) if count else np.empty(0, np.uint64)
    for start_row in range(0, count, RUN_SPANS):
        rows = min(RUN_SPANS, count - start_row)
        keys, places = (
            data[2 * start_row : 2 * start_row + rows],
            data[2 * start_row + rows : 2 * start_row + 2 * rows],
        )
        low_row = int(np.searchsorted(keys, np.uint64(low)))
        high_row = rows if high >> 64 else int(np.searchsorted(keys, np.uint64(high)))
        if low_row < high_row:
            yield keys[low_row:high_row], places[low_row:high_row]


def _first_key(part: int, parts: int) -> int:
    """Return the first key of a part of all keys; 2^64 after the last part."""
    return -(-(part << 64) // parts)
