"""Benchmark recomputation: bytes saved by forward, and CPU seconds of forward and backward.

    python bench/recompute.py [--pairs 5] [--json FILE]

A GPT of 6 layers in float32, 2 samples of 512 tokens, with and without dropout. Every way is timed in turn
with keeping everything; the ratio is the median of the pairs (above 1: recomputing is slower, by as much).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout, token_keys
from mega_model.init import initial_values
from mega_model.recompute import RecomputedAttention
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.recompute_policy import KEEP_ALL, RecomputePolicy
from mega_schema.spec import gpt
from mega_train.engine.train import tune_malloc

SPEC = gpt(layers=6, hidden=256, heads=8, vocab=1000, max_seq_len=512)
ROWS, LENGTH = 2, 512
WAYS = (
    ("selective", RecomputePolicy("selective")),
    ("full", RecomputePolicy("full")),
    ("full by 3", RecomputePolicy("full", layers=3)),
    ("block of 3", RecomputePolicy("full", "block", 3)),
)


class Training:
    """A model, and one micro-batch of random tokens."""

    def __init__(self, recompute: RecomputePolicy, dropout: float) -> None:
        self.model: Decoder = build_model(
            dataclasses.replace(Runtime.single_process(SPEC), recompute=recompute)
        )
        fill_weights(self.model, initial_values(table(SPEC), 1))
        self.token_T = torch.randint(0, 1000, (ROWS * LENGTH,), generator=torch.Generator().manual_seed(1))
        self.place_T = torch.arange(LENGTH).repeat(ROWS)
        self.drop = Dropout(dropout, dropout, token_keys(1, range(ROWS), torch.arange(LENGTH)), Axis("tp"))
        attend = PackedAttention(ROWS, LENGTH, dropout=self.drop)
        self.attend = RecomputedAttention(attend) if recompute.granularity == "selective" else attend

    def forward(self) -> Tensor:
        scores: Tensor = self.model(self.token_T, self.place_T, self.attend, self.drop)
        return scores.square().mean()

    def saved_bytes(self) -> int:
        """Return the saved bytes, each storage once, without weights."""
        weights = {weight.untyped_storage().data_ptr() for weight in self.model.parameters()}
        storages = {}

        def pack(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            self.forward()
        return sum(s.nbytes() for pointer, s in storages.items() if pointer not in weights)

    def seconds(self) -> float:
        """Measure the CPU seconds of a forward and backward pass."""
        began = time.process_time()
        self.forward().backward()
        return time.process_time() - began


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()
    print(f"{platform.machine()}, torch {torch.__version__}, {args.pairs} pairs, CPU seconds, one thread")
    results = []
    for dropout in (0.0, 0.1):
        baseline = Training(KEEP_ALL, dropout)
        print(f"dropout {dropout}   {'keeps all':10} {baseline.saved_bytes() / 1e6:7.1f} MB")
        for name, recompute in WAYS:
            way = Training(recompute, dropout)
            for training in (baseline, way):
                training.seconds()
            pairs = [(way.seconds(), baseline.seconds()) for _ in range(args.pairs)]
            ratio = statistics.median(a / b for a, b in pairs)
            print(
                f"dropout {dropout}   {name:10} {way.saved_bytes() / 1e6:7.1f} MB"
                f"   {ratio:5.2f} times the time"
            )
            bytes_kept = {"kept": way.saved_bytes(), "kept_of_all": baseline.saved_bytes()}
            results.append({"dropout": dropout, "name": name, "pairs": pairs, "ratio": ratio, **bytes_kept})
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
