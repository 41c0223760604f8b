"""The indexed dataset: `PREFIX.bin`, `PREFIX.idx`, and our metadata.

    PREFIX.bin   the sequences end to end, no header
    PREFIX.idx   where sequences and documents begin, in one of the formats of `idx_content`
    PREFIX.json  DatasetInfo; files written by Megatron have none

The prefix may be a URL of an object store or web server (`remote_dataset`).

The index format is Megatron's mmap by default; all of them are read (docs/formats/dataset.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_schema.app.path_hints import suggest_dataset
from mega_schema.dataset import idx_cached, idx_mmap
from mega_schema.dataset.dataset_info import COPY_AGAIN, DatasetInfo, sibling
from mega_schema.dataset.idx_content import CHUNK, CODES, CUT_OFF, INDEX_FORMATS, DatasetIndex
from mega_schema.dataset.idx_mmap import HEADER, MAGIC, VERSION
from mega_schema.dataset.indexed_writer import IndexedWriter
from mega_schema.dataset.remote_dataset import RemoteDatasetFiles, RemoteTokens, default_cache
from mega_schema.errors import FormatError
from mega_schema.remote_files import RemotePath
from mega_schema.urls import check_local

Piece = tuple[int, int, int | None]  # sequence, offset and length, as for `IndexedDataset.read`

__all__ = [
    "CODES",
    "INDEX_FORMATS",
    "HEADER",
    "MAGIC",
    "VERSION",
    "DatasetInfo",
    "IndexedDataset",
    "IndexedWriter",
    "Piece",
    "sibling",
    "open_dataset",
    "read_index",
    "truncated_error",
    "smallest_dtype",
]


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Return the dtype that Megatron's writers choose.

    uint16 below 65,500 ids, else int32, also for an unknown size.
    """
    return np.dtype("uint16" if vocab_size is not None and vocab_size < 65500 else "int32")


def open_dataset(path: Path, *, multimodal: bool = False) -> IndexedDataset:
    """Open a dataset by its prefix, or by its `.idx` or `.bin`.

    Raises:
        FormatError: as IndexedDataset; without an index, the hint names similar paths.
    """
    if path.suffix in (".idx", ".bin") and not sibling(path, ".idx").exists():
        path = path.with_suffix("")
    try:
        return IndexedDataset(path, multimodal=multimodal)
    except FormatError as error:
        if error.hint or sibling(path, ".idx").is_file() or not (hint := suggest_dataset(path)):
            raise
        raise FormatError(error.where, error.what, hint=hint) from None


def read_index(path: Path, *, multimodal: bool = False) -> DatasetIndex:
    """Read an index of any format, and check that its size and numbers are consistent.

    Raises:
        FormatError: it has an unknown format, or is incomplete.
    """
    with path.open("rb") as file:
        magic = file.read(len(idx_cached.MAGIC))
    index = idx_cached.read(path) if magic == idx_cached.MAGIC else idx_mmap.read(path, multimodal)
    if multimodal and index.modes is None:
        raise FormatError(path, f"{index.index_format} has no modes", hint="open it as a dataset of text")
    bounds = index.documents
    sequences = len(index.lengths)
    ordered = all((chunk[1:] >= chunk[:-1]).all() for chunk in _overlapping_chunks(bounds))
    if bounds[0] != 0 or bounds[-1] != sequences or not ordered:
        wanted = f"ascending from 0 to {sequences}, the number of sequences"
        raise FormatError(
            path, "document index", found=f"{bounds[0]} to {bounds[-1]}", wanted=wanted, hint=CUT_OFF
        )
    if sequences and (shortest := int(index.lengths.min())) < 0:
        raise FormatError(path, "length of a sequence", found=shortest, wanted="0 or more", hint=CUT_OFF)
    return index


