"""Benchmark two CPU optimizations against runs without them.

    python bench/cpu_optimizations.py [--pairs 5] [--json FILE]

allocator   training steps of the demo's model with glibc keeping freed memory (what `mega-train` sets),
            against glibc's defaults; a new process each time, in turn
attention forward and backward of attention in bfloat16 through float32 (what
            `mega_model.attention_backends` does on a CPU), against torch's own bfloat16; in one process, in
            turn

Prints median and spread of the CPU seconds of both, and the median of the ratios pair by pair (below 1: ours
is faster). CPU seconds, since other work on the machine lengthens the wall's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from mega_model.attention_backends import PackedAttention
from mega_model.distributed.mesh import Mesh, World
from mega_schema.app.config import load_config
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, IndexedWriter
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.config import RunConfig
from mega_train.engine.train import prepare, tune_malloc
from mega_train.engine.trainer import Trainer

STEPS = 10
MODEL = (
    "model.num_layers=4", "model.hidden_size=192", "model.num_attention_heads=6",
    "model.ffn_hidden_size=512", "model.normalization=RMSNorm", "model.swiglu=true",
    "model.position_embedding_type=rope", "model.disable_bias_linear=true", "batch.seq_length=128",
    "batch.micro_batch_size=12", "train.train_iters=100", "train.bf16=true", "optimizer.lr=0.001",
    "evaluation.eval_iters=0",
)  # fmt: skip


def steps(folder: Path, *, keep: bool) -> float:
    """Measure the CPU seconds of a training step, in this process."""
    torch.set_num_threads(1)
    if keep:
        tune_malloc()
    ready = prepare(
        load_config(RunConfig, None, {}, [*MODEL, f"data.data_path={folder / 'data'}"]), "gpt", World()
    )
    trainer = Trainer(ready.config, Mesh.join(ready.config.layout, World()), IndexedDataset(folder / "data"))
    for _ in range(3):
        trainer.step(1e-3)
    began = time.process_time()
    for _ in range(STEPS):
        trainer.step(1e-3)
    return (time.process_time() - began) / STEPS


def write_corpus(folder: Path) -> None:
    """Write random ids of a vocabulary of 4,096; their values do not change times."""
    identity = open_tokenizer("NullTokenizer", vocab_size=4095).identity
    rng = np.random.default_rng(1)
    with IndexedWriter(folder / "data", np.dtype("uint16"), DatasetInfo(identity)) as out:
        for _ in range(500):
            out.add(rng.integers(0, 4096, 1000))
            out.end_document()


def attention(ours: bool) -> float:
    """Measure the CPU seconds of one forward and backward pass: 12 rows of 128 tokens, 6 heads of 32."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(12 * 128, 6, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    packed = PackedAttention(12, 128)

    def run_once() -> None:
        if ours:
            out = packed(0, q, k, v)
        else:
            rows = (x.unflatten(0, (12, 128)).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(*rows, is_causal=True)
        out.sum().backward()

    for _ in range(3):
        run_once()
    began = time.process_time()
    for _ in range(20):
        run_once()
    return (time.process_time() - began) / 20


def compare(name: str, run: Callable[[bool], float], pairs: int) -> dict[str, object]:
    """Measure both variants alternately."""
    ours, others = [], []
    for _ in range(pairs):
        ours.append(run(True))
        others.append(run(False))
    ratio = statistics.median(a / b for a, b in zip(ours, others, strict=True))
    for label, values in (("ours", ours), ("other", others)):
        spread = f"{1e3 * min(values):.1f} to {1e3 * max(values):.1f}"
        print(f"{name:10}  {label:6} {1e3 * statistics.median(values):8.1f} ms  ({spread})")
    print(f"{name:10}  ratio  {ratio:8.2f}")
    return {"name": name, "ours": ours, "other": others, "ratio": ratio}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=["ours", "other"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(steps(args.folder, keep=args.child == "ours"))
        return
    print(f"{platform.machine()}, torch {torch.__version__}, {args.pairs} pairs, CPU seconds, one thread")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)

        def child(ours: bool) -> float:
            words = ["--child", "ours" if ours else "other", "--folder", str(folder)]
            process = subprocess.run(
                [sys.executable, __file__, *words], capture_output=True, text=True, check=True
            )
            return float(process.stdout)

        results = [compare("allocator", child, args.pairs), compare("attention", attention, args.pairs)]
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
