"""Write an indexed dataset: tokens and index are streamed to disk, and appear whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mega_schema.atomic_io import disk_errors
from mega_schema.dataset import idx_cached, idx_mmap
from mega_schema.dataset.atomic_dataset import StagedDataset
from mega_schema.dataset.dataset_info import DatasetInfo
from mega_schema.dataset.idx_content import CHUNK, INDEX_FORMATS, IndexStreams, chunks, code_of


def write_index(file: IO[bytes], index_format: str, contents: IndexStreams) -> None:
    """Write an index in this format; memory holds one chunk of it."""
    write = idx_mmap.write if index_format.endswith("mmap") else idx_cached.write
    write(file, index_format, contents)


class _Spool:
    """A sequence of numbers in an unnamed temporary file; memory holds one chunk of them."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.dtype = np.dtype(kind)
        self._folder = folder
        self._recent = array(kind)
        self._earlier = 0
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return self._earlier + len(self._recent)

    def append(self, number: int) -> None:
        self._recent.append(number)
        if len(self._recent) >= CHUNK:
            self._spill()

    def extend(self, numbers: NDArray[Any]) -> None:
        self._recent.frombytes(numbers.astype(self.dtype, copy=False).tobytes())
        if len(self._recent) >= CHUNK:
            self._spill()

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield all numbers from the first; several readers may iterate, but not while numbers are added."""
        if self._file is not None:
            for begin in range(0, self._earlier, CHUNK):
                self._file.seek(begin * self.dtype.itemsize)
                chunk = self._file.read(self.dtype.itemsize * min(CHUNK, self._earlier - begin))
                yield np.frombuffer(chunk, self.dtype)
        yield from chunks(np.array(self._recent, self.dtype))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._file.seek(0, 2)
        self._recent.tofile(self._file)
        self._earlier += len(self._recent)
        del self._recent[:]


class IndexedWriter:
    """Writes an indexed dataset that appears whole if the `with` block succeeds, and otherwise not at all.

        with IndexedWriter(prefix, smallest_dtype(vocab)) as writer:
            writer.add(ids)
            writer.end_document()

    Tokens and the numbers of the index are streamed to disk. An earlier dataset of the same prefix stays
    until the end, and is replaced so that no reader sees a mix of both.

    Args:
        info: written to PREFIX.json with its counts filled in; None writes none, like Megatron.
        multimodal: write the mode of each sequence at the end of the index; only in the format mmap.
        index_format: one of INDEX_FORMATS. fairseq's formats do not store where documents end; in
            fairseq-cached ids are one higher on disk, and the dtype needs room for that.
    """

    def __init__(
        self,
        prefix: Path,
        dtype: DTypeLike,
        info: DatasetInfo | None = None,
        *,
        multimodal: bool = False,
        index_format: str = "mmap",
    ) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.info = info
        self.multimodal = multimodal
        self.index_format = index_format
        self._shift = 1 if index_format == "fairseq-cached" else 0
        if (
            index_format not in INDEX_FORMATS
            or code_of(index_format, self.dtype) is None
            or (multimodal and index_format != "mmap")
        ):
            raise ValueError(
                f"no {index_format} index of {self.dtype}" + (" with modes" if multimodal else "")
            )
        self._staged = StagedDataset(prefix)
        self._tokens = 0
        self._lengths = _Spool(prefix.parent, "i")
        self._modes = _Spool(prefix.parent, "b")
        self._documents = _Spool(prefix.parent, "q")
        self._documents.append(0)
        self._ended_sequences = 0
        self._payload = self._staged.open(".bin")

    @property
    def tokens(self) -> int:
        """Tokens added so far."""
        return self._tokens

    def add(self, ids: ArrayLike, mode: int = 0) -> None:
        """Write one sequence.

        Args:
            ids: one-dimensional, each in the range of the writer's dtype.
            mode: the kind of sequence; stored only in multimodal datasets.
        """
        values = np.asarray(ids)
        if values.ndim != 1:
            raise ValueError(f"a sequence has one dimension, not shape {values.shape}")
        self._write(values)
        self._lengths.append(len(values))
        if self.multimodal:
            self._modes.append(mode)

    def extend(self, ids: NDArray[Any], lengths: NDArray[Any], sequences: NDArray[Any] | None = None) -> None:
        """Write whole documents at once.

        Args:
            ids: of all documents, end to end.
            lengths: tokens of each sequence.
            sequences: sequences of each document, 0 for an empty one; None: one each.
        """
        assert len(ids) == lengths.sum(), "the lengths are not those of the ids"
        assert sequences is None or len(lengths) == sequences.sum(), "sequences that no document has"
        assert self._ended_sequences == len(self._lengths), "a document is open"
        self._write(np.asarray(ids))
        ones = np.ones(len(lengths), np.int64) if sequences is None else sequences
        self._documents.extend(np.cumsum(ones, dtype=np.int64) + self._ended_sequences)
        self._lengths.extend(lengths)
        if self.multimodal:
            self._modes.extend(np.zeros(len(lengths), np.int8))
        self._ended_sequences = len(self._lengths)

    def end_document(self) -> None:
        """End a document: the sequences since the last call; without any, it is empty."""
        self._ended_sequences = len(self._lengths)
        self._documents.append(self._ended_sequences)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._staged.discard()
            for spool in (self._lengths, self._modes, self._documents):
                spool.close()

    def _write(self, values: NDArray[Any]) -> None:
        if values.size and self.dtype.kind in "iu" and (self._shift or values.dtype != self.dtype):
            limits = np.iinfo(self.dtype)
            low, high = values.min(), values.max()
            if values.dtype.kind not in "iu" or low < limits.min or int(high) + self._shift > limits.max:
                raise ValueError(f"ids from {low} to {high} do not fit in {self.dtype}")
        if self._shift:
            values = values.astype(self.dtype) + self.dtype.type(self._shift)
        with disk_errors(self.prefix):
            self._payload.write(values.astype(self.dtype.newbyteorder("<"), copy=False).data)
        self._tokens += len(values)

    def _commit(self) -> None:
        if self._ended_sequences != len(self._lengths):
            raise ValueError("sequences after the last end_document() belong to no document")
        with disk_errors(self.prefix):
            self._write_index()

    def _write_index(self) -> None:
        documents = len(self._documents) - 1
        sequences = len(self._lengths)
        modes = self._modes.chunks if self.multimodal else None
        lengths, bounds = self._lengths.chunks, self._documents.chunks
        contents = IndexStreams(self.dtype, sequences, documents + 1, lengths, bounds, modes)
        write_index(self._staged.open(".idx"), self.index_format, contents)
        if self.info is not None:
            if self.index_format.startswith("fairseq"):  # in its index each sequence is a document
                documents = sequences
            info = dataclasses.replace(
                self.info, documents=documents, sequences=sequences, tokens=self._tokens
            )
            self._staged.open(".json").write((json.dumps(info.to_dict(), indent=1) + "\n").encode())
        self._staged.publish()
