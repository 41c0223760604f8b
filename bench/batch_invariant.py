"""Measure what --batch-invariant costs on a CPU: steps of the server and of training, with and without it.

    python bench/batch_invariant.py [--threads 1] [--dtype bfloat16] [--repeats 20] [--json FILE]

The model has the shape of GPT-2 124M and random weights.

decode-1, decode-32   a step of the server with one new token in 1 or 32 sequences of 128 tokens
prefill-512           a step with a prompt of 512 tokens, logits of the last
score-512             the same with the log-probability of every token
train                 forward and backward of 2 samples of 512 tokens, without optimizer

Both ways are in one process and take turns; the fewest CPU seconds of all threads count, since other work can
only add to them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mega_model.attention_backends import PackedAttention
from mega_model.batch_invariant_attention import BatchInvariantAttention
from mega_model.build import build_model, fill_weights
from mega_model.init import initial_values
from mega_model.kernels.dispatch import choose_batch_invariant_kernels, choose_kernels
from mega_model.kernels.numba import load_kernels
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.spec import gpt
from mega_serve.engine.interfaces import Chunk
from mega_serve.execution.model_runner import RunnerOptions, TorchModelRunner
from mega_serve.execution.packed_weights import WeightDtype
from mega_serve.execution.weight_loading import compute_dtype, fill_model
from mega_train.engine.train import tune_malloc

SPEC = gpt(layers=12, hidden=768, heads=12, vocab=50257, max_seq_len=1024)
CONTEXT = 128
PAGE = 16
WAYS = {"default": False, "invariant": True}
Work = Callable[[], object]


def server_steps(dtype: WeightDtype, invariant: bool) -> dict[str, Work]:
    """Return the steps of the server."""
    rt = Runtime.single_process(SPEC, dtype=compute_dtype(dtype))
    read = initial_values(table(SPEC), seed=1)
    model = fill_model(rt, read, dtype=dtype, kernels=load_kernels(), batch_invariant=invariant)
    runner = TorchModelRunner(model, RunnerOptions(kv_memory=1 << 29, batch_invariant=invariant))
    per_row = CONTEXT // PAGE + 1
    chunks = [Chunk([7 * i + 1], CONTEXT, list(range(i * per_row, (i + 1) * per_row)), 0) for i in range(32)]
    prompt = [(37 * i) % 50_000 for i in range(512)]
    pages = list(range(32))
    prefill = Chunk(prompt, 0, pages, 511)
    score = Chunk(prompt, 0, pages, 512, prompt[1:])
    return {
        "decode-1": lambda: runner.run(chunks[:1]),
        "decode-32": lambda: runner.run(chunks),
        "prefill-512": lambda: runner.run([prefill]),
        "score-512": lambda: runner.run([score]),
    }


def training_step(dtype: WeightDtype, invariant: bool) -> Work:
    """Return forward and backward of a micro-batch."""
    rt = Runtime.single_process(SPEC, dtype=compute_dtype(dtype))
    cpu = torch.device("cpu")
    choice = choose_kernels("auto", cpu)
    if invariant:
        choice = choose_batch_invariant_kernels(cpu, rt.dtype, package="mega-train")
    rt = replace(rt, kernels=choice.kernels)
    model = build_model(rt)
    fill_weights(model, initial_values(table(SPEC), seed=1), rt)
    for weight in model.parameters():
        main_grad = torch.zeros(weight.shape)
        rt.weight_gradients.register_main_grad(weight, lambda main_grad=main_grad: main_grad)
    rows, length = 2, 512
    token, target = torch.randint(50_000, (2, rows * length), generator=torch.Generator().manual_seed(1))
    position = torch.arange(length).repeat(rows)
    attention = rt.kernels.attention

    def step() -> None:
        if invariant:
            attend: Any = BatchInvariantAttention(load_kernels(), rows, length, attention=attention)
        else:
            attend = PackedAttention(rows, length, attention=attention)
        (model(token, position, attend, target_T=target) / token.numel()).backward()

    return step


def measure(ways: dict[str, Work], repeats: int) -> dict[str, float]:
    """Return the least CPU milliseconds of each way, and their ratio."""
    least = dict.fromkeys(ways, float("inf"))
    for round_number in range(repeats + 1):
        for way, work in ways.items():
            began = time.process_time()
            work()
            if round_number:  # the first compiles and fills caches
                least[way] = min(least[way], 1e3 * (time.process_time() - began))
    figures = {f"{way}_ms": round(value, 2) for way, value in least.items()}
    return figures | {"ratio": round(least["invariant"] / least["default"], 3)}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tune_malloc()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {args.threads} threads",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "dtype": args.dtype,
        "load_before": list(os.getloadavg()),
    }
    steps = {way: server_steps(args.dtype, invariant) for way, invariant in WAYS.items()}
    for name in steps["default"]:
        repeats = args.repeats if name.startswith("decode") else max(2, args.repeats // 4)
        result[name] = measure({way: steps[way][name] for way in WAYS}, repeats)
        print(name, result[name], flush=True)
    steps.clear()
    training = {way: training_step(args.dtype, invariant) for way, invariant in WAYS.items()}
    result["train"] = measure(training, max(2, args.repeats // 6))
    print("train", result["train"], flush=True)
    result["load_after"] = list(os.getloadavg())
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
