"""Benchmark `mega-data dedup` on generated corpora of several sizes, and estimate larger ones.

    python bench/dedup_scale.py FOLDER --gigabytes 2 5 20 [--workers 2] [--json RESULT]
    python bench/dedup_scale.py --estimate --gigabytes 10000 --documents 4e9 --shards 90000 [--memory 4096]

Corpora are .jsonl.zst shards of 64 MB of text in FOLDER. Document i is made of phrases by a generator that is
seeded with i; three of ten documents copy an earlier one and replace up to 5 % of its phrases. FOLDER needs
about 0.6 bytes per byte of text of the largest corpus, for its shards, keys and output; each corpus is
removed after its run. Bytes read and CPU seconds are those of all processes of a stage, their start included;
memory is the largest sum of PSS over the processes. With `--estimate` nothing is run: the bytes, files and
tasks of each stage follow from `mega_data.dedup.io_estimate`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from mega_data.dedup.io_estimate import StageIO, estimate_io
from mega_data.dedup.presets import PRESETS

SHARD_BYTES = 64_000_000  # of text
PHRASES = 50_000
COPIED = 0.3
STAGES = ("keys", "sort", "pairs", "groups", "filter")


def make_vocabulary() -> np.ndarray[Any, Any]:
    """Return phrases of three words each: text of them compresses to a fifth or less."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvk"))
    sizes = rng.integers(2, 10, PHRASES)
    words = ["".join(letters[(len(letters) * rng.random(size) ** 1.5).astype(int)]) for size in sizes]
    triples = rng.integers(0, PHRASES, (PHRASES, 3)).tolist()
    return np.array([" ".join(words[place] for place in triple) for triple in triples], dtype=object)


def original_of(number: int) -> int:
    """Return the document that a document copies; itself if it copies none."""
    rng = np.random.default_rng([2, number])
    return original_of(int(rng.integers(number))) if number and rng.random() < COPIED else number


def make_text(number: int, vocabulary: np.ndarray[Any, Any]) -> str:
    original = original_of(number)
    rng = np.random.default_rng([1, original])
    count = int(rng.lognormal(4.7, 0.9)) + 4
    phrases = (PHRASES * rng.random(count) ** 3).astype(np.int64)
    if original != number:
        rng = np.random.default_rng([3, number])
        places = rng.integers(0, count, int(0.05 * rng.random() * count))
        phrases[places] = rng.integers(0, PHRASES, len(places))
    return " ".join(vocabulary[phrases].tolist())


