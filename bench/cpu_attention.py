"""Benchmark attention on a CPU against torch's.

    python bench/cpu_attention.py [--dtype bf16] [--rounds 3] [--threads 1] [--json FILE]

torch           scaled_dot_product_attention of the tensors as they are
torch-float32   the same in float32, which `--kernels reference` takes
blocked         `mega_model.kernels.cpu_attention`, in torch's operations
c++             `mega_model.kernels.cpp`; left out where it cannot be compiled

Causal attention, forward and forward with backward, of tensors that lie as they do in a model. A new process
each time, in turn; the fewest CPU seconds count, since other work can only add to them. Memory is by how much
a forward pass raises what the process holds, which is what it keeps for backward.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.kernels import REFERENCE, cpp, cpu_attention
from mega_train.engine.train import tune_malloc

# rows, heads, key heads, tokens, width
SHAPES = (
    (4, 6, 6, 512, 64),
    (16, 6, 6, 128, 64),
    (1, 16, 16, 2048, 64),
    (1, 16, 4, 2048, 64),
    (1, 8, 8, 4096, 128),
)


def torchs(q: Tensor, k: Tensor, v: Tensor, _: object) -> Tensor:
    """Call torch's causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


WAYS = {
    "torch": torchs,
    "torch-float32": REFERENCE.attention,
    "blocked": cpu_attention.attention,
    "c++": cpp.attention,
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def child(way: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, float]:
    """Measure CPU milliseconds, and saved memory in MB."""
    tune_malloc()
    rows, heads, key_heads, tokens, width = shape
    packed = torch.randn(rows, tokens, heads + 2 * key_heads, width).to(dtype).requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in packed.split([heads, key_heads, key_heads], 2))
    grad = torch.randn(rows, tokens, heads, width).to(dtype).transpose(1, 2)
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() != packed.untyped_storage().data_ptr():
            saved[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        WAYS[way](q, k, v, "before")

    def forward() -> None:
        with torch.no_grad():
            WAYS[way](q, k, v, "before")

    def run_both() -> None:
        torch.autograd.grad(WAYS[way](q, k, v, "before"), packed, grad)

    return {
        "forward_ms": _quickest(forward),
        "forward_backward_ms": _quickest(run_both),
        "kept_mb": round(sum(saved.values()) / 1e6, 1),
    }


def _quickest(work: Callable[[], None]) -> float:
    work()
    seconds = []
    for _ in range(8):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return round(1e3 * min(seconds), 1)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(child(args.child[0], SHAPES[int(args.child[1])], DTYPES[args.dtype])))
        return

    ways = list(WAYS)
    try:
        cpp.build_overrides()
    except cpp.CompileError as error:
        print(f"c++ is left out: {error}", file=sys.stderr)
        ways.remove("c++")

    def run(way: str, number: int) -> dict[str, float]:
        words = ["--dtype", args.dtype, "--threads", str(args.threads), "--child", way, str(number)]
        command = [sys.executable, __file__, *words]
        return dict(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))

    table: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {args.threads} threads",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "torch": torch.__version__,
        "dtype": args.dtype,
        "load_before": list(os.getloadavg()),
    }
    for number, shape in enumerate(SHAPES):
        rounds = [{way: run(way, number) for way in ways} for _ in range(args.rounds)]
        name = "{} x {}/{} heads x {} x {}".format(*shape)
        table[name] = {way: {key: min(r[way][key] for r in rounds) for key in rounds[0][way]} for way in ways}
    text = json.dumps(table, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
