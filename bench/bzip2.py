"""Read a bz2 file with mega-data's reader, Python's and indexed_bzip2, on one core, in one run.

    python bench/bzip2.py CORPUS.jsonl [--rounds 5] [--json RESULT]

Three tasks, as `mega-data extract` has them: the whole file; from an offset at three quarters of the file,
where a task of several begins; and a file with one damaged block. The readers take turns; medians of the
wall. A reader that cannot do a task is listed with its error or with the bytes that it returned.
"""

from __future__ import annotations

import argparse
import bz2
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import indexed_bzip2

from mega_data.readers.bzip2 import read_bzip2
from mega_data.readers.compression import DamagedRange

BLOCK = 1 << 20


def read_ours(path: Path, start: int) -> int:
    """Return the number of bytes of text from the first block at or after a compressed offset."""
    pieces = (piece for piece in read_bzip2(path, start) if not isinstance(piece, DamagedRange))
    return sum(len(piece.data) for piece in pieces)


def read_python(path: Path, start: int) -> int:
    """Decompress from the beginning: Python's reader has no other place to start."""
    with bz2.open(path) as file:
        return sum(len(block) for block in iter(lambda: file.read(BLOCK), b""))


def read_indexed(path: Path, start: int) -> int:
    """Index the blocks, which decompresses the whole file, and seek to the first at or after `start`."""
    with indexed_bzip2.open(str(path), parallelization=1) as file:
        if start:
            offsets = file.raw.bz2reader.block_offsets()  # bits in the file -> bytes of text
            file.seek(min(text for bit, text in offsets.items() if bit >= 8 * start))
        return sum(len(block) for block in iter(lambda: file.read(BLOCK), b""))


READERS: dict[str, Callable[[Path, int], int]] = {
    "mega-data": read_ours,
    "bz2": read_python,
    "indexed_bzip2": read_indexed,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        whole, damaged = Path(temporary) / "whole.bz2", Path(temporary) / "damaged.bz2"
        compressed = bytearray(bz2.compress(arguments.corpus.read_bytes()))
        whole.write_bytes(compressed)
        compressed[len(compressed) // 2] ^= 0xFF
        damaged.write_bytes(compressed)
        tasks = {"whole": (whole, 0), "from 3/4": (whole, 3 * len(compressed) // 4), "damaged": (damaged, 0)}
        result: dict[str, Any] = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            "text bytes": arguments.corpus.stat().st_size,
            "compressed bytes": len(compressed),
        }
        for task, (path, start) in tasks.items():
            result[task] = measure(path, start, arguments.rounds)
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(path: Path, start: int, rounds: int) -> dict[str, dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in READERS}
    outcomes: dict[str, Any] = {}
    for _ in range(rounds):
        for name, read in READERS.items():
            begin = time.perf_counter()
            try:
                outcomes[name] = read(path, start)
            except Exception as error:  # a reader that stops at damage
                outcomes[name] = f"{type(error).__name__}: {error}"
            seconds[name].append(time.perf_counter() - begin)
    return {
        name: {"seconds": round(statistics.median(seconds[name]), 3), "bytes or error": outcomes[name]}
        for name in READERS
    }


if __name__ == "__main__":
    main()
