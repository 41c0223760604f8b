"""Benchmark the engine of mega-serve on a CPU against Hugging Face's and vLLM's, on the same weights.

    python bench/serve.py [--threads 1 2] [--rounds 3] [--ways ours hf ...] [--workloads ...] [--dtype fp32]
        [--json RESULT]

The model has the shape of GPT-2 124M and random weights, bfloat16, or float32 with --dtype fp32, which is for
CPUs without bfloat16 products (AVX2): there torch emulates them. `tiny` is an 8M one in float32. Workloads:

stream   1 prompt of 128 tokens, 128 new ones
batch    32 prompts of 16 to 256 tokens, 64 new ones each, all at once
prefix   a prompt of 512 shared tokens and 8 others, 1 new token: first cold, then with the prefix cached
tiny     8 prompts of 32 tokens, 64 new ones each, on the 8M model

Every way decodes greedily, without detokenizing, and is a process of its own. Ways take turns, `rounds` times
for each number of threads; the least wall-clock and CPU time (user and system, all threads) of a batch count.
Before every process the script measures how busy the machine is, and the result keeps it.

First each peer generates 16 tokens for the prompts of `batch` in float32, and the result says how many rows
have our tokens. In bfloat16 the two largest logits of a random model are often nearer than a rounding.

The peers are in `serving_peers.py`; vLLM runs where MEGA_VLLM names the Python of an environment that has it.
`ours` takes the numba kernels if numba is installed, `ours-torch` torch's operations alone, `ours-int8`
weights in 8-bit integers, `ours-invariant` --batch-invariant.

The bound of one stream is the memory bandwidth divided by the bytes of the weights that a token reads. The
bandwidth is that of torch summing 512 MB of float32 in huge pages, measured in the same run with the same
number of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, boxes_to_write
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.parallel_layout import WHOLE
from mega_schema.spec import ModelSpec, gpt
from mega_schema.tokenizer.tokenizer import open_tokenizer

SPECS = {
    "gpt2": gpt(layers=12, hidden=768, heads=12, vocab=50257, max_seq_len=1024),
    "tiny": gpt(layers=4, hidden=128, heads=4, vocab=50257, max_seq_len=1024),
}
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-torch": {"attention": "torch"},
    "ours-int8": {"dtype": "int8"},
    "ours-invariant": {"batch_invariant": True},
}
PEERS = ("hf", "hf-continuous", "vllm", "vllm-eager")
BYTES = {"bf16": 2, "fp32": 4}


def make_model(folder: Path, spec: ModelSpec, *, tokenizer: Path | None = None) -> None:
    """Write a checkpoint with random weights, and the same weights for Hugging Face.

    Args:
        tokenizer: a tokenizer.json for both; None: token ids have no text.
    """
    if tokenizer is None:
        open_tokenizer("NullTokenizer", vocab_size=spec.vocab - 1).save(folder / "tokenizer")
    else:
        open_tokenizer("HuggingFaceTokenizer", model=tokenizer).save(folder / "tokenizer")
    rng = np.random.default_rng(0)

    def values(box: BoxToWrite) -> np.ndarray:
        if "norm.weight" in box.name:
            return np.ones(box.slab.shape, np.float32)
        return rng.normal(0, 0.02, box.slab.shape).astype(np.float32)

    run = folder / "float32"
    save = CheckpointWriter(run, 1)
    save.begin()
    rows = [row for row in table(spec) if row.tied_to is None]
    boxes = [box for row in rows for box in boxes_to_write(row.name, row.shape, row.slabs(0, 1), "F32")]
    save.write(MODEL, 0, boxes, values)
    save.commit(spec, layout=WHOLE, trainer={}, tokenizer=folder / "tokenizer")
    program = [
        sys.executable,
        "-m",
        "mega_ckpt",
        "convert",
        *(["--no-tokenizer"] if tokenizer is None else []),
    ]
    words = ["--from", "mega", "--to", "hf", "--load", run, "--save", folder / "hf"]
    subprocess.run([*program, *map(str, words), "--dtype", "bf16"], check=True, stdout=subprocess.DEVNULL)
    words = ["--from", "hf", "--to", "mega", "--load", folder / "hf", "--save", folder / "mega"]
    words += ["--tokenizer", folder / "tokenizer"]
    command = [sys.executable, "-m", "mega_ckpt", "convert", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def make_workloads() -> dict[str, dict[str, Any]]:
    """Return the batches of each workload; the first `warmups` of them are not measured."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(50_000) for _ in range(length)]

    lengths = [rng.randint(16, 256) for _ in range(32)]
    shared = [prompt(512) for _ in range(4)]
    return {
        "stream": {
            "model": "gpt2",
            "batches": [[prompt(128)] for _ in range(3)],
            "new_tokens": 128,
            "warmups": 1,
        },
        "batch": {
            "model": "gpt2",
            "batches": [[prompt(n) for n in lengths] for _ in range(3)],
            "new_tokens": 64,
            "warmups": 1,
        },
        # cold and warm requests of each prefix alternate
        "prefix": {
            "model": "gpt2",
            "batches": [[prefix + prompt(8)] for prefix in shared for _ in range(2)],
            "new_tokens": 1,
            "warmups": 2,
        },
        "tiny": {
            "model": "tiny",
            "batches": [[prompt(32) for _ in range(8)] for _ in range(3)],
            "new_tokens": 64,
            "warmups": 1,
        },
    }


