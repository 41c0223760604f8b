"""A training step on a CPU: ours, Hugging Face's GPT-2 eager and compiled, and Megatron Core's, in one run.

    python bench/train_cpu.py [--dtype bf16] [--rounds 3] [--steps 6] [--threads 2] [--json RESULT]

GPT of 6 layers, hidden 384, 6 heads, vocabulary 50,304, sequence 512, micro-batch 4: forward, backward,
clipping, AdamW, on the same tokens. bf16 is bfloat16 with float32 main weights, and autocast in Hugging
Face's; fp32 is float32 in all. Autocast rounds weight gradients to bfloat16, Megatron Core without Apex does,
and ours does not, so in bf16 ours is measured with that too (`ours-rounded`:
--no-gradient-accumulation-fusion). Megatron Core, where it is installed, has its local layers and its
defaults, torch.compile for what it fuses among them. Each way is a process of its own, started in turn,
`rounds` times; the quickest step counts, as the others were held up by something. All begin near ln 50,304 =
10.83, each from random weights of its own (`beside_gpt2.py` and `tests/megatron_core` hold the losses of
equal weights against each other).

The share is of the rate torch itself reaches in matrix products of that precision on this machine, the best
of this model's shapes, measured in the same run: the products of a step (6 per parameter of a matrix and
token, and attention's) over its time. Where the CPU lacks instructions for bfloat16 our products are in
float32, and the share can pass 100 %. Memory is the peak of the process, with torch itself (its imports)
taken off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu.peers import installed, megatron_core

LAYERS, HIDDEN, HEADS, VOCAB, LENGTH, MICRO = 6, 384, 6, 50304, 512, 4
TOKENS = LENGTH * MICRO
MEGATRON = "megatron-core"
THEIRS = ("hf-eager", "hf-compile", MEGATRON)
WAYS = ("ours", "ours-rounded", *THEIRS)


def peak_mb() -> float:
    """Most memory this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def flops() -> float:
    """Of the matrix products of one step, forward and backward; attention's causal half alone."""
    per_layer = 12 * HIDDEN * HIDDEN
    attention = LAYERS * 2 * (LENGTH / 2) * HIDDEN * 2
    return TOKENS * (6 * (LAYERS * per_layer + VOCAB * HIDDEN) + 3 * attention)


def batches() -> np.ndarray:
    """(64, MICRO, LENGTH + 1) ids, their frequencies as words' (Zipf's law)."""
    rng = np.random.default_rng(1)
    return rng.zipf(1.3, (64, MICRO, LENGTH + 1)).clip(1, VOCAB).astype(np.int64) - 1


def ours(dtype: str, *, rounded: bool = False) -> tuple[Callable[[], float], float]:
    """One step of ours, which gives its loss; and the peak of memory before it was made."""
    from mega_model.mesh import Mesh, World
    from mega_schema.config import load
    from mega_schema.indexed import DatasetInfo, IndexedDataset, IndexedWriter
    from mega_schema.tokenizer import open_tokenizer
    from mega_train.config import Run
    from mega_train.launch import keep_freed_memory, prepare
    from mega_train.trainer import Trainer

    before = peak_mb()
    folder = Path(tempfile.mkdtemp())
    identity = open_tokenizer("NullTokenizer", vocab_size=VOCAB - 1).identity
    with IndexedWriter(folder / "data", np.dtype("uint16"), DatasetInfo(identity)) as out:
        for row in batches().reshape(-1, LENGTH + 1):
            out.add(row)
            out.end_document()
    settings = {
        "model.layers": LAYERS, "model.hidden": HIDDEN, "model.heads": HEADS, "model.vocab_multiple": 1,
        "batch.length": LENGTH, "batch.micro": MICRO, "train.iterations": 50, "optimizer.lr": 0.0003,
        "train.bf16": str(dtype == "bf16").lower(),
        "train.rounded_weight_gradients": str(rounded).lower(), "evaluation.iterations": 0,
        "optimizer.weight_decay": 0.1, "data.split": '"100,0,0"', "data.path": folder / "data",
    }  # fmt: skip
    run = load(Run, None, {}, [f"{key}={value}" for key, value in settings.items()])
    keep_freed_memory()
    ready = prepare(run, "gpt", World())
    trainer = Trainer(ready.plan, Mesh.join(ready.plan.layout, World()), IndexedDataset(folder / "data"))
    return lambda: trainer.step(3e-4)[0], before


