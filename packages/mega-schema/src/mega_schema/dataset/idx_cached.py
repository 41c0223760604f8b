"""The older index, "TNTIDX", Megatron's (`cached`, `lazy`) and fairseq's: all little endian.

    8 bytes     magic "TNTIDX\\0\\0"
    u64         version, 1
    u64         dtype code
    u64         bytes of an id
    u64         n, sequences
    u64         S, sizes: n of them, since a sequence has one dimension
    u64         D, documents + 1                                        not in fairseq's
    int64[n+1]  first size of each sequence: 0, 1, 2, ...
    int64[n+1]  id at which each sequence begins in .bin; last entry all of them
    int64[S]    tokens of each sequence
    int64[D]    sequence at which each document begins                  not in fairseq's

In fairseq's every id on disk is one higher than its value, as Lua counts from 1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_schema.dataset.idx_content import (
    CHUNK,
    CODES,
    CUT_OFF,
    FAIRSEQ_CODES,
    NO_INDEX,
    OTHER_VERSION,
    DatasetIndex,
    IndexStreams,
    chunks,
    code_of,
    dtype_of,
    offsets,
)
from mega_schema.errors import FormatError

MAGIC: Final = b"TNTIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sQQQQQ")
DOCUMENTS: Final = struct.Struct("<Q")
MAX_SEQUENCE_TOKENS: Final = 2**31 - 1  # the other index formats store a length in 32 bits


def read(path: Path) -> DatasetIndex:
    """Read an index of either format.

    Raises:
        FormatError: it is neither, its size does not match its counts, or its arrays disagree.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size + DOCUMENTS.size)
    if len(head) < HEADER.size:
        raise FormatError(path, "size in bytes", found=size, wanted=f"{HEADER.size} or more", hint=CUT_OFF)
    magic, version, code, width, sequences, sizes = HEADER.unpack(head[: HEADER.size])
    if magic != MAGIC:
        raise FormatError(path, "not an index: magic", found=magic, wanted=MAGIC, hint=NO_INDEX)
    if version != VERSION:
        raise FormatError(path, "version", found=version, wanted=VERSION, hint=OTHER_VERSION)
    common = HEADER.size + 8 * (2 * (sequences + 1) + sizes)
    fairseq = size == common
    boundaries = 0 if fairseq or len(head) < HEADER.size + 8 else DOCUMENTS.unpack(head[HEADER.size :])[0]
    if not fairseq and size != (expected_size := common + 8 + 8 * boundaries):
        counts = f"{sequences} sequences and {boundaries - 1} documents"
        raise FormatError(
            path, "size in bytes", found=size, wanted=f"{expected_size} for {counts}", hint=CUT_OFF
        )
    dtype = dtype_of(path, code, FAIRSEQ_CODES if fairseq else CODES)
    if dtype.kind not in "iu" or width != dtype.itemsize:
        wanted = f"{dtype.itemsize} of {dtype.name}" if dtype.kind in "iu" else "integers"
        found = f"{width} of {dtype.name}"
        raise FormatError(path, "bytes of an id", found=found, wanted=wanted, hint=CUT_OFF)
    if sizes != sequences:
        raise FormatError(path, "sizes", found=sizes, wanted=f"{sequences}, one a sequence", hint=CUT_OFF)
    if not fairseq and boundaries < 1:
        raise FormatError(path, "document boundaries", found=boundaries, wanted="documents + 1", hint=CUT_OFF)
    return _read_arrays(path, dtype, sequences, None if fairseq else boundaries)


def _read_arrays(path: Path, dtype: np.dtype[Any], sequences: int, boundaries: int | None) -> DatasetIndex:
    offset = HEADER.size + (0 if boundaries is None else DOCUMENTS.size)
    numbers = np.memmap(path, "<i8", "r", offset=offset).view(np.ndarray)
    first_sizes, offsets, lengths, documents = np.split(
        numbers, np.cumsum([sequences + 1, sequences + 1, sequences])
    )
    if any(
        (chunk != np.arange(first, first + len(chunk))).any()
        for first, chunk in _enumerate_chunks(first_sizes)
    ):
        raise FormatError(path, "dimensions", wanted="one of each sequence", hint=CUT_OFF)
    low, high = (int(lengths.min()), int(lengths.max())) if sequences else (0, 0)
    if low < 0 or high > MAX_SEQUENCE_TOKENS:
        found = low if low < 0 else high
        raise FormatError(
            path, "length of a sequence", found=found, wanted=f"0 to {MAX_SEQUENCE_TOKENS}", hint=CUT_OFF
        )
    if int(offsets[0]) != 0:
        raise FormatError(path, "pointer of sequence 0", found=int(offsets[0]), wanted=0, hint=CUT_OFF)
    for first, chunk in _enumerate_chunks(lengths):
        ends = offsets[first + 1 : first + 1 + len(chunk)]
        wanted = offsets[first : first + len(chunk)] + chunk
        if len(wrong := np.flatnonzero(ends != wanted)):
            i = int(wrong[0])
            found, end = int(ends[i]), int(wanted[i])
            raise FormatError(
                path, f"end of sequence {first + i}, in ids", found=found, wanted=end, hint=CUT_OFF
            )
    index_format, shift = ("fairseq-cached", 1) if boundaries is None else ("cached", 0)
    bounds: NDArray[np.int64] = np.arange(sequences + 1) if boundaries is None else documents
    pointers = offsets[:-1] * dtype.itemsize
    return DatasetIndex(index_format, dtype, lengths.astype(np.int32), pointers, bounds, shift=shift)


def _enumerate_chunks(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for number, chunk in enumerate(chunks(array)):
        yield number * CHUNK, chunk


def write(file: IO[bytes], index_format: str, contents: IndexStreams) -> None:
    """Write an index from its streams; memory holds one chunk of them."""
    code = code_of(index_format, contents.dtype)
    sequences = contents.sequences
    file.write(HEADER.pack(MAGIC, VERSION, code, contents.dtype.itemsize, sequences, sequences))
    if index_format == "cached":
        file.write(DOCUMENTS.pack(contents.boundaries))
    for first in range(0, sequences + 1, CHUNK):
        file.write(np.arange(first, min(first + CHUNK, sequences + 1), dtype="<i8").tobytes())
    for chunk in offsets(contents.lengths(), 1):
        file.write(chunk.astype("<i8").tobytes())
    end = sum(int(chunk.sum(dtype=np.int64)) for chunk in contents.lengths())
    file.write(end.to_bytes(8, "little"))
    for chunk in contents.lengths():
        file.write(chunk.astype("<i8").tobytes())
    if index_format == "cached":
        for chunk in contents.documents():
            file.write(chunk.astype("<i8").tobytes())
