"""The mmap index, Megatron's and fairseq's: all little endian, no padding (docs/formats/dataset.md).

9 bytes   magic "MMIDIDX\\0\\0"
u64       version, 1
u8        dtype code
u64       N, sequences
u64       D, documents + 1                                              not in fairseq's
int32[N]  tokens of each sequence
int64[N]  byte at which each begins in .bin
int64[D]  sequence at which each document begins; last entry N          not in fairseq's
int8[N]   modes, in multimodal datasets only: nothing in the file says so
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_schema.dataset.idx_content import (
    CODES,
    CUT_OFF,
    FAIRSEQ_CODES,
    NO_INDEX,
    OTHER_VERSION,
    DatasetIndex,
    IndexStreams,
    check_pointers,
    code_of,
    dtype_of,
    offsets,
)
from mega_schema.errors import FormatError

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
FAIRSEQ_HEADER: Final = struct.Struct("<9sQBQ")


def read(path: Path, multimodal: bool) -> DatasetIndex:
    """Read an index of either format, as views of the file.

    Raises:
        FormatError: it is neither, or its size does not match its counts.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise FormatError(path, "not an index: magic", found=head[: len(MAGIC)], wanted=MAGIC, hint=NO_INDEX)
    if len(head) < FAIRSEQ_HEADER.size:
        raise FormatError(path, "size in bytes", found=size, wanted=f"{HEADER.size} or more", hint=CUT_OFF)
    _, version, code, sequences = FAIRSEQ_HEADER.unpack(head[: FAIRSEQ_HEADER.size])
    if version != VERSION:
        raise FormatError(path, "version", found=version, wanted=VERSION, hint=OTHER_VERSION)
    # Megatron's has at least 8 bytes more; an empty fairseq index looks like one that was cut off there
    if size == FAIRSEQ_HEADER.size + 12 * sequences and sequences:
        return _read_fairseq(path, code, sequences)
    if len(head) < HEADER.size:
        raise FormatError(path, "size in bytes", found=size, wanted=f"{HEADER.size} or more", hint=CUT_OFF)
    dtype = dtype_of(path, code, CODES)
    boundaries = HEADER.unpack(head)[-1]
    if boundaries < 1:
        raise FormatError(path, "document boundaries", found=boundaries, wanted="documents + 1", hint=CUT_OFF)
    _check_size(path, size, sequences, boundaries, multimodal)
    raw = np.memmap(path, np.uint8, "r")
    offset = HEADER.size
    # the header has 34 bytes, so these views are unaligned: numpy reads them, C code must copy first
    lengths = _view(raw, "<i4", sequences, offset)
    pointers = _view(raw, "<i8", sequences, offset + 4 * sequences)
    documents = _view(raw, "<i8", boundaries, offset + 12 * sequences)
    offset += 12 * sequences + 8 * boundaries
    modes = _view(raw, "<i1", sequences, offset) if multimodal else None
    return DatasetIndex("mmap", dtype, lengths, pointers, documents, modes)


def _read_fairseq(path: Path, code: int, sequences: int) -> DatasetIndex:
    dtype = dtype_of(path, code, FAIRSEQ_CODES)
    raw = np.memmap(path, np.uint8, "r")
    offset = FAIRSEQ_HEADER.size
    lengths = _view(raw, "<i4", sequences, offset)
    pointers = _view(raw, "<i8", sequences, offset + 4 * sequences)
    # a Megatron index that was cut off exactly there has the same size, but its pointers do not match
    check_pointers(path, lengths, pointers, dtype.itemsize)
    return DatasetIndex("fairseq-mmap", dtype, lengths, pointers, np.arange(sequences + 1))


def _view(raw: NDArray[np.uint8], dtype: str, count: int, offset: int) -> NDArray[Any]:
    return np.frombuffer(raw, dtype, count, offset)


def _check_size(path: Path, size: int, sequences: int, boundaries: int, multimodal: bool) -> None:
    text_size = HEADER.size + 12 * sequences + 8 * boundaries
    expected_size = text_size + (sequences if multimodal else 0)
    if size == expected_size:
        return
    counts = f"{sequences} sequences and {boundaries - 1} documents"
    hint = CUT_OFF
    if size == text_size + sequences:
        hint = "its size is that of a multimodal dataset: open it as one"
    elif multimodal and size == text_size:
        hint = "it has no modes: open it as a dataset of text"
    raise FormatError(path, "size in bytes", found=size, wanted=f"{expected_size} for {counts}", hint=hint)


def write(file: IO[bytes], index_format: str, contents: IndexStreams) -> None:
    """Write an index from its streams; memory holds one chunk of them."""
    code = code_of(index_format, contents.dtype)
    sequences = contents.sequences
    if index_format == "mmap":
        file.write(HEADER.pack(MAGIC, VERSION, code, sequences, contents.boundaries))
    else:
        file.write(FAIRSEQ_HEADER.pack(MAGIC, VERSION, code, sequences))
    for chunk in contents.lengths():
        file.write(chunk.astype("<i4").tobytes())
    for chunk in offsets(contents.lengths(), contents.dtype.itemsize):
        file.write(chunk.astype("<i8").tobytes())
    if index_format == "mmap":
        for chunk in contents.documents():
            file.write(chunk.astype("<i8").tobytes())
    if index_format == "mmap" and contents.modes is not None:
        for chunk in contents.modes():
            file.write(chunk.astype("<i1").tobytes())
