"""Benchmark preprocessing with GPT-2's tokenizer against `tokenizers` and `tiktoken`, in one run.

    python bench/preprocess.py CORPUS.jsonl --make 322 [--prose TEXTS.jsonl]
    python bench/preprocess.py CORPUS.jsonl --gpt2 FOLDER [--repeat 3] [--slow-megabytes 20] [--json RESULT]

The first command makes the corpus: the documents of TEXTS.jsonl, then files of this Python and its packages
(code, headers, documentation) up to so many megabytes, no two alike, in an order that a seed decides.

Each pipeline is a process of its own that reads lines, parses them with orjson, encodes on two cores and
writes a dataset; `tokenizers` and `tiktoken` get the beginning of the corpus, as neither gets faster with
more. A run on one line first tells what starting costs; it is subtracted. The pipelines take turns, and of
several rounds the quickest counts. Where all read the whole corpus (`--slow-megabytes` at its size), the
ratios of whole processes, their start included, are given too. Rates are megabytes of the corpus a second of
the processor, all processes together, and of the wall, which says little where others use the machine. The
ids of the three must be equal. `tiktoken` is left out, and the result says so, where it is not installed.

The stages of ours are measured too, on one core in one process: what reading and parsing cost, what each
encoder alone does, and what is left to do with its ids. No number of workers makes a core quicker than that.

FOLDER holds gpt2-vocab.json and gpt2-merges.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from mega_data.encoders import FastokensEncoder, GigatokenEncoder
from mega_data.readers.inputs import InputFile
from mega_data.readers.streams import read_blocks
from mega_schema.dataset.indexed_dataset import IndexedDataset, IndexedWriter
from mega_schema.tokenizer.files import byte_alphabet
from mega_schema.tokenizer.tokenizer import open_tokenizer

CORES, BATCH, EOD = 2, 512, 50256
KINDS = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".c", ".cpp", ".cuh", ".html")
# GPT-2's way to cut text into words, as its authors published it
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def make(corpus: Path, size: int, prose: Path | None) -> None:
    paths = sysconfig.get_paths()
    roots = sorted({paths["stdlib"], paths["platlib"], paths["purelib"]})
    files = sorted({p for root in roots for p in Path(root).rglob("*") if p.suffix in KINDS and p.is_file()})
    random.Random(1).shuffle(files)
    texts = [orjson.loads(line)["text"] for line in prose.open("rb")] if prose else []
    seen, lines, held_bytes = set[bytes](), list[bytes](), 0
    for text in (*texts, *(p.read_bytes().decode("utf-8", "ignore") for p in files)):
        digest = hashlib.sha256(text.encode()).digest()
        if held_bytes < size and text.strip() and digest not in seen:
            seen.add(digest)
            lines.append(orjson.dumps({"text": text, "id": len(lines)}) + b"\n")
            held_bytes += len(lines[-1])
    random.Random(2).shuffle(lines)
    corpus.write_bytes(b"".join(lines))
    print(f"{len(lines):,} distinct documents, {held_bytes:,} bytes")


def batches(corpus: Path) -> Iterator[list[str]]:
    texts = list[str]()
    with corpus.open("rb") as file:
        for line in file:
            texts.append(orjson.loads(line)["text"])
            if len(texts) == BATCH:
                yield texts
                texts = []
    yield texts


def write(corpus: Path, prefix: Path, encode: Callable[[list[str]], list[list[int]]]) -> None:
    with IndexedWriter(prefix, np.uint16) as writer:
        for texts in batches(corpus):
            for ids in encode(texts):
                writer.add(np.array([*ids, EOD], np.uint16))
                writer.end_document()


def with_tokenizers(corpus: Path, prefix: Path, gpt2: Path) -> None:
    vocab, merges = gpt2 / "gpt2-vocab.json", gpt2 / "gpt2-merges.txt"
    write(
        corpus, prefix, open_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges).encode_batch
    )


def with_tiktoken(corpus: Path, prefix: Path, gpt2: Path) -> None:
    import tiktoken

    letters = byte_alphabet()
    vocab = json.loads((gpt2 / "gpt2-vocab.json").read_text("utf-8"))
    ranks = {bytes(letters[c] for c in word): i for word, i in vocab.items() if i != EOD}
    encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    write(corpus, prefix, lambda texts: encoding.encode_ordinary_batch(texts, num_threads=CORES))


PIPELINES = (("tokenizers", with_tokenizers), ("tiktoken", with_tiktoken))


def command(name: str, corpus: Path, prefix: Path, gpt2: Path) -> list[str]:
    if name != "mega-data":
        script = str(Path(__file__).resolve())
        return [sys.executable, script, str(corpus), "--gpt2", str(gpt2), "--pipeline", name, str(prefix)]
    words = ["--input", corpus, "--output-prefix", prefix, "--append-eod", "--workers", CORES]
    words += ["--tokenizer-type", "GPT2BPETokenizer"]
    words += ["--vocab-file", gpt2 / "gpt2-vocab.json", "--merge-file", gpt2 / "gpt2-merges.txt"]
    return [sys.executable, "-m", "mega_data", "preprocess", *map(str, words)]


def cpu_seconds(words: list[str]) -> tuple[float, float]:
    """Measure CPU and wall seconds of a command with all its processes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    env = {**os.environ, "RAYON_NUM_THREADS": str(CORES), "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=env)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def copy_head(corpus: Path, size: int, path: Path) -> Path:
    with corpus.open("rb") as file, path.open("wb") as out:
        while out.tell() < size and (line := file.readline()):
            out.write(line)
    return path


def measure(
    corpora: dict[str, Path], line: Path, folder: Path, gpt2: Path, repeat: int
) -> dict[str, dict[str, Any]]:
    """Measure each pipeline on its corpus and on one line, the minimum of `repeat` alternating rounds."""
    runs: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in corpora}
    for turn, name in itertools.product(range(repeat), corpora):
        prefix = folder / f"{name}-{turn}"
        start = cpu_seconds(command(name, line, prefix / "line", gpt2))
        runs[name].append((*start, *cpu_seconds(command(name, corpora[name], prefix / "p", gpt2))))
    return {name: figures(corpora[name], runs[name]) for name in corpora}


