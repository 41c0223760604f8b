"""Read the documents of a corpus, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mega_data.jsonl_shards import Quarantine, RowErrorHandler, file_bytes, output_name, read_batches

BATCH_CHARACTERS = 1 << 17  # arrays of this length stay in a core's cache


@dataclass(frozen=True, slots=True)
class CorpusShards:
    """The documents of a corpus.

    Attributes:
        inputs: earlier shards, then those of the run in the order of `jsonl_shards.find_shards`.
        earlier: number of earlier shards; their documents are kept already, and have no ids.
        key: key of the text.
        id_key: key of the id; "" for documents without one.
        quarantine: folder for lines that are not documents; None: the first such line ends the run.
    """

    inputs: tuple[Path, ...]
    key: str
    id_key: str
    quarantine: Path | None
    earlier: int = 0

    def bytes_of(self, shard: int) -> int:
        return file_bytes(self.inputs[shard])

    def open_quarantine(self, shard: int) -> Quarantine:
        """Open the file for the lines of a shard of this run that are not documents."""
        source = self.inputs[shard]
        assert self.quarantine is not None
        return Quarantine(self.quarantine / output_name(source), source)

    def read_batches(self, shard: int, on_error: RowErrorHandler) -> Iterator[tuple[list[str], list[str]]]:
        """Yield the texts and ids of a shard in batches."""
        id_key = self.id_key if shard >= self.earlier else ""
        return read_batches(self.inputs[shard], self.key, BATCH_CHARACTERS, on_error, id_key)