class IndexedDataset:
    """Sequences of token ids, mapped from disk.

    Attributes:
        index_format: one of INDEX_FORMATS.
        lengths: (N,) int32, tokens of each sequence.
        pointers: (N,) int64, byte at which each begins in the .bin.
        documents: (D,) int64, sequence at which each document begins; the last entry is N.
        dtype: of the ids.
        modes: (N,) int8 of a multimodal dataset, else None.
        tokens: ids in the .bin.
        info: the content of PREFIX.json, or None.
        remote: the copies of a remote dataset's files; None for one of this machine.
    """

    def __init__(self, prefix: Path, *, multimodal: bool = False, cache: Path | None = None) -> None:
        """Open `PREFIX.idx`, and check it against its own header, `PREFIX.bin` and `PREFIX.json`.

        Args:
            prefix: of this machine, or a RemotePath.
            multimodal: the index ends with a mode per sequence. The file does not say so; the caller must.
            cache: folder for the index and the tokens of a RemotePath; None: `remote_dataset.default_cache`.

        Raises:
            ConfigError: a library for the URL is not installed.
            FormatError: a file is missing, cut off, of another format, or does not match the others.
            MegaError: the place of a RemotePath cannot be reached, or the cache cannot be written.
        """
        self.prefix = prefix
        self._cache = cache
        self.remote: RemoteDatasetFiles | None = None
        index_path, payload_path = sibling(prefix, ".idx"), sibling(prefix, ".bin")
        if isinstance(prefix, RemotePath):
            self.remote = RemoteDatasetFiles(prefix, cache or default_cache())
            self._open(self.remote.index, payload_path, self.remote.info, multimodal=multimodal)
            return
        check_local("", prefix)
        if not index_path.is_file():
            has_suffix = prefix.suffix in (".idx", ".bin")
            hint = f"give only the prefix: {prefix.with_suffix('')}" if has_suffix else ""
            raise FormatError(index_path, "no such file", hint=hint)
        if not payload_path.is_file():
            wanted = f"the tokens that {index_path.name} describes"
            hint = f"copy it to the folder of {index_path.name}, or preprocess the text again"
            raise FormatError(payload_path, "no such file", wanted=wanted, hint=hint)
        self._open(index_path, payload_path, sibling(prefix, ".json"), multimodal=multimodal)

    def _open(self, index_path: Path, payload_path: Path, info_path: Path, *, multimodal: bool) -> None:
        index = read_index(index_path, multimodal=multimodal)
        self.index_format = index.index_format
        self.dtype = index.dtype
        self.shift = index.shift
        self.lengths = index.lengths
        self.pointers = index.pointers
        self.documents = index.documents
        self.modes = index.modes
        self.tokens = self._count_tokens(index_path, payload_path)
        self._payload: NDArray[Any] | RemoteTokens
        if self.remote is not None:
            self._payload = RemoteTokens(self.remote.payload, self.dtype)
        elif self.tokens:
            self._payload = np.memmap(payload_path, self.dtype, "r").view(np.ndarray)
        else:
            self._payload = np.empty(0, self.dtype)
        self.info = self._read_info(info_path)

    def __reduce__(self) -> tuple[object, ...]:
        # pickle the path: a pickled memory map would contain the whole file
        return _reopen, (self.prefix, self.modes is not None, self._cache)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> NDArray[Any]:
        """Return sequence `i`, (lengths[i],): a view of the file, not a copy (but see `view_range`)."""
        return self.read(i)

    def read(self, i: int, offset: int = 0, length: int | None = None, *, copy: bool = False) -> NDArray[Any]:
        """Return `length` tokens of sequence `i` from `offset` on, as a view of the file; None: to its end.

        Args:
            copy: read instead of map, see `copy_range`.

        Raises:
            IndexError: there is no such sequence, or it is shorter.
            FormatError: the pointer of the sequence is outside the file.
        """
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        whole, pointer = int(self.lengths[i]), int(self.pointers[i])
        length = whole - offset if length is None else length
        if not 0 <= offset <= offset + length <= whole:
            raise IndexError(f"tokens {offset} to {offset + length} of sequence {i}, which has {whole}")
        first, remainder = divmod(pointer, self.dtype.itemsize)
        if remainder or not 0 <= first <= first + whole <= self.tokens:
            path = sibling(self.prefix, ".idx")
            wanted = f"multiples of {self.dtype.itemsize} up to {self._payload.nbytes}"
            raise FormatError(path, f"pointer of sequence {i}", found=pointer, wanted=wanted, hint=CUT_OFF)
        read_range = self.copy_range if copy else self.view_range
        return read_range(first + offset, first + offset + length)

    def prefetch(self, pieces: Iterable[Piece]) -> None:
        """Begin to read pieces of a remote dataset; do nothing for one of this machine."""
        if self.remote is None:
            return
        ranges = []
        for i, offset, length in pieces:
            begin = int(self.pointers[i]) + offset * self.dtype.itemsize
            count = int(self.lengths[i]) - offset if length is None else length
            ranges.append((begin, begin + count * self.dtype.itemsize))
        self.remote.payload.prefetch(ranges)

    def view_range(self, first: int, last: int) -> NDArray[Any]:
        """Return ids `first` to `last` of the .bin, across sequences.

        A view of the file; of a remote one, and of fairseq-cached, whose ids are one higher on disk, a copy.
        """
        ids = self._payload[first:last]
        return ids - self.dtype.type(self.shift) if self.shift else ids

    def copy_range(self, first: int, last: int) -> NDArray[Any]:
        """Read ids `first` to `last` into memory, as `view_range` otherwise.

        A view of a file that another process truncates ends this process with SIGBUS; a read does not.

        Raises:
            FormatError: the file became shorter.
        """
        if self.remote is not None:
            return self.view_range(first, last)
        path = sibling(self.prefix, ".bin")
        ids: NDArray[Any] = np.fromfile(path, self.dtype, last - first, offset=first * self.dtype.itemsize)
        if len(ids) < last - first:
            raise truncated_error(path, last * self.dtype.itemsize)
        return ids - self.dtype.type(self.shift) if self.shift else ids

    def _count_tokens(self, index_path: Path, payload_path: Path) -> int:
        """Return the tokens in the .bin, after checking that index and payload match."""
        end = 0
        if len(self):
            end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if (size := payload_path.stat().st_size) != end or end % self.dtype.itemsize:
            wanted = f"{end}, the end of the last sequence of {index_path.name}"
            hint = "both files must come from one run; copy or preprocess them again"
            raise FormatError(payload_path, "size in bytes", found=size, wanted=wanted, hint=hint)
        return end // self.dtype.itemsize

    def _read_info(self, path: Path) -> DatasetInfo | None:
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise FormatError(path, "not JSON", found=str(error), hint=COPY_AGAIN) from None
        info = DatasetInfo.from_dict(values, path)
        recorded = (info.documents, info.sequences, info.tokens)
        counted = (len(self.documents) - 1, len(self), self.tokens)
        if recorded != counted:
            hint = "all files of a dataset must come from one run; copy or preprocess them again"
            raise FormatError(path, "documents, sequences, tokens", found=recorded, wanted=counted, hint=hint)
        return info


def truncated_error(path: Path, wanted: int) -> FormatError:
    """Return the error of a payload that became shorter after it was opened; `wanted` is a byte it had."""
    hint = "another process writes to it; copy or preprocess it again"
    found = path.stat().st_size if path.exists() else 0
    return FormatError(
        path, "became shorter while it was read", found=found, wanted=f"{wanted} bytes", hint=hint
    )


def _overlapping_chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield chunks that each begin with the last entry of the previous one."""
    for begin in range(0, len(array), CHUNK):
        yield array[max(begin - 1, 0) : begin + CHUNK]


def _reopen(prefix: Path, multimodal: bool, cache: Path | None) -> IndexedDataset:
    return IndexedDataset(prefix, multimodal=multimodal, cache=cache)