def run_ours(way: str, folder: Path, workload: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Run a workload in our engine, in this process."""
    from mega_serve.engine.requests import EngineRequest, SamplingParams
    from mega_serve.execution.engine_factory import build_engine

    rows = max(map(len, workload["batches"]))
    settings = {
        "load": str(folder / "mega"),
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[dtype],
        "device": "cpu",
        "max_num_seqs": max(8, rows),
        "max_num_batched_tokens": 512,
        "kv_cache_memory": 1 << 30,
        **OURS[way],
    }
    core: Any = build_engine(settings).core
    params = SamplingParams(max_tokens=workload["new_tokens"], temperature=0.0, ignore_eos=True)
    runs = []
    for i, prompts in enumerate(workload["batches"]):
        cpu, wall = time.process_time(), time.perf_counter()
        outputs: dict[str, list[int]] = {}
        for row, prompt in enumerate(prompts):
            request_id = f"{i}-{row}"
            outputs[request_id] = []
            core.add(EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=params))
        while core.has_work:
            for output in core.step():
                assert output.error is None, output.error
                outputs[output.request_id] += output.token_ids
        run = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        if i >= workload["warmups"]:
            runs.append({**run, "outputs": list(outputs.values())})
    return {"runs": runs, "versions": {"torch": version("torch"), "numba": _version("numba")}}


def measure_bandwidth(threads: int) -> float:
    """Return the bytes per second at which torch reads memory."""
    torch.set_num_threads(threads)
    x = torch.from_numpy(np.ones(1 << 27, np.float32))  # numpy asks for huge pages
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        x.sum()
        seconds.append(time.perf_counter() - start)
    return x.nbytes / min(seconds)


def measure_busy(seconds: float = 1.0) -> float:
    """Return the fraction of all cores that other programs use."""

    def read() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return sum(numbers), numbers[3] + numbers[4]

    total, idle = read()
    time.sleep(seconds)
    total_after, idle_after = read()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def run_way(way: str, workload: Path, folder: Path, dtype: str, threads: int) -> dict[str, Any] | None:
    """Run a way in a process of its own; None if it fails."""
    busy = measure_busy()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if way in OURS:
        command = [sys.executable, __file__, "--run", way, str(workload), str(folder), dtype, str(threads)]
    else:
        python = os.environ.get("MEGA_VLLM", "") if way.startswith("vllm") else sys.executable
        if not python:
            return None
        peers = str(Path(__file__).with_name("serving_peers.py"))
        words = [way, str(folder / "hf"), str(workload), "--dtype", dtype, "--threads", str(threads)]
        command = [python, peers, *words]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"runs"')]
    if process.returncode or not lines:
        print(f"  {way}: failed\n{process.stderr[-2000:]}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(lines[-1])
    return {**result, "busy_before": round(busy, 3)}


def summarize(results: Sequence[dict[str, Any]], workload: dict[str, Any]) -> dict[str, Any]:
    """Return the least times of a way's batches, of all rounds."""
    runs = [run for result in results for run in result["runs"]]
    tokens = sum(map(len, runs[0]["outputs"]))
    summary: dict[str, Any] = {
        "busy_before": max(result["busy_before"] for result in results),
        "versions": results[0]["versions"],
    }
    if workload["new_tokens"] == 1:  # cold and warm by turns
        cold, warm = (min(run["seconds"] for run in runs[first::2]) for first in (0, 1))
        return {
            **summary,
            "ttft_cold": round(cold, 5),
            "ttft_cached": round(warm, 5),
            "ratio": round(warm / cold, 3),
        }
    wall, cpu = (min(run[name] for run in runs) for name in ("seconds", "cpu_seconds"))
    speeds = {"tokens_per_second": round(tokens / wall, 1), "tokens_per_cpu_second": round(tokens / cpu, 1)}
    return {**summary, "seconds": round(wall, 4), "cpu_seconds": round(cpu, 4), **speeds}


def count_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return how many rows have equal tokens."""
    pairs = [
        (a, b)
        for run, peer_run in zip(ours["runs"], theirs["runs"], strict=True)
        for a, b in zip(run["outputs"], peer_run["outputs"], strict=True)
    ]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run all ways on all workloads and return the table."""
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "dtype": options.dtype,
        "load_before": os.getloadavg()[0],
        "busy_before": round(measure_busy(), 3),
    }
    workloads = {name: work for name, work in make_workloads().items() if name in options.workloads}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for model in {work["model"] for work in workloads.values()}:
            make_model(root / model, SPECS[model])
        if "batch" in workloads:
            report["rows_equal_to_ours_in_float32"] = check_tokens(options.ways, workloads["batch"], root)
        for threads in options.threads:
            section: dict[str, Any] = {"bandwidth": measure_bandwidth(threads)}
            report[f"threads_{threads}"] = section
            for name, work in workloads.items():
                file = root / f"{name}.json"
                file.write_text(json.dumps(work))
                section[name] = run_workload(options, name, work, file, root / work["model"], threads)
            if "stream" in section:
                sizes = [int(np.prod(row.shape)) for row in table(SPECS["gpt2"]) if row.tied_to is None]
                weights = BYTES[options.dtype] * sum(sizes)
                bound = section["bandwidth"] / weights
                section["stream"]["bound_tokens_per_second"] = round(bound, 1)
                if "ours" in section["stream"]:
                    speed = section["stream"]["ours"]["tokens_per_second"]
                    section["stream"]["ours"]["part_of_bound"] = round(speed / bound, 3)
    return report


