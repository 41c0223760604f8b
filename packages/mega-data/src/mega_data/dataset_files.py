"""The files of one dataset of an unfinished run, which only grow."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mega_schema.dataset.idx_content import CHUNK, IndexStreams
from mega_schema.dataset.indexed_dataset import DatasetInfo, sibling
from mega_schema.dataset.indexed_writer import write_index


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """Documents under one key.

    Attributes:
        ids: ids of all documents, end to end.
        lengths: int32, tokens of each sequence.
        sequences: number of sequences of each document, 0 for an empty one.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int64]


@dataclass(slots=True)
class DatasetFiles:
    """The files of one dataset, `NUMBER.ids`, `NUMBER.lengths` and `NUMBER.documents`, open for appending."""

    folder: Path
    number: int
    dtype: np.dtype[Any]
    files: dict[str, IO[bytes]]
    sequences: int = 0
    tokens: int = 0
    documents: int = 0

    @classmethod
    def open(
        cls,
        folder: Path,
        number: int,
        dtype: np.dtype[Any],
        sizes: Mapping[str, int],
        counts: Mapping[str, int] | None,
    ) -> DatasetFiles:
        """Open the files, truncated to these sizes.

        Args:
            counts: counts of the files' content, from `counts`; None for new files.
        """
        files = {
            name: open_truncated(folder / f"{number}.{name}", sizes.get(f"{number}.{name}", 0))
            for name in ("ids", "lengths", "documents")
        }
        if counts is None:
            files["documents"].write(np.zeros(1, np.int64).tobytes())
        return cls(folder, number, dtype, files, **(counts or {}))

    def add(self, encoded: EncodedDocuments) -> None:
        """Append documents."""
        ends = np.cumsum(encoded.sequences, dtype=np.int64) + self.sequences
        self.files["ids"].write(encoded.ids.astype(self.dtype, copy=False).data)
        self.files["lengths"].write(encoded.lengths.astype(np.int32, copy=False).data)
        self.files["documents"].write(ends.data)
        self.sequences += len(encoded.lengths)
        self.documents += len(encoded.sequences)
        self.tokens += len(encoded.ids)

    def counts(self) -> dict[str, int]:
        """Return the counts of the files' content."""
        return {"sequences": self.sequences, "tokens": self.tokens, "documents": self.documents}

    def named_files(self) -> Iterator[tuple[str, IO[bytes]]]:
        """Yield the name and the file of each."""
        for name, file in self.files.items():
            yield f"{self.number}.{name}", file

    def write_index(self, info: DatasetInfo, index_format: str) -> None:
        """Write the index and the metadata, and flush all files.

        Args:
            index_format: format of the index, mmap or cached.
        """
        for file in self.files.values():
            file.flush()
        lengths, documents = (
            partial(read_chunks, self.folder / f"{self.number}.{name}", dtype)
            for name, dtype in (("lengths", np.int32), ("documents", np.int64))
        )
        contents = IndexStreams(self.dtype, self.sequences, self.documents + 1, lengths, documents)
        write_index_files(self.folder, self.number, index_format, contents, info, self.tokens)
        sync(self.files["ids"])

    def publish(self, prefix: Path) -> None:
        """Rename the files to the dataset `prefix`, in place of an earlier one."""
        publish_dataset(self.folder, self.number, prefix)


def read_chunks(path: Path, dtype: DTypeLike) -> Iterator[NDArray[Any]]:
    """Yield the numbers in a file."""
    number_bytes = np.dtype(dtype).itemsize
    with path.open("rb") as file:
        while part := file.read(CHUNK * number_bytes):
            yield np.frombuffer(part, dtype)


def write_index_files(
    folder: Path,
    number: int,
    index_format: str,
    contents: IndexStreams,
    info: DatasetInfo | None,
    tokens: int,
) -> None:
    """Write `NUMBER.idx` and `NUMBER.json`, and flush them to the disk.

    Args:
        info: the content of the second, without counts; None writes none, like Megatron.
    """
    with (folder / f"{number}.idx").open("wb") as index:
        write_index(index, index_format, contents)
        sync(index)
    if info is None:
        return
    documents = contents.boundaries - 1
    info = dataclasses.replace(info, documents=documents, sequences=contents.sequences, tokens=tokens)
    with (folder / f"{number}.json").open("wb") as info_file:
        info_file.write((json.dumps(info.to_dict(), indent=1) + "\n").encode())
        sync(info_file)


def publish_dataset(folder: Path, number: int, prefix: Path) -> None:
    """Rename the files to the dataset `prefix`, in place of an earlier one.

    After a kill, call it again: it renames the files that are left.
    """
    # Readers open the index first: without one there is no dataset. So the old index is removed before the
    # payload is replaced, and the new index comes last.
    if (folder / f"{number}.ids").exists():
        for suffix in (".idx", ".json"):
            sibling(prefix, suffix).unlink(missing_ok=True)
    for name, suffix in (("ids", ".bin"), ("json", ".json"), ("idx", ".idx")):
        if (path := folder / f"{number}.{name}").exists():
            path.replace(sibling(prefix, suffix))


def open_truncated(path: Path, size: int) -> IO[bytes]:
    """Open a file for appending after its first `size` bytes."""
    file = path.open("ab", buffering=1 << 16)
    file.truncate(size)
    file.seek(0, os.SEEK_END)
    return file


def sync(file: IO[bytes]) -> None:
    """Flush a file to the disk."""
    file.flush()
    os.fsync(file.fileno())
