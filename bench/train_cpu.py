"""Benchmark a training step on a CPU against other programs, each in its best configuration.

    python bench/train_cpu.py [--dtype fp32] [--threads 1 2] [--rounds 3] [--steps 6] [--ways ours ...]
                              [--json RESULT]

GPT of 6 layers, hidden 384, 6 heads, vocabulary 50,304, sequence 512, micro-batch 4: forward, backward,
clipping, AdamW, on the same tokens. The peers:

hf-compile     Hugging Face's GPT-2 and its loss in one torch.compile
plain-compile  a GPT of a few lines of torch (below) and its loss in one torch.compile, as nanoGPT runs
megatron-core  Megatron Core's local layers and its defaults, torch.compile for what it fuses among them; left
               out where it is not installed

Every process, ours and theirs, gets the allocator settings that mega-train gives itself
(`mega_train.engine.train.keep_freed_memory`), since anyone can have them. AdamW is torch's fused kernel for
all but Megatron Core, which has torch's default one.

fp32 is float32 in all. bf16 is autocast with float32 weights in the compiled peers, and bfloat16 weights with
float32 main weights in ours and Megatron Core's. What becomes of a weight gradient then differs, and the
field `weight_gradients` says it: autocast and Megatron Core without Apex round it to bfloat16, ours does not
by default (`ours`), and does with --no-gradient-accumulation-fusion (`ours-rounded`). `ours-recompute` is the
default with --recompute-granularity selective --recompute-modules layernorm mlp_act. Only `ours-rounded`
does the same work as the peers. Where the CPU lacks bfloat16 instructions, peers emulate them and ours
computes in float32: the comparison says nothing then, and --dtype bf16 is refused.

Each way is a process of its own, started in turn, `rounds` times for each number of threads. The least CPU
time (user and system, all threads) and the least wall-clock time of a step count, as other work on the
machine only adds to both. Memory is the peak of the process, the least of the rounds: whole, and with what
its imports took taken off. All begin near ln 50,304 = 10.83, each from random weights of its own
(`gpt2_comparison.py` and `tests/megatron_core` hold the losses of equal weights against each other).

`products` is the time of the step's matrix products alone at the best rate torch reaches for this model's
shapes, measured in the same run: 6 FLOPs per parameter of a matrix and token, and attention's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
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
from gpu.peers import is_installed, megatron_core
from torch import Tensor, nn

from mega_train.engine.train import tune_malloc

LAYERS, HIDDEN, HEADS, VOCAB, LENGTH, MICRO = 6, 384, 6, 50304, 512, 4
TOKENS = LENGTH * MICRO
HF, PLAIN, MEGATRON = "hf-compile", "plain-compile", "megatron-core"
COMPILED = (HF, PLAIN)
PEERS = (*COMPILED, MEGATRON)
OURS = ("ours", "ours-rounded", "ours-recompute")

Step = Callable[[], float]


def peak_mb() -> float:
    """Return the peak resident memory of this process in MB, without that of its parent."""
    status = Path("/proc/self/status").read_text("utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def flops() -> float:
    """Return the FLOPs of the matrix products of one step, forward and backward, with causal attention."""
    per_layer = 12 * HIDDEN * HIDDEN
    attention = LAYERS * 2 * (LENGTH / 2) * HIDDEN * 2
    return TOKENS * (6 * (LAYERS * per_layer + VOCAB * HIDDEN) + 3 * attention)


def batches() -> np.ndarray:
    """(64, MICRO, LENGTH + 1) ids, their frequencies as words' (Zipf's law)."""
    rng = np.random.default_rng(1)
    return rng.zipf(1.3, (64, MICRO, LENGTH + 1)).clip(1, VOCAB).astype(np.int64) - 1


def mega_step(dtype: str, *, rounded: bool, recompute: bool = False) -> tuple[Step, float]:
    """Build a step of mega-train, which returns its loss; and the peak memory before the model was built."""
    from mega_model.distributed.mesh import Mesh, World
    from mega_schema.app.config import load_config
    from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, IndexedWriter
    from mega_schema.tokenizer.tokenizer import open_tokenizer
    from mega_train.config import RunConfig
    from mega_train.engine.train import prepare
    from mega_train.engine.trainer import Trainer

    before = peak_mb()
    folder = Path(tempfile.mkdtemp())
    identity = open_tokenizer("NullTokenizer", vocab_size=VOCAB - 1).identity
    with IndexedWriter(folder / "data", np.dtype("uint16"), DatasetInfo(identity)) as out:
        for row in batches().reshape(-1, LENGTH + 1):
            out.add(row)
            out.end_document()
    settings = {
        "model.num_layers": LAYERS, "model.hidden_size": HIDDEN, "model.num_attention_heads": HEADS,
        "model.make_vocab_size_divisible_by": 1, "batch.seq_length": LENGTH, "batch.micro_batch_size": MICRO,
        "train.train_iters": 50, "optimizer.lr": 0.0003, "train.bf16": str(dtype == "bf16").lower(),
        "train.gradient_accumulation_fusion": str(not rounded).lower(), "evaluation.eval_iters": 0,
        "optimizer.weight_decay": 0.1, "data.split": '"100,0,0"', "data.data_path": folder / "data",
    }  # fmt: skip
    if recompute:
        settings |= {
            "recompute.recompute_granularity": "selective",
            "recompute.recompute_modules": ["layernorm", "mlp_act"],
        }
    run = load_config(RunConfig, None, {}, [f"{key}={value}" for key, value in settings.items()])
    ready = prepare(run, "gpt", World())
    trainer = Trainer(ready.config, Mesh.join(ready.config.layout, World()), IndexedDataset(folder / "data"))
    return lambda: trainer.step(3e-4)[0], before


class Block(nn.Module):
    """One layer of the plain GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x_BSD: Tensor) -> Tensor:
        heads = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x_BSD)).chunk(3, -1)
        )
        y_BNSH = F.scaled_dot_product_attention(*heads, is_causal=True)
        x_BSD = x_BSD + self.out(y_BNSH.transpose(1, 2).flatten(2))
        return x_BSD + self.down(F.gelu(self.up(self.norm2(x_BSD)), approximate="tanh"))


