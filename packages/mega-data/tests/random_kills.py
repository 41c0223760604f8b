"""Kill children at random moments of their work; a separate process of test_random_kills.

    python random_kills.py FOLDER preprocess|merge SEED COUNT

After each kill it looks at what is there; it prints how many children were killed in their work, and how
often the dataset was absent, the one before, or the new one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mega_data.inspect import verify_dataset
from mega_data.merge import merge_datasets
from mega_data.preprocess import preprocess
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedWriter, open_dataset
from mega_schema.tokenizer.tokenizer import open_tokenizer

SUFFIXES = (".bin", ".idx", ".json")
TOKENIZER = open_tokenizer("NullTokenizer", vocab_size=60000)


def files(prefix: Path) -> list[bytes]:
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in SUFFIXES]


def prepare(folder: Path, kind: str) -> Callable[[Path], object]:
    """What a child does: write a dataset to a prefix."""
    if kind == "merge":
        for name in "abc":
            with IndexedWriter(folder / name, "uint16", DatasetInfo(TOKENIZER.identity)) as writer:
                for n in range(2000):
                    writer.add([n] * (n % 60))
                    writer.end_document()
        parts = [open_dataset(folder / name) for name in "abc"]
        return lambda prefix: merge_datasets(parts, prefix, workers=2)
    text = "".join(json.dumps({"text": " ".join(map(str, range(n % 90)))}) + "\n" for n in range(2000))
    (folder / "a.jsonl").write_text(text, "utf-8")
    inputs = [folder / "a.jsonl"]
    return lambda prefix: preprocess(inputs, prefix, TOKENIZER, block=1 << 14, note=1 << 15)


def main(folder: Path, kind: str, seed: int, count: int) -> None:
    rng, work, seen = random.Random(seed), prepare(folder, kind), Counter[str]()
    (folder / "out").mkdir()
    ending = "_text_document" if kind == "preprocess" else ""
    (folder / "whole").mkdir()
    began = time.monotonic()
    work(folder / "whole/p")
    longest_wait = time.monotonic() - began
    new = files(folder / f"whole/p{ending}")
    prefix = folder / f"out/p{ending}"
    with IndexedWriter(prefix, "uint16", DatasetInfo(TOKENIZER.identity)) as writer:
        writer.add([1, 2, 3])
        writer.end_document()
    old = files(prefix)
    for _ in range(count):
        child = os.fork()
        if not child:
            work(folder / "out/p")
            os._exit(0)
        time.sleep(rng.random() * longest_wait)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        seen["killed"] += killed
        # the first run also loads code, and other processes come and go: the wait follows the time that
        # children need now
        longest_wait *= 1.1 if killed else 0.8
        if not prefix.with_name(prefix.name + ".idx").exists():
            seen["absent"] += 1
            continue
        verify_dataset(open_dataset(prefix))
        files_on_disk = files(prefix)
        assert files_on_disk in (old, new)
        seen["old" if files_on_disk == old else "new"] += 1
    work(folder / "out/p")
    assert files(prefix) == new
    output_names = {path.name for path in (folder / "out").iterdir()}
    output_names -= {path.name for path in (folder / "whole").iterdir()}
    assert not output_names, output_names
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
