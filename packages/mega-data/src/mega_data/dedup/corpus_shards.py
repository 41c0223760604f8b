"""Read the documents of a corpus, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mega_data.dedup.work_files import locate
from mega_data.jsonl_shards import Quarantine, RowErrorHandler, read_batches
from mega_data.range_outputs import RangeOutputs, range_bytes
from mega_data.readers.ranges import InputRange

BATCH_CHARACTERS = 1 << 17  # arrays of this length stay in a core's cache


@dataclass(frozen=True, slots=True)
class CorpusShards:
    """The documents of a corpus; a shard is a file or a range of one.

    Attributes:
        earlier: earlier shards; their documents are kept already, and have no ids.
        outputs: the shards of the run, in the order of `jsonl_shards.find_shards`, and their output files.
        key: key of the text.
        id_key: key of the id; "" for documents without one.
    """

    earlier: tuple[InputRange, ...]
    outputs: RangeOutputs
    key: str
    id_key: str

    @property
    def shards(self) -> tuple[InputRange, ...]:
        return (*self.earlier, *self.outputs.ranges)

    @property
    def skips(self) -> bool:
        """Return whether lines that are not documents are skipped."""
        return self.outputs.quarantine is not None

    def is_new(self, shard: int) -> bool:
        """Return whether a shard is one of the run."""
        return shard >= len(self.earlier)

    def bytes_of(self, shard: int) -> int:
        return range_bytes(self.shards[shard])

    def open_quarantine(self, shard: int) -> Quarantine:
        """Open the file for the lines of a shard of this run that are not documents."""
        return self.outputs.open_quarantine(shard - len(self.earlier))

    def read_batches(self, shard: int, on_error: RowErrorHandler) -> Iterator[tuple[list[str], list[str]]]:
        """Yield the texts and ids of a shard in batches."""
        id_key = self.id_key if self.is_new(shard) else ""
        return read_batches(self.shards[shard], self.key, BATCH_CHARACTERS, on_error, id_key)

    def name_of(self, document: int, firsts: Sequence[int]) -> str:
        """Return a document's file and line; the path of an earlier file.

        Args:
            document: number of the document in the corpus.
            firsts: number of the first document of each shard.
        """
        shard, _ = locate(document, firsts)
        part = self.shards[shard]
        if not self.is_new(shard):
            return f"{part.item.path}:{document - firsts[shard] + 1}"
        while shard > len(self.earlier) and self.shards[shard - 1].input == part.input:
            shard -= 1
        return f"{part.item.path.name}:{document - firsts[shard] + 1}"
