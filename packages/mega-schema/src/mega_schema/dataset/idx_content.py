"""What every form of a dataset's index says, and what reading and writing them have in common.

Four forms are on disk; `indexed` finds out which one a file has:

    mmap            Megatron's, the one we write by default            (mmap_form)
    cached          Megatron's older one, "TNTIDX"; lazy is the same   (cached_form)
    fairseq-mmap    the first without documents                        (mmap_form)
    fairseq-cached  the second without documents, each id one higher   (cached_form)
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
CHUNK: Final = 1 << 18  # numbers of an index handled together
CUT_OFF: Final = "the file was cut off or written to; copy or preprocess it again"
NO_INDEX: Final = "mega-data preprocess makes an index of text; Megatron's and fairseq's are read too"
OTHER_VERSION: Final = "another version of its format; preprocess the text again"

# chunks of one of an index's arrays, from its beginning each time it is called: some forms need two passes
Stream = Callable[[], Iterable[NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class DatasetIndex:
    """An index in memory, whatever its form.

    Attributes:
        lengths: (N,) int32, tokens of each sequence.
        pointers: (N,) int64, byte at which each begins in the .bin.
        documents: (D,) int64, sequence at which each document begins; the last entry is N. fairseq's forms
            have none, so each sequence is one.
        modes: (N,) int8 of a multimodal dataset, else None.
        shift: how much higher each id is on disk than it is.
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
    """What an index is written from; see Index."""

    dtype: np.dtype[Any]
    sequences: int
    boundaries: int
    lengths: Stream
    documents: Stream
    modes: Stream | None = None


def code_of(index_format: str, dtype: np.dtype[Any]) -> int | None:
    """The code by which the form names the dtype, None where it has none."""
    codes = FAIRSEQ_CODES if index_format.startswith("fairseq") else CODES
    return next((code for code, name in codes.items() if name == dtype.name), None)


def dtype_of(path: Path, code: int, codes: MappingProxyType[int, str]) -> np.dtype[Any]:
    """The dtype of a code.

    Raises:
        FormatError: there is no such code.
    """
    if code not in codes:
        wanted = ", ".join(f"{code} ({name})" for code, name in codes.items())
        raise FormatError(path, "dtype code", found=code, wanted=wanted, hint=CUT_OFF)
    return np.dtype(codes[code]).newbyteorder("<")


def chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The array in chunks, as views of it."""
    for begin in range(0, len(array), CHUNK):
        yield array[begin : begin + CHUNK]


def offsets(lengths: Iterable[NDArray[Any]], unit: int) -> Iterator[NDArray[np.int64]]:
    """Where each sequence begins that follows the one before it, in chunks; a token is `unit` long."""
    end = 0
    for chunk in lengths:
        ends = np.cumsum(chunk, dtype=np.int64) * unit + end
        yield ends - chunk.astype(np.int64) * unit
        end = int(ends[-1]) if len(ends) else end


def check_pointers(path: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], unit: int) -> None:
    """Each sequence begins where the one before it ends.

    Raises:
        FormatError: the first that does not.
    """
    first = 0
    for wanted in offsets(chunks(lengths), unit):
        found = pointers[first : first + len(wanted)]
        if len(wrong := np.flatnonzero(found != wanted)):
            i = int(wrong[0])
            what = f"pointer of sequence {first + i}"
            raise FormatError(path, what, found=int(found[i]), wanted=int(wanted[i]), hint=CUT_OFF)
        first += len(wanted)
