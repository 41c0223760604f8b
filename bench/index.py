"""The order of samples: how long it takes to make, to find again, and to read by.

    python bench/index.py [--documents 1000000] [--blend 100000000] [--datasets 2000] [--json RESULT.json]

A corpus of a thousand tokens a document (its .bin is sparse: only its index is read), samples of 2,048
tokens, in one epoch and in three; a blend of 20 corpora whose weights fall from 0.3 to 0.002, and one whose
rarest has a millionth; small datasets named one by one; and samples read at random from a corpus in the
page cache. Beside the blend runs the rule as a loop of Python with numpy, on its first samples. Everything
is on one thread but where it says otherwise. Seconds of the processor include the kernel's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from mega_schema.dataset_info import beside
from mega_schema.indexed import HEADER, MAGIC, VERSION, IndexedWriter
from mega_train.config import Data
from mega_train.data.blend import blend_blocks, normalised, plain
from mega_train.data.corpora import Corpora
from mega_train.data.index import Recipe, Stream
from mega_train.data.kept import kept

LENGTH = 2048  # tokens of a sample
PLAIN = 300_000  # samples that the loop is run for

Found = dict[str, dict[str, float]]


@contextmanager
def timed(found: Found, name: str) -> Iterator[None]:
    """Seconds of what is inside."""
    times, began = os.times(), time.monotonic()
    yield
    now = os.times()
    used = now.user + now.system - times.user - times.system
    found[name] = {"wall_seconds": round(time.monotonic() - began, 3), "cpu_seconds": round(used, 3)}
    print(
        f"{found[name]['cpu_seconds']:8.2f} s of the processor {found[name]['wall_seconds']:8.2f} s  {name}"
    )


def sparse(prefix: Path, documents: int) -> int:
    """A dataset of so many documents of 200 to 1,800 tokens, without them; returns how many they are."""
    lengths = np.random.default_rng(7).integers(200, 1801, documents).astype("<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8") * 2])
    with beside(prefix, ".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        for array in (lengths, pointers.astype("<i8"), np.arange(documents + 1, dtype="<i8")):
            file.write(array.tobytes())
    tokens = int(lengths.sum(dtype=np.int64))
    with beside(prefix, ".bin").open("wb") as file:
        file.truncate(2 * tokens)
    return tokens


def written(prefix: Path, documents: int, rng: np.random.Generator) -> str:
    """A dataset with tokens in it."""
    ids = rng.integers(0, 50_000, 1 << 20, dtype=np.uint16)
    with IndexedWriter(prefix, np.uint16) as out:
        for at in rng.integers(0, len(ids) - 2000, documents):
            out.add(ids[at : at + 200 + at % 1600])
            out.end_document()
    return str(prefix)


def indices(folder: Path, documents: int, found: Found) -> int:
    """Open, make, keep and find again the index of one large corpus."""
    tokens = sparse(folder / "large", documents)
    with timed(found, "open a corpus"):
        corpora = Corpora.open(Data(path=(str(folder / "large"),), split="1,0,0"))
    for epochs in (1, 3):
        samples = (epochs * tokens - LENGTH) // LENGTH

        def stream(samples: int = samples) -> Stream:
            recipe = Recipe.of(corpora.sources.training, corpora, length=LENGTH, samples=samples, seed=1234)
            return recipe.opened(kept([folder / "kept"], "training", recipe.values(), recipe.write))

        with timed(found, f"make and keep its index, epochs {epochs}"):
            made = stream()
        with timed(found, f"find it again, epochs {epochs}"):
            stream()
        print(f"{len(made):,} samples of {tokens:,} tokens")
    return tokens


def blends(size: int, found: Found) -> None:
    """Choose the corpora of `size` samples, and of a few with the loop."""
    falling = normalised(list(np.geomspace(0.3, 0.002, 20)))
    rare = normalised([*np.geomspace(0.3, 0.002, 18), 1e-5, 1e-6])
    for name, shares in (("20 corpora", falling), ("20 corpora, two of them rare", rare)):
        with timed(found, f"blend {size:,} samples of {name}"):
            for _ in blend_blocks(shares, size):
                pass
    with timed(found, f"the loop, {PLAIN:,} samples of 20 corpora"):
        plain(falling, 0, PLAIN, np.zeros(20))


def many(folder: Path, datasets: int, found: Found) -> None:
    """Open many small datasets, on one thread and on eight, and index them."""
    rng = np.random.default_rng(7)
    names = [written(folder / f"part-{number:05d}", 20, rng) for number in range(datasets)]
    for threads in (1, 8, 1, 8):
        with timed(found, f"open {datasets:,} datasets, threads {threads}"):
            corpora = Corpora.open(Data(path=tuple(names), split="1,0,0", threads=threads))
    with timed(found, f"make and keep the index of {datasets:,} datasets"):
        recipe = Recipe.of(corpora.sources.training, corpora, length=64, samples=10**6, seed=1234)
        kept([folder / "kept"], "training", recipe.values(), recipe.write)


def reading(folder: Path, found: Found) -> dict[str, float]:
    """Samples a second by the index, from a corpus in the page cache."""
    name = written(folder / "read", 50_000, np.random.default_rng(7))
    corpora = Corpora.open(Data(path=(name,), split="1,0,0"))
    recipe = Recipe.of(corpora.sources.training, corpora, length=LENGTH, samples=20_000, seed=1234)
    stream = recipe.opened(kept([folder / "kept"], "training", recipe.values(), recipe.write))
    count = 10_000
    read: Callable[[], object] = lambda: [stream[i] for i in range(count)] and None  # noqa: E731
    read()
    with timed(found, f"read {count:,} samples of {LENGTH} tokens"):
        read()
    each = found[f"read {count:,} samples of {LENGTH} tokens"]["cpu_seconds"] / count
    return {"microseconds": round(1e6 * each, 1), "tokens_per_second": round(LENGTH / each)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--blend", type=int, default=100_000_000)
    parser.add_argument("--datasets", type=int, default=2000)
    parser.add_argument("--note", default="", help="of the machine, for the result")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: Found = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        tokens = indices(folder, given.documents, found)
        each = reading(folder, found)
        many(folder, given.datasets, found)
    blends(given.blend, found)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine + (f", {given.note}" if given.note else ""),
        "tokens": tokens,
        "documents": given.documents,
        "seconds": found,
        "a_sample_is_read_in": each,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
