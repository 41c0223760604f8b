"""Benchmark the sample index: building, loading from the cache, and reading.

    python bench/sample_index.py [--documents 1000000] [--blend 100000000] [--datasets 2000]
        [--json RESULT.json]

A corpus of a thousand tokens a document (its .bin is sparse: only its index is read), samples of 2,048
tokens, in one epoch and in three; a blend of 20 corpora whose weights fall from 0.3 to 0.002, and one whose
rarest has a millionth; small datasets named one by one; and samples read at random from a corpus in the
page cache. Where Megatron Core is installed (`pip install -r requirements-test.txt`), it does the same in
turns, and both must come to the same; the ratio is the median of ours to theirs, turn by turn: below 1 ours
is faster. Its blend is a loop of C++ that fills arrays, a gigabyte of them for 100 million samples; ours
comes in blocks, and beside it the rule runs as a loop of Python with numpy, on its first samples. Everything
is on one thread but where it says otherwise. Seconds of the processor include the kernel's; those of the wall
include that ours waits until what it keeps is on the disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mega_schema.dataset.dataset_info import sibling
from mega_schema.dataset.indexed_dataset import HEADER, MAGIC, VERSION, IndexedWriter
from mega_train.config import DataConfig
from mega_train.data.array_cache import load_or_build
from mega_train.data.blend import blend_blocks, blend_reference, normalize
from mega_train.data.blended_dataset import BlendedDataset
from mega_train.data.datasets import Datasets
from mega_train.data.sample_index import SampleIndexSpec

LENGTH = 2048  # tokens of a sample
PLAIN = 300_000  # samples that the loop is run for

THEIRS = "Megatron Core"

Results = dict[str, dict[str, Any]]
Work = Callable[[], object]


@contextmanager
def record_time(results: Results, name: str) -> Iterator[None]:
    """Measure the seconds of the block."""
    used, began = time.process_time(), time.monotonic()
    yield
    wall, used = time.monotonic() - began, time.process_time() - used
    results[name] = {"wall_seconds": round(wall, 4), "cpu_seconds": round(used, 4)}
    print(f"{used:8.3f} s of the processor {wall:8.3f} s  {name}")


class Turns:
    """Alternating measurements of ours and Megatron Core's."""

    def __init__(self, results: Results, rounds: int) -> None:
        self.results, self.rounds = results, rounds
        # asked before it is imported: it takes seconds, and warns
        is_installed = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
        self.peer: ModuleType | None = (
            importlib.import_module("megatron_sample_index") if is_installed else None
        )

    def take(
        self, name: str, build_ours: Work, build_theirs: Callable[[Any], object], clear: Work = lambda: None
    ) -> None:
        """Time both, and print the results.

        Args:
            build_theirs: is called with the module `megatron_sample_index`.
            clear: before each of them.
        """
        works: dict[str, Work] = {"ours": build_ours}
        if (peer := self.peer) is not None:
            works[THEIRS] = lambda: build_theirs(peer)
        seconds: dict[str, list[tuple[float, float]]] = {who: [] for who in works}
        for _ in range(self.rounds):
            for who, work in works.items():
                clear()
                result: Results = {}
                with record_time(result, f"{who}: {name}"):
                    work()
                ((_, measured),) = result.items()
                seconds[who].append((measured["cpu_seconds"], measured["wall_seconds"]))
        for who, all_seconds in seconds.items():
            cpu, wall = zip(*all_seconds, strict=True)
            self.results[name if who == "ours" else f"{who}: {name}"] = {
                "wall_seconds": round(statistics.median(wall), 4),
                "cpu_seconds": round(statistics.median(cpu), 4),
                "all_cpu_seconds": cpu,
            }
        if len(works) == 2:
            pairs = list(zip(seconds["ours"], seconds[THEIRS], strict=True))
            cpu, wall = (
                round(statistics.median(ours[k] / max(theirs[k], 1e-4) for ours, theirs in pairs), 3)
                for k in (0, 1)
            )
            self.results[name] |= {"cpu_ratio": cpu, "wall_ratio": wall}
            print(f"{cpu:8.2f} x               {wall:14.2f} x  ours to theirs: {name}\n")


