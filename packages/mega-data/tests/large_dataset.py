"""Process a dataset larger than the allowed memory; a separate process of test_large_dataset.

    python large_dataset.py FOLDER

Data that is not mapped from a file counts as memory.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np

from mega_data.inspect import summarize, verify_dataset
from mega_data.length_histogram import histogram
from mega_data.merge import merge_datasets
from mega_schema.dataset.indexed_dataset import IndexedWriter, open_dataset, sibling

MEMORY = 64 << 20  # bytes more than when the work begins
SEQUENCES, TOKENS = 3_000_000, 30  # of all, and of each: 84 MB of index, 180 MB of ids


def main(folder: Path) -> None:
    lengths, ids = np.full(100_000, TOKENS, np.int32), np.zeros(100_000 * TOKENS, np.uint16)
    size = sum(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text("utf-8").splitlines()
        if line.startswith("VmData:")
    )
    resource.setrlimit(resource.RLIMIT_DATA, (size + MEMORY, size + MEMORY))
    with IndexedWriter(folder / "p", "uint16") as writer:
        for _ in range(SEQUENCES // len(lengths)):
            writer.extend(ids, lengths)
    data = open_dataset(folder / "p")
    assert sibling(folder / "p", ".bin").stat().st_size > 2 * MEMORY
    assert summarize(data).lengths == (TOKENS,) * 7
    assert sum(histogram(data).documents) == SEQUENCES
    verify_dataset(data, 1)
    merge_datasets([data, data], folder / "twice", workers=2)
    merge_datasets([data], folder / "wide", index_format="cached", dtype=np.dtype("int32"), workers=2)
    sizes = [sibling(folder / name, ".bin").stat().st_size for name in ("twice", "wide")]
    assert sizes == [4 * SEQUENCES * TOKENS, 4 * SEQUENCES * TOKENS]
    try:
        np.ones(2 * MEMORY, np.uint8)
    except MemoryError:
        return
    raise AssertionError("the limit does not hold")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
