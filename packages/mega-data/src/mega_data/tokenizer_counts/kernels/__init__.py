"""The trainer of byte pairs in C++."""

from __future__ import annotations

from ctypes import POINTER, byref, c_char_p, c_int32, c_long, c_void_p
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_schema.cpp_library import PORTABLE_FLAGS, load_library


class BytePairKernel:
    """The C++ trainer of this folder.

    Raises:
        CompileError: it cannot be compiled on this machine.
    """

    def __init__(self) -> None:
        library = load_library(str(Path(__file__).parent), PORTABLE_FLAGS)
        self._train = library.mega_train_byte_pairs
        self._train.argtypes = [c_char_p, c_void_p, c_long, c_void_p, c_void_p, c_void_p, c_long, c_long]
        self._train.argtypes.append(POINTER(POINTER(c_int32)))
        self._train.restype = c_long
        self._free = library.mega_free_merges
        self._free.argtypes = [POINTER(c_int32)]
        self._free.restype = None

    def train(
        self,
        tokens: list[str],
        symbols: NDArray[np.int32],
        ends: NDArray[np.int64],
        counts: NDArray[np.int64],
        vocab_size: int,
    ) -> list[tuple[int, int, int]]:
        """Return the merges, see `byte_pairs.train_reference`."""
        names = [token.encode("utf-8") for token in tokens]
        token_ends = np.array([*accumulate(map(len, names))], np.int64)
        letters = np.array(symbols, np.int32)  # a copy: the trainer overwrites it
        arrays = [array.ctypes.data for array in (letters, ends, counts)]
        merges = POINTER(c_int32)()
        count = self._train(
            b"".join(names), token_ends.ctypes.data, len(names), *arrays, len(ends), vocab_size, byref(merges)
        )
        if count < 0:
            raise MemoryError
        try:
            rows = np.ctypeslib.as_array(merges, (count, 3)).tolist() if count else []
        finally:
            self._free(merges)
        return [(left, right, token) for left, right, token in rows]
