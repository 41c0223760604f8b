"""HashKernels that hash shingles: in C++ where a compiler is installed, otherwise in numpy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from mega_data.dedup.kernels import reference
from mega_data.dedup.kernels.cpp import CppKernels
from mega_data.dedup.kernels.reference import Keys, Numbers
from mega_schema.cpp_library import CompileError

log = logging.getLogger("mega.data")


@dataclass(frozen=True, slots=True)
class HashKernels:
    """Functions with the arguments and results of those in `reference`."""

    hash_words: Callable[..., tuple[Numbers, Keys]]
    shingle_keys: Callable[..., Keys]
    update_smallest: Callable[..., None]
    fill_empty: Callable[[Keys], None]


REFERENCE = HashKernels(
    reference.hash_words, reference.shingle_keys, reference.update_smallest, reference.fill_empty
)


@cache
def load_kernels() -> HashKernels:
    """Return the fastest kernels of this machine; the first call on a machine compiles them in a second."""
    try:
        cpp = CppKernels()
    except CompileError as error:
        log.info("dedup hashes with numpy: %s", error)
        return REFERENCE
    return HashKernels(cpp.hash_words, cpp.shingle_keys, cpp.update_smallest, cpp.fill_empty)