def check_tokens(ways: Sequence[str], batch: dict[str, Any], root: Path) -> dict[str, str]:
    """Return for every peer how many rows of a batch have the tokens of ours, in float32."""
    work = {**batch, "batches": batch["batches"][:1], "new_tokens": 16, "warmups": 0}
    file = root / "check.json"
    file.write_text(json.dumps(work))
    results = {
        way: run_way(way, file, root / work["model"], "fp32", 1)
        for way in ("ours", *(way for way in ways if way in PEERS))
    }
    ours = results.pop("ours")
    assert ours is not None, "our engine failed"
    equal = {way: count_equal(ours, result) for way, result in results.items() if result is not None}
    print(f"rows with the tokens of ours, in float32: {equal}", flush=True)
    return equal


def run_workload(
    options: argparse.Namespace, name: str, work: dict[str, Any], file: Path, folder: Path, threads: int
) -> dict[str, Any]:
    """Run the ways by turns and return their rows, with ratios of ours to each peer."""
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for way in options.ways:
            result = run_way(way, file, folder, options.dtype if work["model"] == "gpt2" else "fp32", threads)
            if result is not None:
                results.setdefault(way, []).append(result)
    rows: dict[str, Any] = {way: summarize(rounds, work) for way, rounds in results.items()}
    for way in results:
        if way in PEERS and "ours" in results:
            rows[way]["rows_equal_to_ours"] = count_equal(results["ours"][0], results[way][0])
            if "seconds" in rows[way]:
                for field in ("seconds", "cpu_seconds"):
                    rows[way][f"ours_faster_{field}"] = round(rows[way][field] / rows["ours"][field], 2)
    print(f"{threads} threads, {name}: {json.dumps(rows, indent=1)}", flush=True)
    return rows


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        way, workload, folder, dtype, threads = sys.argv[2:]
        torch.set_num_threads(int(threads))
        print(json.dumps(run_ours(way, Path(folder), json.loads(Path(workload).read_text()), dtype)))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--workloads", nargs="+", default=list(make_workloads()))
    parser.add_argument("--dtype", choices=list(BYTES), default="bf16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = compare(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
