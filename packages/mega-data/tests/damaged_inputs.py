"""Open many damaged inputs with little memory; a separate process of test_damaged_inputs.

    python damaged_inputs.py FOLDER datasets|lines SEED COUNT

It prints how many inputs were refused, and how many were still whole. Anything but a refusal is a traceback.
"""

from __future__ import annotations

import json
import random
import re
import resource
import sys
from pathlib import Path

import pytest

from mega_data.inspect import verify_dataset
from mega_data.length_histogram import histogram
from mega_data.preprocess import Options, preprocess
from mega_schema.dataset.indexed_dataset import (
    INDEX_FORMATS,
    DatasetInfo,
    IndexedDataset,
    IndexedWriter,
    open_dataset,
)
from mega_schema.errors import MegaError
from mega_schema.tokenizer.tokenizer import open_tokenizer

MEMORY = 256 << 20  # bytes more than when the work begins
NUMBERS = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(whole: bytes, rng: random.Random) -> bytes:
    """Damage the bytes one to three times: flipped bits, truncation, a wrong count, inserted bytes."""
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        position, kind = rng.randrange(len(data) + 1), rng.randrange(6)
        if kind == 0 and data:
            data[position % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[position % len(data)] = rng.randrange(256)
        elif kind == 2:
            del data[position:]
        elif kind == 3:
            data[position : position + 8] = rng.choice(NUMBERS).to_bytes(8, "little")
        elif kind == 4:
            data[position:position] = rng.randbytes(rng.randrange(1, 20))
        else:
            del data[position : position + rng.randrange(1, 20)]
    return bytes(data)


def datasets(folder: Path, rng: random.Random, count: int) -> tuple[int, int]:
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=50)
    wholes = {}
    for form in INDEX_FORMATS:
        with IndexedWriter(
            folder / form, "int32", DatasetInfo(tokenizer.identity), index_format=form
        ) as writer:
            for length in (3, 0, 1, 7):
                writer.add(range(length))
                writer.add(range(2))
                writer.end_document()
            writer.end_document()
        for suffix in (".idx", ".bin", ".json"):
            wholes[form, suffix] = (folder / f"{form}{suffix}").read_bytes()
    refused = 0
    for _ in range(count):
        (form, suffix), whole = rng.choice([*wholes.items()])
        path = folder / f"{form}{suffix}"
        path.write_bytes(mutate(whole, rng))
        try:
            read_all(open_dataset(folder / form))
        except MegaError:
            refused += 1
        path.write_bytes(whole)
    return refused, count - refused


def read_all(data: IndexedDataset) -> None:
    verify_dataset(data)
    histogram(data)
    for i in range(len(data)):
        assert len(data[i]) == data.lengths[i]


def lines(folder: Path, rng: random.Random, count: int) -> tuple[int, int]:
    """Encode JSON lines, 100 at a time; skipped lines are in the quarantine, all others in the dataset."""
    tokenizer, refused, kept_lines = open_tokenizer("NullTokenizer", vocab_size=50), 0, 0
    for number in range(count // 100):
        path, prefix = folder / f"{number}.jsonl", folder / f"{number}"
        rows = []
        for _ in range(100):
            text = json.dumps(
                {"text": " ".join(str(rng.randrange(50)) for _ in range(9)), "n": [None, "é\n"]}
            )
            line = mutate(text.encode(), rng).replace(b"\n", b"").replace(b"\r", b"")
            rows.append(line if line.strip() else b"{}")
        path.write_bytes(b"\n".join(rows) + b"\n")
        result = preprocess([path], prefix, tokenizer, Options(skip=True))
        data = open_dataset(result.prefixes[0])
        verify_dataset(data)
        assert result.skipped + result.documents == 100
        refused, kept_lines = refused + result.skipped, kept_lines + result.documents
        if result.skipped:
            with pytest.raises(MegaError, match=re.escape(f"{path}:")):
                preprocess([path], folder / "strict", tokenizer)
            assert not list(folder.glob("strict*"))
    return refused, kept_lines


if __name__ == "__main__":
    folder, kind, seed, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    work = datasets if kind == "datasets" else lines
    sys.stdout.write(json.dumps(work(folder, random.Random(seed), count)) + "\n")
