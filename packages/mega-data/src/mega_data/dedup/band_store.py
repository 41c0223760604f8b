"""The band keys of a shard in one file, of which one band can be read alone.

    block 0: up to 2^16 documents   band 0: u64 of each document | band 1 | ...
    block 1: ...

Blocks are full but for the last, so the size of the file says how many documents there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_data.jsonl_shards import writing

Numbers = NDArray[np.uint64]
BLOCK = 1 << 16  # documents


@contextmanager
def writing_columns(path: Path, columns: int) -> Iterator[Callable[[Numbers], None]]:
    """What to call with (n, columns) numbers of documents that come next; at the end the file is whole."""
    held, count = list[Numbers](), 0
    with writing(path) as out:

        def put(rows: Numbers) -> None:
            out.write(np.ascontiguousarray(rows.T, "<u8").data)

        def add(rows: Numbers) -> None:
            nonlocal count
            held.append(rows)
            count += len(rows)
            if count >= BLOCK:
                joined = np.concatenate(held)
                whole = count // BLOCK * BLOCK
                for at in range(0, whole, BLOCK):
                    put(joined[at : at + BLOCK])
                held[:], count = [joined[whole:]], count - whole

        yield add
        if count:
            put(np.concatenate(held))


def documents(path: Path, columns: int) -> int:
    """How many a file has."""
    return path.stat().st_size // (8 * columns)


def column(path: Path, number: int, columns: int) -> Iterator[Numbers]:
    """One column, in blocks."""
    count = documents(path, columns)
    with path.open("rb") as file:
        for at in range(0, count, BLOCK):
            rows = min(BLOCK, count - at)
            file.seek(8 * (at * columns + number * rows))
            yield np.frombuffer(file.read(8 * rows), "<u8")


def picked(path: Path, number: int, columns: int, places: NDArray[Any]) -> Numbers:
    """The numbers of some documents in one column."""
    count = documents(path, columns)
    begins = places.astype(np.int64) // BLOCK * BLOCK
    rows = np.minimum(BLOCK, count - begins)
    at = begins * columns + number * rows + places.astype(np.int64) - begins
    found: Numbers = np.memmap(path, "<u8", "r")[at]
    return found
