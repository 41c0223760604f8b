"""Benchmark the scoring of mega-eval against lm-evaluation-harness on a CPU, on the same weights and ids.

    python bench/eval.py [--dtypes float32 bfloat16] [--threads 1] [--rounds 2] [--scale 1] [--workloads ...]
                         [--no-compile] [--start-python PYTHON] [--json RESULT]

The model has the shape of GPT-2 124M and random weights; both sides load them from bfloat16 files. Workloads:

lambada  passages of 55 to 130 tokens, the last token is scored; for every second one it is the greedy choice
choices  questions with four answers behind one five-shot prompt of 400 tokens
sliding  windows of 1024 tokens of which the last 32 are scored, Megatron's --overlapping-eval 32
rolling  windows of 1024 tokens, all scored, as lm-eval's loglikelihood_rolling cuts them

The peer is HFLM of lm-eval, called with token ids, so that neither side tokenizes. Before the rounds it runs
a part of each workload with several batch sizes and keeps the fastest. Batch size 64 is what its `auto`
settles on for short windows; the passes with which `auto` finds it are not counted. `hflm` is the model as
lm-eval loads it; `hflm_compiled` is compiled by torch.compile, which lm-eval does not do by itself.
Ours is `ModelScorer` as `mega-eval` builds it. All sides are in one process and take turns, `rounds` times;
the least CPU and wall-clock time of each counts.

`part_of_products` is the time of the products that a workload needs, at the best rate that torch reaches for
this model's shapes in the same run, over our time. Needed are the products with weights: in the last layer
and in the head only those of tokens that predict a target. Attention is not among them.

A CPU without instructions for bfloat16 multiplies it in float32 in ours, and element by element in the peer,
which takes a hundred times as long: there only two requests of `lambada` are compared in bfloat16, and the
ratio says nothing about other CPUs (`native_bfloat16` is false).

`start` is the wall-clock time of `mega-eval lambada --limit 1`, whole, and without the time in which the same
weights load in this process. `--start-python` names the Python of an environment with mega-eval alone: numba
imports every package that extends it, and the peers of other benchmarks bring such packages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from serve import SPECS, make_model, measure_busy

from mega_eval.batch_size import choose_max_tokens
from mega_eval.forward_plan import plan_passes
from mega_eval.models.decoder_kernels import choose_decoder_kernels
from mega_eval.scorer import ModelScorer
from mega_eval.windows import Window, as_tokens
from mega_model.build import load_model
from mega_model.matmul_precision import has_native, matmul_dtype
from mega_schema.checkpoint.reader import Checkpoint

SPEC = SPECS["gpt2"]
WORKLOADS = ("lambada", "choices", "sliding", "rolling")
IDLE = 0.05  # of all cores that other programs may use
Request = tuple[list[int], list[int]]  # context and continuation
Result = tuple[float, bool]  # summed log-probability of the continuation, and whether it is greedy


def make_requests(name: str, scale: float) -> list[Request]:
    """Return the requests of a workload: context and continuation."""
    rng = np.random.default_rng(WORKLOADS.index(name))

    def ids(count: int) -> list[int]:
        return rng.integers(0, SPEC.vocab, count).tolist()

    def times(count: int) -> int:
        return max(2, round(count * scale))

    if name == "lambada":
        return [(ids(int(n)), ids(1)) for n in rng.integers(54, 130, times(64))]
    if name == "choices":
        shots = ids(400)
        questions = [shots + ids(int(n)) for n in rng.integers(30, 90, times(6))]
        return [(question, ids(int(n))) for question in questions for n in rng.integers(2, 9, 4)]
    scored = 32 if name == "sliding" else 1024
    return [(ids(1025 - scored), ids(scored)) for _ in range(times(4))]


def as_windows(requests: Sequence[Request]) -> list[Window]:
    return [Window(as_tokens(context + target), len(target)) for context, target in requests]


class MegaProgram:
    """The scorer of mega-eval."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        checkpoint = Checkpoint.open(folder)
        start = time.perf_counter()
        kernels = choose_decoder_kernels(torch.device("cpu"), batch_invariant=False)
        self.decoder = load_model(checkpoint.spec, checkpoint.model_slab, dtype=dtype, kernels=kernels)
        self.load_seconds = time.perf_counter() - start
        self.scorer = ModelScorer(self.decoder)

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Score requests."""
        results: list[Result] = [(0.0, False)] * len(requests)
        for batch in self.scorer.score_batches(as_windows(requests)):
            for index, scores in batch:
                results[index] = (float(scores.logprobs.sum()), bool(scores.is_greedy.all()))
        return results

    def greedy_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Return the greedy choice after each context."""
        tokens = [0] * len(requests)
        for batch in self.scorer.score_batches(as_windows(requests)):
            for index, scores in batch:
                tokens[index] = int(scores.greedy_ids[0])
        return tokens