def write_shard(folder: Path, shards: int, shard: int) -> tuple[int, int]:
    """Write a shard; return its bytes of text and its documents, which are every `shards`-th one."""
    vocabulary = make_vocabulary()
    size = count = 0
    path = folder / f"{shard:05d}.jsonl.zst"
    with path.open("wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as out:
        while size < SHARD_BYTES:
            line = json.dumps({"text": make_text(shard + count * shards, vocabulary)}).encode() + b"\n"
            out.write(line)
            size += len(line)
            count += 1
    return size, count


def make_corpus(folder: Path, gigabytes: float, workers: int) -> tuple[int, int]:
    """Write the shards of a corpus; return its bytes of text and its documents."""
    folder.mkdir(parents=True)
    shards = max(1, round(gigabytes * 1e9 / SHARD_BYTES))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        written = [*pool.map(partial(write_shard, folder, shards), range(shards))]
    return sum(size for size, _ in written), sum(count for _, count in written)


def processes_below(parent: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield parent
    with suppress(OSError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from processes_below(int(child))


def sum_pss(parent: int) -> int:
    """Return the proportional set size of a process and its descendants, in bytes."""
    total = 0
    for process in [*processes_below(parent)]:
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def bytes_of_children() -> int:
    """Return the bytes that this process and the processes that it waited for have read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def measure(command: list[str]) -> dict[str, Any]:
    """Run a command; return its wall seconds, CPU seconds, bytes read and peak memory."""
    cpu, read, began = cpu_of_children(), bytes_of_children(), time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    ended = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.5):
            peak = max(peak, sum_pss(process.pid))

    sampler = threading.Thread(target=sample)
    sampler.start()
    code = process.wait()
    wall = time.monotonic() - began
    ended.set()
    sampler.join()
    if code:
        raise SystemExit(f"exit code {code}: {' '.join(command)}")
    return {
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(cpu_of_children() - cpu, 2),
        "read_bytes": bytes_of_children() - read,
        "peak_MB": round(peak / 1e6),
    }


def measure_size(folder: Path, gigabytes: float, options: argparse.Namespace) -> dict[str, Any]:
    corpus, output, work = folder / "corpus", folder / "out", folder / "work"
    size, documents = make_corpus(corpus, gigabytes, options.workers)
    corpus_bytes = sum(file.stat().st_size for file in corpus.iterdir())
    command = [sys.executable, "-m", "mega_data", "dedup", "--input", str(corpus), "--output", str(output)]
    command += ["--work-dir", str(work), "--preset", options.preset, "--workers", str(options.workers)]
    command += ["--memory", str(options.memory), "--output-format", "jsonl.zst"]
    stages = {stage: measure([*command, "--stage", stage]) for stage in STAGES}
    work_bytes = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    stages["publish"] = measure(command)
    counts = [json.loads(file.read_bytes()) for file in (work / "done/filter").iterdir()]
    shutil.rmtree(folder)
    wall = sum(stage["wall_seconds"] for stage in stages.values())
    cpu = sum(stage["cpu_seconds"] for stage in stages.values())
    return {
        "text_GB": round(size / 1e9, 3),
        "documents": documents,
        "kept": sum(count["kept"] for count in counts),
        "corpus_GB": round(corpus_bytes / 1e9, 3),
        "work_GB": round(work_bytes / 1e9, 3),
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "MB_per_cpu_second": round(size / cpu / 1e6, 2),
        "MB_per_wall_second": round(size / wall / 1e6, 2),
        "peak_MB": max(stage["peak_MB"] for stage in stages.values()),
        "keys_bytes": 8 * PRESETS[options.preset].bands * documents,
        "stages": stages,
    }


def print_estimate(gigabytes: float, options: argparse.Namespace) -> list[StageIO]:
    shard_bytes = [round(gigabytes * 1e9 / options.shards)] * options.shards
    documents = round(options.documents)
    dropped = round(options.dropped * documents)
    kept_bytes = round((1 - options.dropped) * sum(shard_bytes))
    stages = estimate_io(
        shard_bytes,
        documents,
        PRESETS[options.preset],
        options.memory << 20,
        pairs=round(options.pairs * documents),
        dropped=dropped,
        output_bytes=kept_bytes,
    )
    print(f"{gigabytes:,g} GB, {documents:,} documents, --memory {options.memory} MiB")
    print(f"{'stage':8} {'tasks':>9} {'files':>9} {'read GB':>12} {'written GB':>12}")
    for stage in stages:
        amounts = f"{stage.read_bytes / 1e9:12,.3f} {stage.written_bytes / 1e9:12,.3f}"
        print(f"{stage.name:8} {stage.tasks:9,} {stage.files:9,} {amounts}")
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="for the corpora; must not exist")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0], help="of text")
    parser.add_argument("--preset", choices=["datatrove", "exact"], default="datatrove")
    parser.add_argument("--memory", type=int, default=256, help="MiB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--documents", type=float, default=4e9)
    parser.add_argument("--shards", type=int, default=90_000)
    parser.add_argument("--dropped", type=float, default=0.3, help="share of the documents")
    parser.add_argument("--pairs", type=float, default=3.0, help="per document, of all bands together")
    options = parser.parse_args()
    if options.estimate:
        for gigabytes in options.gigabytes:
            print_estimate(gigabytes, options)
        return
    if options.folder is None or options.folder.exists():
        parser.error(f"FOLDER must be a new folder: found {options.folder}")
    sizes = list[dict[str, Any]]()
    for gigabytes in options.gigabytes:
        sizes.append(measure_size(options.folder, gigabytes, options))
        print(json.dumps(sizes[-1], indent=1), flush=True)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "preset": options.preset,
        "memory_MiB": options.memory,
        "workers": options.workers,
        "rate_of_last_over_first": round(sizes[-1]["MB_per_cpu_second"] / sizes[0]["MB_per_cpu_second"], 3),
        "sizes": sizes,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