class Plain(nn.Module):
    """A GPT-2 of a few lines: learned positions, head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, token_BS: Tensor) -> Tensor:
        place_S = torch.arange(token_BS.shape[1])
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(token_BS) + self.position(place_S))))
        return logits


def compiled_peer(model: nn.Module, logits: Callable[[Tensor], Tensor], dtype: str) -> Step:
    """Build a step of a model with compiled forward pass and loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    data = itertools.cycle(torch.from_numpy(batches()))

    @torch.compile
    def loss_of(token_BS1: Tensor) -> Tensor:
        return F.cross_entropy(logits(token_BS1[:, :-1]).flatten(0, 1), token_BS1[:, 1:].flatten())

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = loss_of(next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def plain(dtype: str) -> tuple[Step, float]:
    """Build a step of the plain GPT, as `mega_step`."""
    before = peak_mb()
    model = Plain()
    return compiled_peer(model, model, dtype), before


def hugging_face(dtype: str) -> tuple[Step, float]:
    """Build a step of `transformers`' GPT-2, as `mega_step`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    before = peak_mb()
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config).train()
    return compiled_peer(model, lambda token_BS: model(input_ids=token_BS).logits, dtype), before


def megatron(dtype: str) -> tuple[Step, float]:
    """Build a step of Megatron Core, as `mega_step`."""
    warnings.filterwarnings("ignore", module=r"megatron\.")  # it warns of what it would prefer
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401  # what importing takes is not the model's memory

    from mega_schema.spec import gpt

    before = peak_mb()
    spec = gpt(layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, max_seq_len=LENGTH)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    step = megatron_core(spec, torch.device("cpu"), compiled=True, dtype=kind)
    data = itertools.cycle(torch.from_numpy(batches()))
    return lambda: step(next(data)).item(), before


def products(dtype: str) -> float:
    """Measure the CPU seconds of the step's products at torch's best rate among the shapes of this model."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    best = 0.0
    for inner, outer in ((HIDDEN, 3 * HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, VOCAB)):
        x, w = torch.randn(TOKENS, inner, dtype=kind), torch.randn(outer, inner, dtype=kind)
        y = torch.empty(TOKENS, outer, dtype=kind)
        least = min(run_timed(lambda x=x, w=w, y=y: torch.mm(x, w.t(), out=y))[0] for _ in range(5))
        best = max(best, 2 * TOKENS * inner * outer / least)
    return flops() / best


def run_timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return CPU seconds of all threads, and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def child(way: str, dtype: str, steps: int) -> dict[str, float]:
    """Measure one variant in this process."""
    tune_malloc()
    if way == "products":
        return {"cpu_s": products(dtype)}
    build: dict[str, Callable[[str], tuple[Step, float]]] = {
        HF: hugging_face,
        PLAIN: plain,
        MEGATRON: megatron,
        "ours": lambda kind: mega_step(kind, rounded=False),
        "ours-rounded": lambda kind: mega_step(kind, rounded=True),
        "ours-recompute": lambda kind: mega_step(kind, rounded=False, recompute=True),
    }
    step, before = build[way](dtype)
    first = step()
    step()
    times = [run_timed(step) for _ in range(steps)]
    return {
        "first_loss": first,
        "cpu_s": min(cpu for cpu, _ in times),
        "wall_s": min(wall for _, wall in times),
        "peak_mb": peak_mb(),
        "memory_mb": peak_mb() - before,
    }


def start(way: str, dtype: str, steps: int, threads: int) -> dict[str, float]:
    """Measure one variant in a separate process."""
    words = ["--child", way, "--dtype", dtype, "--steps", steps, "--threads", threads]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, *map(str, words)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return dict(json.loads(process.stdout.splitlines()[-1]))


def weight_gradients(way: str, dtype: str) -> str:
    """Return the precision in which weight gradients of a micro-batch are added to the float32 sum."""
    return "float32" if dtype == "fp32" or way in ("ours", "ours-recompute") else "bfloat16"


def summary(rounds: list[dict[str, dict[str, float]]], dtype: str) -> dict[str, Any]:
    """Return the best time of every variant, and ours against the fastest compiled peer."""
    best = {
        way: {key: min(round_times[way][key] for round_times in rounds) for key in rounds[0][way]}
        for way in rounds[0]
    }
    floor = best.pop("products")["cpu_s"]
    fastest = min(COMPILED, key=lambda way: best[way]["cpu_s"])
    table: dict[str, Any] = {"products_cpu_s": round(floor, 3), "fastest_compiled": fastest}
    for way, least in best.items():
        table[way] = {
            "weight_gradients": weight_gradients(way, dtype),
            "cpu_s_per_step": round(least["cpu_s"], 3),
            "wall_s_per_step": round(least["wall_s"], 3),
            "tokens_per_s": round(TOKENS / least["wall_s"]),
            "peak_mb": round(least["peak_mb"]),
            "memory_mb": round(least["memory_mb"]),
            "first_loss": round(least["first_loss"], 4),
        }
    for way in best:
        if way in OURS:
            table[f"{way}_over_{fastest}"] = {
                "speed_cpu": round(best[fastest]["cpu_s"] / best[way]["cpu_s"], 3),
                "speed_wall": round(best[fastest]["wall_s"] / best[way]["wall_s"], 3),
                "peak": round(best[way]["peak_mb"] / best[fastest]["peak_mb"], 3),
                "memory": round(best[way]["memory_mb"] / best[fastest]["memory_mb"], 3),
            }
    return table


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", choices=[*OURS, *PEERS], nargs="+", default=[*OURS, *PEERS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=[*OURS, *PEERS, "products"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        torch.set_num_threads(args.threads[0])
        print(json.dumps(child(args.child, args.dtype, args.steps)))
        return
    native = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if args.dtype == "bf16" and not native:
        parser.error("--dtype bf16: this CPU has no bfloat16 instructions, so the peers would emulate them")
    left_out = {"ours-rounded"} if args.dtype == "fp32" else set()
    left_out |= set() if is_installed("megatron.core") else {MEGATRON}
    ways = [way for way in dict.fromkeys([*args.ways, *COMPILED]) if way not in left_out]
    table: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python bench/train_cpu.py " + " ".join(sys.argv[1:]),
        "machine": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": native,
        "torch": torch.__version__,
        "dtype": args.dtype,
        "load_before": list(os.getloadavg()),
    }
    for threads in args.threads:
        rounds = [
            {way: start(way, args.dtype, args.steps, threads) for way in (*ways, "products")}
            for _ in range(args.rounds)
        ]
        table[f"threads_{threads}"] = summary(rounds, args.dtype)
    text = json.dumps(table, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", "utf-8")


def processor_name() -> str:
    """Return model, family and number of the CPUs."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    names = f"{fields.get('model name', platform.machine())}, family {fields.get('cpu family')}"
    names += f" model {fields.get('model')}"
    return f"{names}, {os.cpu_count()} processors"


if __name__ == "__main__":
    main()
