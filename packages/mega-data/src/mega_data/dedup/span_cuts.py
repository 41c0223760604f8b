"""Write the documents of a shard without repeated spans of tokens, and a record of the removed spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.corpus_shards import CorpusShards
from mega_data.dedup.ids import read_id
from mega_data.dedup.key_runs import Numbers
from mega_data.dedup.place_marks import ShardFlags
from mega_data.dedup.span_tokens import Tokenization, Unit
from mega_data.jsonl_shards import LineCount, fail_on_row, parse_document, read_whole_lines, skip_row
from mega_data.output_formats import open_output
from mega_data.readers.inputs import DROPPED
from mega_data.readers.nested_keys import replace_value, value_at
from mega_data.task_stages import TaskResult
from mega_data.texts import dump_line, exact_numbers, text_of

Range = tuple[int, int]  # start and end, in tokens or characters


@dataclass(frozen=True, slots=True)
class SpanCuts:
    """Remove marked spans from the documents of a shard, or drop documents by their share of these.

    Attributes:
        span: number of tokens of a span.
        max_repeated: see `substrings.SubstringDedup`.
        flags: which tokens begin a span to remove.
        read_firsts: returns the place of the first token of each line of a shard, and the end.
        ids: folder of the ids of the documents, if the corpus has an id key.
        first_lines: number of lines of its input before each shard; empty if no removed span is written.
    """

    corpus: CorpusShards
    shard: int
    unit: Unit
    span: int
    max_repeated: float | None
    flags: ShardFlags
    read_firsts: Callable[[int], Numbers]
    ids: Path
    first_lines: Sequence[int]

    def write(self) -> TaskResult:
        """Write the remaining documents, and what is removed; return the counts."""
        source = self.corpus.shards[self.shard]
        outputs = self.corpus.outputs
        skips = self.corpus.skips
        quarantined = self.corpus.open_quarantine(self.shard).line_numbers() if skips else set()
        counts = dict.fromkeys(("documents", "bytes", "kept", "kept_bytes"), 0)
        if self.max_repeated is None:
            counts["spans"] = 0
        counts |= {"skipped": len(quarantined), "read": self.corpus.bytes_of(self.shard)}
        tokenization = Tokenization(self.unit, self.span, lanes=0)
        count = LineCount()
        with ExitStack() as stack:
            out = stack.enter_context(open_output(outputs.output_path(self.shard)))
            record = None
            if outputs.dropped is not None:
                record = stack.enter_context(open_output(outputs.dropped_path(self.shard)))
            lines = read_whole_lines(source, skip_row if skips else fail_on_row, count=count)
            for row, (number, line) in enumerate(lines):
                if number in quarantined or not line.strip():
                    continue
                counts["documents"] += 1
                counts["bytes"] += len(line)
                if (is_marked := self.flags.of_document(row)) is not None:
                    ranges = merge_spans(np.flatnonzero(is_marked), self.span)
                    values = parse_document(line, source, number, self.corpus.key, self.corpus.id_key)
                    document = _Document(row, number, exact_numbers(line, values), len(is_marked))
                    if self.max_repeated is None:
                        line = self._cut(document, ranges, tokenization, record)
                        counts["spans"] += len(ranges)
                    elif self._is_dropped(document, ranges, record):
                        line = b""
                if line:
                    counts["kept"] += 1
                    counts["kept_bytes"] += len(line)
                    out.write(line if line.endswith(b"\n") else line + b"\n")
        return {**counts, "lines": count.value}

    def _cut(
        self,
        document: _Document,
        ranges: Sequence[Range],
        tokenization: Tokenization,
        record: IO[bytes] | None,
    ) -> bytes:
        """Return the line of a document without some ranges of tokens; empty if no token remains."""
        text = text_of(document.values, self.corpus.key)
        cuts = _character_ranges(text, ranges, tokenization)
        if record is not None:
            first_place = self.flags.first_of(document.row)
            for (start, end), (token, _) in zip(cuts, ranges, strict=True):
                _, first_shard, first = self.flags.row_at(first_place + token)
                number = self.first_lines[self.shard] + document.number
                row: dict[str, Any] = {"line": number, "start": start, "end": end}
                if self.corpus.id_key:
                    row = {self.corpus.id_key: value_at(document.values, self.corpus.id_key), **row}
                name = self._document_name(first_shard, first)
                record.write(dump_line({**row, "text": text[start:end], DROPPED: f"like {name}"}))
        if _count_tokens(ranges) == document.tokens:
            return b""
        ends = [0, *(end for _, end in cuts)]
        starts = [*(start for start, _ in cuts), len(text)]
        remaining = "".join(text[end:start] for end, start in zip(ends, starts, strict=True))
        if self.unit == "words" and ends[-1] == len(text):
            remaining = remaining.rstrip()
        return dump_line(replace_value(document.values, self.corpus.key, remaining))

    def _is_dropped(self, document: _Document, ranges: Sequence[Range], record: IO[bytes] | None) -> bool:
        """Return whether the share of a document's tokens in some ranges is too large."""
        assert self.max_repeated is not None
        repeated_tokens = _count_tokens(ranges)
        if repeated_tokens <= self.max_repeated * document.tokens:
            return False
        if record is not None:
            reason = f"{repeated_tokens} of {document.tokens} tokens repeated"
            record.write(dump_line({**document.values, DROPPED: reason}))
        return True

    def _document_name(self, shard: int, place: int) -> str:
        """Return the id, or the file and line, of the document with a token."""
        row = int(np.searchsorted(self.read_firsts(shard), place, "right")) - 1
        if self.corpus.id_key:
            return read_id(self.ids, shard, row)
        return f"{self.corpus.shards[shard].item.path.name}:{self.first_lines[shard] + row + 1}"


@dataclass(frozen=True, slots=True)
class _Document:
    """A document with its place in the shard.

    Attributes:
        row: number of its row, from 0.
        number: number of its line in the shard, from 1.
        tokens: number of tokens.
    """

    row: int
    number: int
    values: dict[str, Any]
    tokens: int


def _character_ranges(text: str, ranges: Sequence[Range], tokenization: Tokenization) -> list[Range]:
    """Convert ranges of tokens to ranges of characters, each up to the token behind it."""
    blocks = tokenization.blocks([text])
    starts = np.concatenate([*(block.starts[block.carried :] for block in blocks), [len(text)]])
    return [*map(tuple, starts[np.array(ranges)].tolist())]


def merge_spans(starts: NDArray[np.int64], span: int) -> list[Range]:
    """Return the ranges that spans of equal length cover; `starts` ascend."""
    is_first = np.ones(len(starts), bool)
    is_first[1:] = starts[1:] - starts[:-1] > span
    firsts = np.flatnonzero(is_first)
    ends = starts[np.append(firsts[1:] - 1, len(starts) - 1)] + span
    return [*zip(starts[firsts].tolist(), ends.tolist(), strict=True)]


def _count_tokens(ranges: Sequence[Range]) -> int:
    return sum(end - first for first, end in ranges)