def sparse(prefix: Path, documents: int) -> int:
    """Write a dataset of documents of 200 to 1,800 tokens without payload; return the number of tokens."""
    lengths = np.random.default_rng(7).integers(200, 1801, documents).astype("<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8") * 2])
    with sibling(prefix, ".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        for array in (lengths, pointers.astype("<i8"), np.arange(documents + 1, dtype="<i8")):
            file.write(array.tobytes())
    tokens = int(lengths.sum(dtype=np.int64))
    with sibling(prefix, ".bin").open("wb") as file:
        file.truncate(2 * tokens)
    return tokens


def write_dataset(prefix: Path, documents: int, rng: np.random.Generator) -> str:
    """Write a dataset with tokens."""
    ids = rng.integers(0, 50_000, 1 << 20, dtype=np.uint16)
    with IndexedWriter(prefix, np.uint16) as out:
        for begin in rng.integers(0, len(ids) - 2000, documents):
            out.add(ids[begin : begin + 200 + begin % 1600])
            out.end_document()
    return str(prefix)


def indices(folder: Path, documents: int, turns: Turns) -> int:
    """Build, cache and load the index of one large dataset."""
    tokens, name = sparse(folder / "large", documents), str(folder / "large")

    def open_datasets() -> Datasets:
        return Datasets.open(DataConfig(path=(name,), split="1,0,0"))

    turns.take("open a corpus", open_datasets, lambda peer: peer.open_dataset(name))
    corpora, cache = open_datasets(), folder / "kept"
    their_corpus = turns.peer and turns.peer.open_dataset(name)
    for epochs in (1, 3):
        samples = (epochs * tokens - LENGTH) // LENGTH

        def stream(samples: int = samples) -> BlendedDataset[np.ndarray]:
            recipe = SampleIndexSpec.from_source(
                corpora.spec.training, corpora, length=LENGTH, samples=samples, seed=1234
            )
            return recipe.open_dataset(load_or_build([cache], "training", recipe.cache_key(), recipe.write))

        def build_theirs(peer: Any, samples: int = samples) -> Any:
            return peer.build_index(their_corpus, samples, LENGTH, folder / "theirs")

        def clear() -> None:
            shutil.rmtree(cache, ignore_errors=True)
            shutil.rmtree(folder / "theirs", ignore_errors=True)

        turns.take(f"make and keep its index, epochs {epochs}", stream, build_theirs, clear)
        stream()  # the last turn left theirs alone
        turns.take(f"find it again, epochs {epochs}", stream, build_theirs)
        stream_of_run = stream()
        if turns.peer is not None:
            index, their_index = stream_of_run.parts[0].index, build_theirs(turns.peer)
            for array in ("document", "sample", "shuffle"):
                np.testing.assert_array_equal(getattr(index, array), getattr(their_index, f"{array}_index"))
        print(f"{len(stream_of_run):,} samples of {tokens:,} tokens\n")
    return tokens


def blends(size: int, turns: Turns) -> None:
    """Choose the datasets of `size` samples, and of a few with the reference loop."""
    falling = normalize(list(np.geomspace(0.3, 0.002, 20)))
    rare = normalize([*np.geomspace(0.3, 0.002, 18), 1e-5, 1e-6])
    for name, shares in (("20 corpora", falling), ("20 corpora, two of them rare", rare)):

        def choose(shares: Any = shares) -> None:
            for _ in blend_blocks(shares, size):
                pass

        def build_theirs(peer: Any, shares: Any = shares) -> None:
            peer.choices(shares, size)

        turns.take(f"blend {size:,} samples of {name}", choose, build_theirs)
        if turns.peer is not None:
            chosen = np.concatenate([corpus for corpus, _ in blend_blocks(shares, PLAIN)])
            np.testing.assert_array_equal(chosen, turns.peer.choices(shares, PLAIN))
    with record_time(turns.results, f"the loop, {PLAIN:,} samples of 20 corpora"):
        blend_reference(falling, 0, PLAIN, np.zeros(20))


def many(folder: Path, datasets: int, turns: Turns) -> None:
    """Open many small datasets, on one thread and on eight, and index them."""
    rng = np.random.default_rng(7)
    names = [write_dataset(folder / f"part-{number:05d}", 20, rng) for number in range(datasets)]

    def open_datasets(threads: int = 8) -> Datasets:
        return Datasets.open(DataConfig(path=tuple(names), split="1,0,0", threads=threads))

    for threads in (1, 8, 1, 8):
        with record_time(turns.results, f"open {datasets:,} datasets, threads {threads}"):
            open_datasets(threads)

    def build_ours() -> BlendedDataset[np.ndarray]:
        corpora = open_datasets()
        recipe = SampleIndexSpec.from_source(
            corpora.spec.training, corpora, length=64, samples=10**6, seed=1234
        )
        return recipe.open_dataset(
            load_or_build([folder / "kept"], "training", recipe.cache_key(), recipe.write)
        )

    def build_theirs(peer: Any) -> Any:
        return peer.open_all(names, 10**6, 64, folder / "theirs", 8)

    def clear() -> None:
        for left in ("kept", "theirs"):
            shutil.rmtree(folder / left, ignore_errors=True)

    turns.take(f"open, index and keep {datasets:,} datasets, threads 8", build_ours, build_theirs, clear)
    stream = build_ours()
    turns.take("open them and find their index again, threads 8", build_ours, build_theirs)
    if turns.peer is not None:
        assert stream.order is not None
        np.testing.assert_array_equal(stream.order[0], build_theirs(turns.peer).dataset_index)


def sample_rates(folder: Path, turns: Turns) -> dict[str, float]:
    """Measure samples per second with the index, from a dataset in the page cache."""
    name, count = write_dataset(folder / "read", 50_000, np.random.default_rng(7)), 10_000
    corpora = Datasets.open(DataConfig(path=(name,), split="1,0,0"))
    recipe = SampleIndexSpec.from_source(
        corpora.spec.training, corpora, length=LENGTH, samples=20_000, seed=1234
    )
    stream = recipe.open_dataset(
        load_or_build([folder / "kept"], "training", recipe.cache_key(), recipe.write)
    )
    their_dataset = turns.peer and turns.peer.build_index(
        turns.peer.open_dataset(name), 20_000, LENGTH, folder / "theirs"
    )

    def build_ours() -> None:
        for i in range(count):
            stream[i]

    def build_theirs(peer: Any) -> None:
        for i in range(count):
            peer.sample(their_dataset, i)

    build_ours()
    title = f"read {count:,} samples of {LENGTH} tokens"
    turns.take(title, build_ours, build_theirs)
    if turns.peer is not None:
        np.testing.assert_array_equal(stream[7], turns.peer.sample(their_dataset, 7))
    seconds_per_sample = turns.results[title]["cpu_seconds"] / count
    return {
        "microseconds": round(1e6 * seconds_per_sample, 1),
        "tokens_per_second": round(LENGTH / seconds_per_sample),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--blend", type=int, default=100_000_000)
    parser.add_argument("--datasets", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--note", default="", help="of the machine, for the result")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: Results = {}
    turns = Turns(results, args.rounds)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        tokens = indices(folder, args.documents, turns)
        rate = sample_rates(folder, turns)
        many(folder, args.datasets, turns)
    blends(args.blend, turns)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine + (f", {args.note}" if args.note else ""),
        "tokens": tokens,
        "documents": args.documents,
        "peer": None if turns.peer is None else f"megatron-core {version('megatron-core')}",
        "seconds": results,
        "a_sample_is_read_in": rate,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
