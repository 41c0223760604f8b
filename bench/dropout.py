"""Benchmark dropout by a hash of the element (`mega_model.dropout`) against torch's, forward and backward.

    python bench/dropout.py [--pairs 5] [--json FILE]

Ours drops the same elements on every layout and keeps no mask; torch's draws from one stream and keeps one.
Prints median and spread of the CPU seconds of both, and the median of the ratios pair by pair (below 1: ours
is faster).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout, token_keys
from mega_train.engine.train import tune_malloc

SHAPES = ((12, 128, 192), (4, 1024, 768))  # samples, tokens in one, width: the demo's model, and GPT-2's


def seconds(drop: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Measure the CPU seconds of one forward and backward pass."""
    for _ in range(2):
        drop(x).backward(x)
    began = time.process_time()
    for _ in range(10):
        drop(x).backward(x)
    return (time.process_time() - began) / 10


def compare(samples: int, length: int, width: int, pairs: int) -> dict[str, object]:
    """Measure ours and torch's alternately."""
    x = torch.randn(samples * length, width, requires_grad=True)
    hashed = Dropout(0.1, 0.0, token_keys(1, range(samples), torch.arange(length)), Axis("tp"))
    ours, others = [], []
    for _ in range(pairs):
        ours.append(seconds(lambda x: hashed("layers.0.out", x), x))
        others.append(seconds(lambda x: F.dropout(x, 0.1), x))
    ratio = statistics.median(a / b for a, b in zip(ours, others, strict=True))
    name = f"{samples} x {length} x {width}"
    for label, values in (("ours", ours), ("torch", others)):
        spread = f"{1e3 * min(values):.2f} to {1e3 * max(values):.2f}"
        print(f"{name:16}  {label:6} {1e3 * statistics.median(values):8.2f} ms  ({spread})")
    print(f"{name:16}  ratio  {ratio:8.2f}")
    return {"name": name, "ours": ours, "other": others, "ratio": ratio}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()
    print(f"{platform.machine()}, torch {torch.__version__}, {args.pairs} pairs, CPU seconds, one thread")
    results = [compare(*shape, args.pairs) for shape in SHAPES]
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