class HarnessProgram:
    """HFLM of lm-eval, with a batch size and perhaps torch.compile."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from lm_eval.models.huggingface import HFLM
        from tokenizers import Tokenizer, models
        from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({"a": 0, "b": SPEC.vocab - 1}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b")
        model = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype).eval()
        lengths = {"max_length": SPEC.max_seq_len}
        self.lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", **lengths)
        self._model = model

    def configure(self, batch_size: int, compiled: Any) -> None:
        """Choose the batch size, and the compiled model; None: the model as it is."""
        self.lm.batch_size_per_gpu = batch_size
        self.lm._model = self._model if compiled is None else compiled

    def compile(self) -> Any:
        """Return the model compiled for shapes of any length."""
        return torch.compile(self._model, dynamic=True)

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Score requests."""
        with torch.no_grad():
            rows = [(("", ""), context, target) for context, target in requests]
            scores: list[Result] = self.lm._loglikelihood_tokens(rows, disable_tqdm=True)
        return scores


def measure(function: Callable[[], object]) -> dict[str, float]:
    """Return the CPU and wall-clock seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return {"cpu_seconds": time.process_time() - cpu, "seconds": time.perf_counter() - wall}


def least(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(min(run[key] for run in runs), 4) for key in runs[0]}


def choose_batch_size(peer: HarnessProgram, requests: Sequence[Request]) -> dict[str, Any]:
    """Find the peer's fastest batch size on a part of a workload."""
    longest = max(len(context) + len(target) for context, target in requests)
    if len(requests) <= 2:
        return {"batch_size": len(requests)}
    part = sorted(requests, key=lambda request: len(request[0]))[: max(2, len(requests) // 4)]
    seconds: dict[int, float] = {}
    for size in (1, 4, 16, 64):
        if size > 1 and (size * longest > 8500 or size >= 2 * len(part)):
            continue
        peer.configure(size, None)
        seconds[size] = measure(lambda: peer.run(part))["cpu_seconds"]
    return {"batch_size": min(seconds, key=lambda size: seconds[size]), "cpu_seconds_of_a_part": seconds}


def warm_up(peer: HarnessProgram, requests: Sequence[Request], compiled: Any, batch_size: int) -> bool:
    """Compile the peer for a workload; False where torch.compile cannot run, as without a C++ compiler."""
    peer.configure(batch_size, compiled)
    try:
        peer.run(requests[: 2 * batch_size])
    except Exception as error:
        print(f"torch.compile of the peer: {type(error).__name__}", file=sys.stderr)
        return False
    return True


def measure_product_rate(dtype: torch.dtype) -> dict[str, float]:
    """Return the FLOPs per CPU second and per second of this model's products, at the best number of rows."""
    width, inner = SPEC.hidden, SPEC.ffn
    shapes = ((3 * width, width), (width, width), (inner, width), (width, inner))
    factor = matmul_dtype(torch.empty(0, dtype=dtype))
    best = {"cpu_seconds": 0.0, "seconds": 0.0}
    for rows in (512, 1024, 2048):
        pairs = [(torch.randn(rows, i, dtype=factor), torch.randn(o, i, dtype=factor)) for o, i in shapes]
        runs = [measure(lambda pairs=pairs: [F.linear(x, w) for x, w in pairs]) for _ in range(6)]
        flops = sum(2 * rows * o * i for o, i in shapes)
        for key, value in least(runs).items():
            best[key] = max(best[key], flops / value)
    return best


def count_flops(requests: Sequence[Request], max_tokens: int) -> float:
    """Return the FLOPs of the products with weights that the scores of requests need."""
    width = SPEC.hidden
    kv = 2 * width * width
    layer = 4 * width * width + 2 * width * SPEC.ffn
    total = 0.0
    for planned in plan_passes(as_windows(requests), max_tokens=max_tokens):
        tokens, rows = planned.tree.tokens, len(planned.row_R)
        total += tokens * ((SPEC.layers - 1) * layer + kv) + rows * (layer - kv + SPEC.vocab * width)
    return 2 * total


def compare_results(ours: Sequence[Result], theirs: Sequence[Result]) -> dict[str, Any]:
    """Return the largest difference of the log-probabilities, and how many verdicts are equal."""
    equal = sum(a[1] == b[1] for a, b in zip(ours, theirs, strict=True))
    difference = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
    greedy = sum(result[1] for result in ours)
    return {
        "largest_logprob_difference": float(f"{difference:.2g}"),
        "equal_verdicts": f"{equal} of {len(ours)}",
        "greedy": greedy,
    }


def run_workload(
    name: str,
    requests: list[Request],
    ours: MegaProgram,
    peer: HarnessProgram,
    compiled: Any,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Run both sides by turns and return the row of a workload."""
    configuration = choose_batch_size(peer, requests)
    size = configuration["batch_size"]
    ours.run(requests[:2])
    sides: dict[str, Callable[[], list[Result]]] = {"ours": lambda: ours.run(requests)}
    models: dict[str, Any] = {"hflm": None}
    if compiled is not None and warm_up(peer, requests, compiled, size):
        models["hflm_compiled"] = compiled
    for side, model in models.items():

        def run_peer(model: Any = model) -> list[Result]:
            peer.configure(size, model)
            return peer.run(requests)

        sides[side] = run_peer
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    results: dict[str, list[Result]] = {}
    for _ in range(options.rounds):
        for side, run in sides.items():

            def work(side: str = side, run: Callable[[], list[Result]] = run) -> None:
                results[side] = run()

            runs[side].append(measure(work))
    row: dict[str, Any] = {side: least(times) for side, times in runs.items()}
    row["hflm"] |= configuration
    for side in models:
        for key in ("cpu_seconds", "seconds"):
            row[f"ours_faster_{key}_than_{side}"] = round(row[side][key] / row["ours"][key], 2)
    flops = count_flops(requests, choose_max_tokens(ours.decoder))
    row["requests_per_cpu_second"] = round(len(requests) / row["ours"]["cpu_seconds"], 2)
    row["needed_gflops"] = round(flops / 1e9, 1)
    row |= compare_results(results["ours"], results["hflm"])
    return row


def measure_start(folder: Path, load_seconds: float, dtype: str, python: str) -> dict[str, float]:
    """Return the seconds of `mega-eval lambada --limit 1`, the fastest of four starts."""
    rng = np.random.default_rng(9)
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary, "data.jsonl")
        texts = [" ".join(map(str, rng.integers(0, SPEC.vocab - 1, 80))) for _ in range(8)]
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        words = ["lambada", "--load", str(folder), "--data", str(data), "--limit", "1", "--dtype", dtype]
        words += ["--output", str(Path(temporary, "result.json")), "--overwrite", "--no-cache"]
        command = [python, "-m", "mega_eval", *words]
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
    return {
        "seconds": round(min(seconds), 2),
        "load_seconds": round(load_seconds, 2),
        "seconds_beyond_loading": round(min(seconds) - load_seconds, 2),
    }


def make_greedy(requests: Sequence[Request], ours: MegaProgram) -> list[Request]:
    """Replace the continuation of every second request by the model's greedy choice."""
    tokens = ours.greedy_tokens(requests)
    return [
        (context, [token] if number % 2 else target)
        for number, ((context, target), token) in enumerate(zip(requests, tokens, strict=True))
    ]


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run all workloads in all dtypes and return the table."""
    torch.set_num_threads(options.threads)
    busy = measure_busy()
    print(f"other programs use {busy:.0%} of the cores: the machine is {'idle' if busy < IDLE else 'BUSY'}")
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_before": os.getloadavg()[0],
        "busy_before": round(busy, 3),
        "threads": options.threads,
        "versions": {name: version(name) for name in ("torch", "numba", "transformers", "lm_eval")},
        "native_bfloat16": has_native(torch.bfloat16),
    }
    requests = {name: make_requests(name, options.scale) for name in options.workloads}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, SPEC)
        if "lambada" in requests:
            requests["lambada"] = make_greedy(
                requests["lambada"], MegaProgram(folder / "mega", torch.float32)
            )
        for dtype in options.dtypes:
            report[dtype] = run_dtype(dtype, folder, requests, options)
    report["busy_after"] = round(measure_busy(), 3)
    return report


def run_dtype(
    dtype: str, folder: Path, requests: dict[str, list[Request]], options: argparse.Namespace
) -> dict[str, Any]:
    """Run all workloads in one dtype."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    ours, peer = MegaProgram(folder / "mega", torch_dtype), HarnessProgram(folder / "hf", torch_dtype)
    workloads = options.workloads
    compiled = peer.compile() if options.compile else None
    if matmul_dtype(torch.empty(0, dtype=torch_dtype)) != torch_dtype:
        workloads = [name for name in workloads if name == "lambada"]
        requests = {name: requests[name][:2] for name in workloads}
        compiled = None
    section: dict[str, Any] = {
        "start": measure_start(folder / "mega", ours.load_seconds, dtype, options.start_python)
    }
    print(f"{dtype}, start: {json.dumps(section['start'])}", flush=True)
    for name in workloads:
        rate = measure_product_rate(torch_dtype)  # before and after, as other work slows both
        row = run_workload(name, requests[name], ours, peer, compiled, options)
        after = measure_product_rate(torch_dtype)
        row["product_gflops_per_second"] = round(max(rate["seconds"], after["seconds"]) / 1e9, 1)
        for key in ("cpu_seconds", "seconds"):
            bound = 1e9 * row["needed_gflops"] / max(rate[key], after[key])
            row[f"part_of_products_{key}"] = round(bound / row["ours"][key], 3)
        section[name] = row
        print(f"{dtype}, {name}: {json.dumps(row, indent=1)}", flush=True)
    return section


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("float32", "bfloat16")
    parser.add_argument("--dtypes", nargs="+", default=list(names), choices=names)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of requests")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--start-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = compare(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