def hugging_face(dtype: str, *, compiled: bool) -> tuple[Callable[[], float], float]:
    """One step of theirs, as `ours`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    before = peak_mb()
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    forward = torch.compile(model) if compiled else model
    data, number = torch.from_numpy(batches()), 0

    def step() -> float:
        nonlocal number
        tokens = data[number % len(data)]
        number += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = forward(input_ids=tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, before


def megatron(dtype: str) -> tuple[Callable[[], float], float]:
    """One step of Megatron Core, as `ours`."""
    warnings.filterwarnings("ignore", module=r"megatron\.")  # it tells of what it would rather have
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401  # what importing takes is not the model's memory

    from mega_schema.spec import gpt

    before = peak_mb()
    spec = gpt(layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, context=LENGTH)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    step = megatron_core(spec, torch.device("cpu"), compiled=True, dtype=kind)
    data = itertools.cycle(torch.from_numpy(batches()))
    return lambda: step(next(data)).item(), before


def products(dtype: str) -> float:
    """FLOP/s of torch's quickest product among the shapes of this model."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    best = 0.0
    for inner, outer in ((HIDDEN, 3 * HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, VOCAB)):
        x, w = torch.randn(TOKENS, inner, dtype=kind), torch.randn(outer, inner, dtype=kind)
        seconds = min(_timed(lambda x=x, w=w: F.linear(x, w))[0] for _ in range(5))
        best = max(best, 2 * TOKENS * inner * outer / seconds)
    return best


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def child(way: str, dtype: str, steps: int) -> dict[str, float]:
    """What one way does in this process."""
    if way == "products":
        return {"flops": products(dtype)}
    if way == MEGATRON:
        step, before = megatron(dtype)
    elif way in THEIRS:
        step, before = hugging_face(dtype, compiled=way == "hf-compile")
    else:
        step, before = ours(dtype, rounded=way == "ours-rounded")
    first = step()
    step()
    cpu = time.process_time()
    seconds = [_timed(step)[0] for _ in range(steps)]
    cpu = (time.process_time() - cpu) / steps
    return {"first_loss": first, "seconds": min(seconds), "cpu_seconds": cpu, "memory_mb": peak_mb() - before}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=[*WAYS, "products"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.child:
        print(json.dumps(child(given.child, given.dtype, given.steps)))
        return

    def run(way: str) -> dict[str, float]:
        words = ["--child", way, "--dtype", given.dtype, "--steps", given.steps, "--threads", given.threads]
        command = [sys.executable, __file__, *map(str, words)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))

    left_out = {"ours-rounded"} if given.dtype == "fp32" else set()
    left_out |= set() if installed("megatron.core") else {MEGATRON}
    ways = [way for way in WAYS if way not in left_out]
    rounds = [{way: run(way) for way in (*ways, "products")} for _ in range(given.rounds)]
    rate = max(each["products"]["flops"] for each in rounds)
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    table: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {given.threads} threads",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": native,
        "torch": torch.__version__,
        "dtype": given.dtype,
        "products_gflops": round(rate / 1e9, 1),
    }
    for way in ways:
        seconds = min(each[way]["seconds"] for each in rounds)
        table[way] = {
            "tokens_per_s": round(TOKENS / seconds),
            "cpu_s_per_step": round(min(each[way]["cpu_seconds"] for each in rounds), 3),
            "share_of_products": round(flops() / seconds / rate, 3),
            "memory_mb": round(max(each[way]["memory_mb"] for each in rounds)),
            "first_loss": round(rounds[0][way]["first_loss"], 4),
        }
    theirs = [way for way in ways if way in THEIRS]
    for way in ways:
        for other in theirs if way not in THEIRS else ():
            ratio = table[way]["tokens_per_s"] / table[other]["tokens_per_s"]
            table[f"{way}_over_{other}"] = round(ratio, 2)
    text = json.dumps(table, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