def figures(corpus: Path, runs: list[tuple[float, float, float, float]]) -> dict[str, Any]:
    start_cpu, start_wall, whole_cpu, whole_wall = (min(column) for column in zip(*runs, strict=True))
    size = corpus.stat().st_size / 1e6
    return {
        "megabytes": round(size, 1),
        "start_cpu_s": round(start_cpu, 2),
        "start_wall_s": round(start_wall, 2),
        "cpu_s": round(whole_cpu - start_cpu, 2),
        "wall_s": round(whole_wall - start_wall, 2),
        "whole_cpu_s": round(whole_cpu, 2),
        "whole_wall_s": round(whole_wall, 2),
        "MB_per_cpu_s": round(size / max(whole_cpu - start_cpu, 1e-9), 1),
        "MB_per_wall_s": round(size / max(whole_wall - start_wall, 1e-9), 1),
    }


def stages(corpus: Path, gpt2: Path) -> dict[str, Any]:
    """Measure the MB/s of one core for each stage alone."""
    vocab, merges = gpt2 / "gpt2-vocab.json", gpt2 / "gpt2-merges.txt"
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")  # as in a worker
    tokenizer: Any = open_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    gigatoken = GigatokenEncoder.from_content(tokenizer, orjson.loads(tokenizer.source))
    took = dict.fromkeys(("reading and parsing", "gigatoken", "fastokens", "uint16"), 0.0)
    current_stage, now, equal = "", time.process_time(), True

    def record_stage(stage: str) -> None:
        nonlocal current_stage, now
        before, now = now, time.process_time()
        if current_stage:
            took[current_stage] += now - before
        current_stage = stage

    for encode in (gigatoken, FastokensEncoder(tokenizer)):
        for number, block in enumerate(read_blocks(InputFile(corpus, "jsonl"), keys=["text"])):
            record_stage("reading and parsing" if encode is gigatoken else "")
            texts: list[Any] = [text for (text,) in block.rows(["text"]).texts]
            record_stage(encode.name)
            ids, _ = encode(texts, EOD)
            record_stage("uint16" if encode is gigatoken else "")
            ids.astype(np.uint16)
            record_stage("")
            if encode is not gigatoken and number % 10 == 0:
                equal = equal and (gigatoken(texts, EOD)[0] == ids).all()
    size = corpus.stat().st_size / 1e6
    rates = {stage: round(size / max(seconds, 1e-9), 1) for stage, seconds in took.items()}
    return {"MB_per_cpu_s": rates, "ids_equal_on_a_tenth": bool(equal)}


def same_ids(ours: Path, theirs: Path) -> bool:
    a, b = IndexedDataset(ours), IndexedDataset(theirs)
    return all((a[i] == b[i]).all() and len(a[i]) == len(b[i]) for i in range(len(b)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--make", type=float, metavar="MEGABYTES", help="Write the corpus, and do no more.")
    parser.add_argument("--prose", type=Path, help="JSON lines whose texts are part of the corpus to make.")
    parser.add_argument("--gpt2", type=Path)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--slow-megabytes", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--note", default="", help="What the corpus is, for the result.")
    parser.add_argument("--pipeline", nargs=2, metavar=("NAME", "PREFIX"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(args.corpus, int(args.make * 1e6), args.prose)
        return
    if args.gpt2 is None:
        parser.error("--gpt2 is needed: the folder with gpt2-vocab.json and gpt2-merges.txt")
    if args.pipeline:
        dict(PIPELINES)[args.pipeline[0]](args.corpus, Path(args.pipeline[1]), args.gpt2)
        return
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {CORES} of {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load_before": os.getloadavg(),
        "corpus": args.note or args.corpus.name,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = copy_head(args.corpus, 1, folder / "line.jsonl")
        part = copy_head(args.corpus, int(args.slow_megabytes * 1e6), folder / "part.jsonl")
        peers = {name: part for name, _ in PIPELINES if importlib.util.find_spec(name) is not None}
        results |= measure({"mega-data": args.corpus, **peers}, line, folder, args.gpt2, args.repeat)
        results["stages of one core"] = stages(args.corpus, args.gpt2)
        ours = results["mega-data"]
        for name, _ in PIPELINES:
            if name not in peers:
                results[name] = "not installed"
                continue
            theirs = results[name]
            theirs["ids_equal"] = same_ids(folder / "mega-data-0/p_text_document", folder / f"{name}-0/p")
            theirs["ours_is_faster"] = round(ours["MB_per_cpu_s"] / theirs["MB_per_cpu_s"], 1)
            if theirs["megabytes"] == ours["megabytes"]:
                for clock in ("cpu", "wall"):
                    ratio = theirs[f"whole_{clock}_s"] / ours[f"whole_{clock}_s"]
                    theirs[f"whole_process_ratio_by_{clock}"] = round(ratio, 1)
    text = json.dumps(results, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
