"""Remove repeated spans of tokens from a corpus, and keep the first occurrence of each.

    anchors  a task per shard    text -> anchors, sorted; the place of the first token of each document
    repeats  a task per range    equal anchors of all shards -> places of repeated anchors, by shard
    spans    a task per shard    hash and place of each span whose anchor is repeated, sorted
    later    a task per range    equal spans of all shards -> places of all but the first, by shard
    cut      a task per shard    documents without the later spans
    join     a task per input    the files of an input that is divided into ranges

A shard is an input, or a range of a large one.

A span has a fixed number of tokens in one document. It is removed if an equal span is before it in the
corpus: shards sorted by name, lines, tokens. A longer repetition is removed as the spans in it. Two
occurrences that share tokens do not count, so of a text that repeats itself the first span remains. In the
parts of documents that remain, no span occurs twice except over itself (arXiv:2107.06499, ExactSubstr).

Every repeated span has a repeated anchor (see `span_tokens.SpanAnchors`), so all other spans are left out of
the sort. Spans are compared by 128 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.corpus_shards import BATCH_CHARACTERS, CorpusShards
from mega_data.dedup.ids import open_id_writer
from mega_data.dedup.key_runs import Numbers, SortedRows, list_runs, open_run_writer, read_sorted
from mega_data.dedup.place_marks import PlaceMarks, ShardFlags
from mega_data.dedup.span_cuts import SpanCuts
from mega_data.dedup.span_tokens import Tokenization, Unit, find_anchors, span_hashes
from mega_data.error_limit import error_counts
from mega_data.jsonl_shards import fail_on_row, parse_document, read_whole_lines, skip_row
from mega_data.output_formats import open_output
from mega_data.range_outputs import lines_before, planned_ranges, range_bytes
from mega_data.task_stages import ReusableTasks, TaskResult, TaskStage, open_run_folder, read_results
from mega_data.texts import text_of

RANGE_BYTES = 1 << 30  # of input per task of the stages `repeats` and `later`
_LAYOUT = 1  # of the files in the work folder


@dataclass(frozen=True, slots=True)
class SubstringDedup:
    """A run that removes repeated spans.

    Attributes:
        corpus: shards in the order of `jsonl_shards.find_shards`, none of them earlier; its `dropped` folder
            gets the removed spans or the dropped documents.
        work: folder of intermediate files; may be removed after the run.
        span: number of tokens of a span, from 2.
        max_repeated: documents with a larger share of repeated tokens are dropped, and all others remain
            whole; None removes the spans from the documents.
        memory: bytes for sorting, and for the flags of tokens.
    """

    corpus: CorpusShards
    work: Path
    unit: Unit
    span: int
    max_repeated: float | None
    memory: int

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run.
        """
        options: dict[str, Any] = {"unit": self.unit, "span": self.span, "max_repeated": self.max_repeated}
        options |= {"key": self.corpus.key, "id_key": self.corpus.id_key, "layout": _LAYOUT}
        outputs = self.corpus.outputs
        options |= {"output_format": outputs.suffix, "skip": self.corpus.skips}
        folders = {"output": str(outputs.output.resolve()), "dropped": str(outputs.dropped)}
        owners = [part.input for part in outputs.ranges]
        reuse = ReusableTasks("done/anchors", owners, "skip", outputs.output)
        open_run_folder(self.work, {**planned_ranges(outputs.ranges), **folders, **options}, reuse)

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""
        anchors = self._anchors_stage
        shards, sizes = anchors.tasks, anchors.sizes
        repeats = TaskStage("repeats", self._parts, self.repeats, after=anchors)
        spans = TaskStage("spans", shards, self.spans, after=repeats, sizes=sizes)
        later = TaskStage("later", self._parts, self.later, after=spans)
        cut = TaskStage("cut", shards, self.cut, after=later, sizes=sizes)
        return self.corpus.outputs.add_join([anchors, repeats, spans, later, cut], self.work)

    @property
    def _anchors_stage(self) -> TaskStage:
        return TaskStage("anchors", len(self.corpus.shards), self.anchors, sizes=self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(map(range_bytes, self.corpus.shards))

    @property
    def _parts(self) -> int:
        return 1 + sum(self._sizes) // RANGE_BYTES

    @property
    def _repeated_anchors(self) -> PlaceMarks:
        return PlaceMarks(self.work / "repeats", self._parts, len(self.corpus.shards), 1)

    @property
    def _later_spans(self) -> PlaceMarks:
        """Return the marks with three columns: place, shard and place of the first occurrence."""
        return PlaceMarks(self.work / "later", self._parts, len(self.corpus.shards), 3)

    @property
    def _ids(self) -> Path:
        return self.work / "ids"

    def _anchors_path(self, shard: int) -> Path:
        return self.work / "anchors" / f"{shard:05d}"

    def _spans_path(self, shard: int) -> Path:
        return self.work / "spans" / f"{shard:05d}"

    def _firsts_path(self, shard: int) -> Path:
        return self.work / "firsts" / f"{shard:05d}"

    def _read_firsts(self, shard: int) -> Numbers:
        """Read the place of the first token of each line of a shard, and the end."""
        return np.memmap(self._firsts_path(shard), "<u8", "r").view(np.ndarray)

    def anchors(self, shard: int) -> TaskResult:
        """Write the key and place of each anchor of a shard."""
        documents = place = 0
        tokenization = Tokenization(self.unit, self.span, lanes=1)
        with ExitStack() as stack:
            put = stack.enter_context(open_run_writer(self._anchors_path(shard), 2, self.memory))
            firsts = stack.enter_context(open_output(self._firsts_path(shard)))
            skips = self.corpus.skips
            quarantine = stack.enter_context(self.corpus.open_quarantine(shard)) if skips else None
            keeps_ids = self.corpus.outputs.dropped is not None and self.corpus.id_key
            ids = stack.enter_context(open_id_writer(self._ids, shard)) if keeps_ids else None
            next_anchor = 0
            for texts, names in self.corpus.read_batches(shard, quarantine or fail_on_row):
                documents += len(texts)
                counts = np.zeros(len(texts), np.int64)
                if ids:
                    ids(names)
                start = place
                for block in tokenization.blocks(texts):
                    found_anchors = find_anchors(block, self.span)
                    first = place - block.carried
                    places = _without_repeats(found_anchors.anchors + first, next_anchor)
                    if len(places):
                        put([found_anchors.keys[places - first], places.astype(np.uint64)])
                        next_anchor = int(places[-1]) + 1
                    counts += np.bincount(block.texts[block.carried :], minlength=len(texts))
                    place += len(block.starts) - block.carried
                firsts.write((np.cumsum(counts) - counts + start).astype("<u8").data)
            firsts.write(np.array([place], "<u8").data)
        result = {"read": self.corpus.bytes_of(shard), "documents": documents, "tokens": place}
        result["lines"] = documents  # a line without a document is an empty text
        if quarantine is None:
            return result
        errors = error_counts(quarantine.count, quarantine.first, documents, quarantine.damaged)
        return {**result, **errors}

    def repeats(self, part: int) -> TaskResult:
        """Write the places of the anchors of a key range that occur more than once."""
        runs = list_runs([self._anchors_path(shard) for shard in range(len(self.corpus.shards))], 2)
        count = 0
        with self._repeated_anchors.open_writer(part) as put:
            for rows in read_sorted(runs, part, self._parts, self.memory):
                keys, places = rows.columns
                is_repeated = np.zeros(len(keys), bool)
                np.equal(keys[1:], keys[:-1], out=is_repeated[1:])
                is_repeated[:-1] |= is_repeated[1:]
                is_repeated[: rows.skip] = False
                if is_repeated.any():
                    put(rows.shards[is_repeated], [places[is_repeated]])
                    count += int(np.count_nonzero(is_repeated))
        return {"anchors": count}

    def spans(self, shard: int) -> TaskResult:
        """Write the hash and place of each span of a shard whose anchor is repeated."""
        flags = ShardFlags(self._repeated_anchors, shard, self._read_firsts(shard), self.memory)
        tokenization = Tokenization(self.unit, self.span, lanes=2)
        documents = count = 0
        with open_run_writer(self._spans_path(shard), 3, self.memory) as put:
            for texts, firsts, is_repeated in self._read_marked(shard, flags):
                documents += len(texts)
                place = 0  # in the batch
                for block in tokenization.blocks(texts):
                    anchors = find_anchors(block, self.span)
                    first = place - block.carried
                    spans = anchors.spans[is_repeated[anchors.anchors + first]]
                    if len(spans):
                        hashes = [
                            span_hashes(values, self.span, lane)[spans]
                            for lane, values in enumerate(block.lanes)
                        ]
                        places = spans + first + firsts[block.texts[spans]]
                        put([*hashes, places.astype(np.uint64)])
                        count += len(spans)
                    place += len(block.starts) - block.carried
        return {"read": self.corpus.bytes_of(shard), "documents": documents, "spans": count}

    def _read_marked(
        self, shard: int, flags: ShardFlags
    ) -> Iterator[tuple[list[str], NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield the documents of a shard that have a marked token, in batches.

        A batch has the texts; for each text the difference between a token's place in the shard and in the
        batch; and a flag for each token of the batch.
        """
        source = self.corpus.shards[shard]
        on_error = skip_row if self.corpus.skips else fail_on_row
        texts: list[str] = []
        rows: list[int] = []
        batch_flags: list[NDArray[np.bool_]] = []
        characters = 0
        for row, (number, line) in enumerate(read_whole_lines(source, on_error)):
            if (document_flags := flags.of_document(row)) is None:
                continue
            values = parse_document(line, source, number, self.corpus.key, self.corpus.id_key)
            texts.append(text_of(values, self.corpus.key))
            rows.append(row)
            batch_flags.append(document_flags)
            characters += len(texts[-1])
            if characters >= BATCH_CHARACTERS:
                yield texts, flags.offsets_of(rows), np.concatenate(batch_flags)
                texts, rows, batch_flags = [], [], []
                characters = 0
        if texts:
            yield texts, flags.offsets_of(rows), np.concatenate(batch_flags)

    def later(self, part: int) -> TaskResult:
        """Write the spans of a key range that have an equal span before them."""
        runs = list_runs([self._spans_path(shard) for shard in range(len(self.corpus.shards))], 3)
        count = 0
        with self._later_spans.open_writer(part) as put:
            for rows in read_sorted(runs, part, self._parts, self.memory):
                rows, later, firsts = find_later_spans(rows, self.span)
                if len(later):
                    first_shards = rows.shards[firsts].astype(np.uint64)
                    places = rows.columns[2]
                    put(rows.shards[later], [places[later], first_shards, places[firsts]])
                    count += len(later)
        return {"spans": count}

    def cut(self, shard: int) -> TaskResult:
        """Write the remaining documents of a shard."""
        firsts = self._read_firsts(shard)
        outputs = self.corpus.outputs
        keeps_rows = outputs.dropped is not None and self.max_repeated is None
        first_lines = (
            lines_before(outputs.ranges, read_results(self._anchors_stage, self.work)) if keeps_rows else []
        )
        flags = ShardFlags(self._later_spans, shard, firsts, self.memory, keeps_rows=keeps_rows)
        cuts = SpanCuts(
            self.corpus,
            shard,
            self.unit,
            self.span,
            self.max_repeated,
            flags,
            self._read_firsts,
            self._ids,
            first_lines,
        )
        return cuts.write()


def find_later_spans(rows: SortedRows, span: int) -> tuple[SortedRows, NDArray[np.int64], NDArray[np.int64]]:
    """Find the spans that have an equal span before them.

    Args:
        rows: with the columns key, check and place; sorted by key.

    Returns:
        The rows, which of them are later spans, and the first span for each of these.
    """
    keys, checks, _ = rows.columns
    equal_keys = keys[1:] == keys[:-1]
    if not rows.skip and bool((equal_keys & (checks[1:] != checks[:-1])).any()):
        rows = rows.take(np.lexsort((checks, keys)))
        keys, checks, _ = rows.columns
    places = rows.columns[2]
    is_first = np.ones(len(keys), bool)
    is_first[1:] = (keys[1:] != keys[:-1]) | (checks[1:] != checks[:-1])
    firsts = np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))
    shares_tokens = (rows.shards == rows.shards[firsts]) & (places - places[firsts] < np.uint64(span))
    is_later = ~is_first & ~shares_tokens
    later = np.flatnonzero(is_later)
    return rows, later, firsts[later]


def _without_repeats(places: NDArray[np.int64], start: int) -> NDArray[np.int64]:
    """Return ascending places from `start` on, each once."""
    is_new = places >= start
    is_new[1:] &= places[1:] != places[:-1]
    return places[is_new]
