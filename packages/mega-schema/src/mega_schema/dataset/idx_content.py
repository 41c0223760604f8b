"""The content of a dataset's index in any format, and code shared by their readers and writers.

Four formats are on disk; `indexed_dataset.read_index` detects which one a file has:

    mmap            Megatron's, our default                               (idx_mmap)
    cached          Megatron's older one, "TNTIDX"; lazy is the same      (idx_cached)
    fairseq-mmap    the first without documents                           (idx_mmap)
    fairseq-cached  the second without documents, each id one higher      (idx_cached)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_schema.errors import FormatError

INDEX_FORMATS: Final = ("mmap", "cached", "fairseq-mmap", "fairseq-cached")
# 6 and 7 as NVIDIA's core writes them; older writers used 7 for float64 too. Text is always 4 or 8.
CODES: Final = MappingProxyType(
    {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
)
FAIRSEQ_CODES: Final = MappingProxyType({**CODES, 7: "float64", 9: "uint32", 10: "uint64"})
CHUNK: Final = 1 << 18  # numbers of an index per chunk
CUT_OFF: Final = "the file was cut off or written to; copy or preprocess it again"
NO_INDEX: Final = "mega-data preprocess makes an index of text; Megatron's and fairseq's are read too"
OTHER_VERSION: Final = "another version of its format; preprocess the text again"

# yields an array in chunks, from its beginning at each call: some formats need two passes
Stream = Callable[[], Iterable[NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class DatasetIndex:
    """An index in memory, independent of its format.

    Attributes:
        lengths: (N,) int32, tokens of each sequence.
        pointers: (N,) int64, byte at which each begins in the .bin.
        documents: (D,) int64, sequence at which each document begins; the last entry is N. fairseq's formats
            have no documents: each sequence is one.
        modes: (N,) int8 of a multimodal dataset, else None.
        shift: offset added to each id on disk: 1 in fairseq-cached, else 0.
    """

    index_format: str
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]
    modes: NDArray[np.int8] | None = None
    shift: int = 0


@dataclass(frozen=True, slots=True)
class IndexStreams:
    """The content of an index to write, see DatasetIndex; arrays are streams of chunks."""

    dtype: np.dtype[Any]
    sequences: int
    boundaries: int
    lengths: Stream
    documents: Stream
    modes: Stream | None = None


def code_of(index_format: str, dtype: np.dtype[Any]) -> int | None:
    """Return the code of a dtype in the index format, or None if it has none."""
    codes = FAIRSEQ_CODES if index_format.startswith("fairseq") else CODES
    return next((code for code, name in codes.items() if name == dtype.name), None)


def dtype_of(path: Path, code: int, codes: MappingProxyType[int, str]) -> np.dtype[Any]:
    """Return the dtype of a code.

    Raises:
        FormatError: there is no such code.
    """
    if code not in codes:
        wanted = ", ".join(f"{code} ({name})" for code, name in codes.items())
        raise FormatError(path, "dtype code", found=code, wanted=wanted, hint=CUT_OFF)
    return np.dtype(codes[code]).newbyteorder("<")


def chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the array in chunks, as views."""
    for begin in range(0, len(array), CHUNK):
        yield array[begin : begin + CHUNK]


def offsets(lengths: Iterable[NDArray[Any]], unit: int) -> Iterator[NDArray[np.int64]]:
    """Yield, in chunks, the offset of each sequence when all are contiguous; a token is `unit` long."""
    end = 0
    for chunk in lengths:
        ends = np.cumsum(chunk, dtype=np.int64) * unit + end
        yield ends - chunk.astype(np.int64) * unit
        end = int(ends[-1]) if len(ends) else end


def check_pointers(path: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], unit: int) -> None:
    """Check that each sequence begins where the previous one ends.

    Raises:
        FormatError: names the first that does not.
    """
    first = 0
    for wanted in offsets(chunks(lengths), unit):
        found = pointers[first : first + len(wanted)]
        if len(wrong := np.flatnonzero(found != wanted)):
            i = int(wrong[0])
            what = f"pointer of sequence {first + i}"
            raise FormatError(path, what, found=int(found[i]), wanted=int(wanted[i]), hint=CUT_OFF)
        first += len(wanted)
