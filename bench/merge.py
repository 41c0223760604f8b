"""Benchmark merging datasets against `cat` and `cp` of the same bytes, in one run.

    python bench/merge.py [--megabytes 400] [--datasets 8] [--workers 1] [--json RESULT.json]

Each writes a new file from the same `.bin` files, which lie in the page cache; ours also checks and writes
the index. `cat` of all .bin files and .idx files together is the least that a merge could do; `cp` copies one
file of as many bytes, in the kernel where it can, as ours does. The variants take turns; what is written goes
to the disk before the clock stops. Seconds of the processor are of the whole variant, the kernel's included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from mega_data.merge import merge_datasets
from mega_schema.dataset.indexed_dataset import IndexedDataset, IndexedWriter

REPEATS = 7
SEQUENCE = 700  # tokens of a document, about a page


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def make_datasets(folder: Path, megabytes: int, datasets: int) -> list[Path]:
    """Write datasets of about this total size, and return their prefixes."""
    rng, prefixes = np.random.default_rng(7), []
    documents = megabytes * 1_000_000 // (2 * SEQUENCE * datasets)
    ids = rng.integers(0, 50_000, SEQUENCE * 1000, dtype=np.uint16)
    for number in range(datasets):
        prefix = folder / f"part-{number}"
        with IndexedWriter(prefix, np.uint16) as writer:
            for document in range(documents):
                begin = document % 999 * SEQUENCE
                writer.add(ids[begin : begin + SEQUENCE])
                writer.end_document()
        prefixes.append(prefix)
    return prefixes


def measure(
    variants: dict[str, Callable[[], object]], clear: Callable[[], None]
) -> dict[str, dict[str, object]]:
    """Measure wall and CPU seconds of each variant, alternately."""
    wall: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(REPEATS):
        for name, work in variants.items():
            clear()
            os.sync()
            began, used = time.monotonic(), cpu_seconds()
            work()
            os.sync()
            wall[name].append(time.monotonic() - began)
            processor[name].append(cpu_seconds() - used)
    return {
        name: {
            "wall_seconds": [round(second, 3) for second in wall[name]],
            "cpu_seconds": [round(second, 3) for second in processor[name]],
            "wall_median": round(statistics.median(wall[name]), 3),
            "cpu_median": round(statistics.median(processor[name]), 3),
        }
        for name in variants
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--datasets", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        prefixes = make_datasets(folder, args.megabytes, args.datasets)
        out, payload = folder / "out", sum(Path(f"{p}.bin").stat().st_size for p in prefixes)
        parts = [f"{prefix}{suffix}" for suffix in (".bin", ".idx") for prefix in prefixes]
        merge_datasets([IndexedDataset(prefix) for prefix in prefixes], folder / "whole")

        def shell(command: str) -> Callable[[], object]:
            return lambda: subprocess.run(command, shell=True, check=True)

        def clear() -> None:
            for path in folder.glob("out*"):
                path.unlink()

        quoted = shlex.quote(str(out))
        variants: dict[str, Callable[[], object]] = {
            "mega-data merge": lambda: merge_datasets(
                [IndexedDataset(prefix) for prefix in prefixes], out, workers=args.workers
            ),
            "cat": shell(f"cat {' '.join(map(shlex.quote, parts))} > {quoted}"),
            "cp": shell(f"cp {shlex.quote(str(folder / 'whole.bin'))} {quoted}"),
        }
        results = measure(variants, clear)
    ours = results["mega-data merge"]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "payload_MB": round(payload / 1e6, 1),
        "datasets": args.datasets,
        "workers": args.workers,
        **results,
        "ratio_to_cat": {
            kind: round(float(str(ours[kind])) / float(str(results["cat"][kind])), 2)
            for kind in ("wall_median", "cpu_median")
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
