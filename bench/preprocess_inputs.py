"""Benchmark `mega-data preprocess` on one corpus as plain lines, compressed files and Parquet.

    python bench/preprocess_inputs.py CORPUS.jsonl --gpt2 FOLDER [--shards 8] [--frames 1] [--split-mb 64]
        [--formats jsonl jsonl.gz ...] [--repeat 3] [--json RESULT]

The corpus (`bench/preprocess.py --make` writes one) is cut into shards, which are written in each format.
Each format is encoded with two workers as one stream (without `--executor`) and as tasks (`--executor
local`); the runs take turns, and the minimum of several rounds counts. Start-up is included. All outputs must
have the same ids. `--shards 1 --frames 64 --split-mb 1` is one large file of 64 gzip members, zstd frames and
so on, which tasks divide; `--shards 10000 --formats jsonl` is many small files. Where others use the machine,
CPU seconds say more than wall seconds.

FOLDER holds gpt2-vocab.json and gpt2-merges.txt.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import orjson
import pyarrow
import pyarrow.parquet
import zstandard

WORKERS = 2
FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "jsonl.bz2", "parquet")
WAYS = ("stream", "tasks")


def write_shards(corpus: Path, folder: Path, shards: int, frames: int, formats: Sequence[str]) -> None:
    """Write the lines of the corpus in each format, in a folder of its own.

    Args:
        frames: members or frames of a compressed file.
    """
    lines = corpus.read_bytes().splitlines(keepends=True)
    step = -(-len(lines) // shards)
    for name in formats:
        (folder / name).mkdir()
    for number in range(shards):
        part = lines[number * step : (number + 1) * step]
        frame_lines = max(1, -(-len(part) // frames))
        pieces = [b"".join(part[start : start + frame_lines]) for start in range(0, len(part), frame_lines)]
        for name, pack in (
            ("jsonl", bytes),
            ("jsonl.gz", gzip.compress),
            ("jsonl.zst", zstandard.ZstdCompressor().compress),
            ("jsonl.bz2", bz2.compress),
        ):
            if name in formats:
                (folder / name / f"{number:05d}.{name}").write_bytes(b"".join(map(pack, pieces)))
        if "parquet" not in formats:
            continue
        table = pyarrow.table({"text": [orjson.loads(line)["text"] for line in part]})
        pyarrow.parquet.write_table(table, folder / "parquet" / f"{number:05d}.parquet", row_group_size=1000)


def command(inputs: Path, prefix: Path, gpt2: Path, way: str, split_mb: int) -> list[str]:
    words = ["--input", inputs, "--output-prefix", prefix, "--append-eod", "--workers", WORKERS]
    words += ["--tokenizer-type", "GPT2BPETokenizer"]
    words += ["--vocab-file", gpt2 / "gpt2-vocab.json", "--merge-file", gpt2 / "gpt2-merges.txt"]
    words += ["--executor", "local", "--split-mb", split_mb] if way == "tasks" else []
    return [sys.executable, "-m", "mega_data", "preprocess", *map(str, words)]


def seconds(words: list[str]) -> tuple[float, float]:
    """Return wall and CPU seconds of a command with all its processes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--gpt2", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--split-mb", type=int, default=64)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {WORKERS} workers",
        "python": platform.python_version(),
        "load_before": os.getloadavg(),
        "megabytes": round(args.corpus.stat().st_size / 1e6, 1),
        "shards": args.shards,
        "frames": args.frames,
        "split_mb": args.split_mb,
    }
    runs = {pair: list[tuple[float, float]]() for pair in itertools.product(args.formats, WAYS)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(args.corpus, folder, args.shards, args.frames, args.formats)
        payload = b""
        for _, (kind, way) in itertools.product(range(args.repeat), runs):
            output = folder / "output"
            runs[kind, way].append(
                seconds(command(folder / kind, output / "p", args.gpt2, way, args.split_mb))
            )
            ids = (output / "p_text_document.bin").read_bytes()
            assert ids == (payload or ids), (kind, way)
            payload = ids
            shutil.rmtree(output)
    first_wall, first_cpu = map(min, zip(*runs[args.formats[0], "stream"], strict=True))
    for (kind, way), rounds in runs.items():
        wall, cpu = map(min, zip(*rounds, strict=True))
        ratios = {"wall_ratio_to_first": wall / first_wall, "cpu_ratio_to_first": cpu / first_cpu}
        values = {"wall_s": wall, "cpu_s": cpu, **ratios}
        results[f"{kind}, {way}"] = {label: round(value, 2) for label, value in values.items()}
    results["load_after"] = os.getloadavg()
    text = json.dumps(results, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
