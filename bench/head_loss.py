"""Benchmark the chunked loss of a language model's head against full logits with torch's cross-entropy.

    python bench/head_loss.py [--pairs 3] [--threads 1] [--json FILE]

One forward and backward pass of 2,048 tokens, width 384, vocabulary 50,304, with the gradients of input and
weight: ours (`mega_model.loss.head_loss`), and `F.linear`, `F.cross_entropy` and autograd, in float32 and in
bfloat16 (the other one's logits in float32 for the loss, as under autocast). A new process each time, in
turn.

Prints of both the median CPU seconds with their spread, the median of the ratios pair by pair, and how far
the process's memory rose over what it held before. CPU seconds, since other work lengthens the wall's. On a
CPU without bfloat16 instructions torch's own bfloat16 takes minutes, and ours, which then computes in
float32, is held against torch's float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_model.distributed.mesh import Axis
from mega_model.loss import head_loss
from mega_model.matmul_precision import matmul_dtype
from mega_model.weight_gradients import WeightGradients
from mega_train.engine.train import tune_malloc

TOKENS, WIDTH, VOCAB, PASSES = 2048, 384, 50304, 3
OWN = matmul_dtype(torch.empty(0, dtype=torch.bfloat16)) == torch.bfloat16


def child(ours: bool, dtype: torch.dtype) -> tuple[float, float]:
    """Measure the CPU seconds of a pass, and the increase of peak memory in MiB."""
    tune_malloc()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter((0.02 * torch.randn(VOCAB, WIDTH, generator=generator)).to(dtype))
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    gradients, main = WeightGradients(), torch.ones(VOCAB, WIDTH)
    gradients.register_main_grad(weight, lambda: main)

    def loss() -> Tensor:
        if ours:
            return head_loss(x, weight, target, vocab=VOCAB, tp=Axis("tp"), gradients=gradients) / TOKENS
        return F.cross_entropy(F.linear(x, weight).float(), target)

    def run_once() -> None:
        loss().backward()
        if not ours:  # what micro-batches are added up in
            assert weight.grad is not None
            main.add_(weight.grad)
        x.grad = weight.grad = None

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_once()
    began = time.process_time()
    for _ in range(PASSES):
        run_once()
    seconds = (time.process_time() - began) / PASSES
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def compare(dtype: str, pairs: int, threads: int) -> dict[str, object]:
    """Measure ours and torch's alternately."""
    measurements: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}
    for _ in range(pairs):
        for name, measured in measurements.items():
            theirs = dtype if name == "ours" or OWN else "float32"
            words = ["--child", name, "--dtype", theirs, "--threads", str(threads)]
            process = subprocess.run(
                [sys.executable, __file__, *words], capture_output=True, text=True, check=True
            )
            seconds, mebibytes = map(float, process.stdout.split())
            measured.append((seconds, mebibytes))
    for name, measured in measurements.items():
        seconds = [seconds_of_run for seconds_of_run, _ in measured]
        memory = statistics.median(seconds_of_run for _, seconds_of_run in measured)
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(f"{dtype:9} {name:6} {statistics.median(seconds):6.2f} s ({spread})  {memory:6.0f} MiB")
    ratio = statistics.median(
        a / b for (a, _), (b, _) in zip(measurements["ours"], measurements["torch"], strict=True)
    )
    print(f"{dtype:9} ratio  {ratio:6.2f}")
    return {"dtype": dtype, "threads": threads, **measurements, "ratio": ratio}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=["ours", "torch"], help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        print(*child(args.child == "ours", getattr(torch, args.dtype)))
        return
    print(f"{platform.machine()}, torch {torch.__version__}, bfloat16 instructions: {'yes' if OWN else 'no'}")
    results = [compare(dtype, args.pairs, args.threads) for dtype in ("float32", "bfloat16")]
    if args.json:
        args.json.write_text(json.dumps({"bfloat16": OWN, "results": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
