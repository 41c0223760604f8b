"""Benchmark a training step on a GPU: MFU, time by kind of kernel, and comparison with matrix products alone.

    python bench/gpu/step.py [gpt-1.3b] [llama-8b-4k] [llama-8b-8k] [--kernels auto] [--fp8] [--json FILE]
    python bench/gpu/step.py --smoke    on a CPU, tiny: shows that it runs, measures nothing

gpt-1.3b      24 layers of 2,048, sequence 2,048
llama-8b-4k   layers of Llama 3 8B, as many as fit beside float32 main weights, sequence 4,096
llama-8b-8k   the same, sequence 8,192

bfloat16, random tokens, no recomputation, clipping and AdamW included, one GPU. MFU is what the model needs
(`mega_train.planning.flops`) over 989 TFLOP/s, the dense bfloat16 peak of H100 and H200. Measured in the same
run: the rate of the model's own matrix products alone, forward and both backward, which no step can pass; and
unless --no-peers a step of the same shape of Hugging Face's model under torch.compile and of Megatron Core's,
with TransformerEngine's layers where that is installed, each with as many samples as fit it: half as many
again and again where memory runs out.

--fp8 makes the layers' products in FP8 (--fp8-format hybrid); the peak and the rate of products it is held
against stay those of bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import hugging_face, is_installed, megatron_core
from torch.profiler import ProfilerActivity, profile

from mega_model.distributed.mesh import Mesh, World
from mega_schema.app.config import load_config
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, IndexedWriter
from mega_schema.spec import Family
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.commands.plan import build_workload
from mega_train.config import RunConfig
from mega_train.engine.train import prepare
from mega_train.engine.trainer import Trainer
from mega_train.planning.flops import model_flops
from mega_train.planning.memory import peak_rank
from mega_train.resolve import ResolvedConfig

PEAK = 989e12
COMMON = ("train.bf16=true", "train.train_iters=1000", "optimizer.lr=0.0001", "evaluation.eval_iters=0")
GPT = (
    "model.num_layers=24",
    "model.hidden_size=2048",
    "model.num_attention_heads=16",
    "model.vocab_size=50304",
    "batch.seq_length=2048",
    "batch.micro_batch_size=8",
)
LLAMA = (
    "model.hidden_size=4096",
    "model.num_attention_heads=32",
    "model.num_query_groups=8",
    "model.ffn_hidden_size=14336",
    "model.vocab_size=128256",
)
CASES: dict[str, tuple[Family, tuple[str, ...]]] = {
    "gpt-1.3b": ("gpt", GPT),
    "llama-8b-4k": ("llama", (*LLAMA, "batch.seq_length=4096", "batch.micro_batch_size=2")),
    "llama-8b-8k": ("llama", (*LLAMA, "batch.seq_length=8192", "batch.micro_batch_size=1")),
    "smoke": (
        "gpt",
        (
            "model.num_layers=2",
            "model.hidden_size=64",
            "model.num_attention_heads=4",
            "model.vocab_size=512",
            "batch.seq_length=64",
        ),
    ),
}
PEERS = {"hugging_face": ("transformers", hugging_face), "megatron_core": ("megatron.core", megatron_core)}
# what a kernel's name says it does, the first that fits
KINDS = (
    ("attention", ("flash", "fmha", "cudnn_generated", "attention")),
    ("product", ("gemm", "nvjet", "cutlass", "matmul", "mm_", "cublas")),
    ("ours", ("_norm", "_bias_gelu", "_swiglu", "_turn", "_log_sum", "_gradient", "_dropped", "_softmax")),
    ("optimizer", ("multi_tensor", "adam")),
    ("copy", ("memcpy", "memset", "copy")),
)


def configure(name: str, kernels: str, data: Path, memory: float, *, fp8: bool) -> tuple[RunConfig, Family]:
    """Configure the run of a case, with as many layers as fit in `memory` bytes if it does not set them."""
    family, own = CASES[name]
    sets = [*own, *COMMON, f"train.kernels={kernels}", f"data.data_path={data}"]
    if fp8:
        sets.append('train.fp8_format="hybrid"')
    if any(parameter_name.startswith("model.num_layers") for parameter_name in own):
        return load_config(RunConfig, None, {}, sets), family
    for layers in range(32, 0, -1):
        run = load_config(RunConfig, None, {}, [*sets, f"model.num_layers={layers}"])
        if peak_rank(build_workload(run, family, 1)).total < memory:
            return run, family
    raise SystemExit(f"{name}: not one layer fits {memory / 2**30:.0f} GiB")


def write_corpus(prefix: Path, vocab: int) -> None:
    """Write two million random ids; their values do not change times."""
    identity = open_tokenizer("NullTokenizer", vocab_size=vocab - 1).identity
    rng = np.random.default_rng(1)
    with IndexedWriter(prefix, np.dtype("int32"), DatasetInfo(identity)) as out:
        for _ in range(100):
            out.add(rng.integers(0, vocab, 20_000))
            out.end_document()


def seconds(function: Callable[[], object], times: int) -> list[float]:
    """Return the seconds of each call, with the device idle before and after."""
    durations = []
    for _ in range(times):
        _wait()
        began = time.perf_counter()
        function()
        _wait()
        durations.append(time.perf_counter() - began)
    return durations


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def product_rate(trainer: Trainer, times: int) -> float:
    """Measure the FLOP/s of the step's weight products alone: forward, and backward with float32 sums."""
    tokens, total, spent = trainer.config.micro_batch_size * trainer.config.seq_length, 0.0, 0.0
    device, dtype = trainer.mesh.device, trainer.rt.dtype
    shapes = Counter(tuple(weight.shape) for row, weight in trainer.params if len(row.shape) == 2)
    for (out, into), count in shapes.items():
        x, w = (torch.randn(n, into, device=device, dtype=dtype) for n in (tokens, out))
        y = torch.randn(tokens, out, device=device, dtype=dtype)
        for call in (lambda x=x, w=w: x @ w.t(), lambda y=y, w=w: y @ w, lambda x=x, y=y: y.t() @ x):
            call()
            spent += count * statistics.median(seconds(call, times))
            total += count * 2.0 * tokens * out * into
    return total / spent


def split(step: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of a step's kernels on the device by kind; unknown kinds are "other"."""
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        step()
        _wait()
    kinds: Counter[str] = Counter()
    for event in profiled.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS if any(word in name for word in words)), "other")
        kinds[kind] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
    return dict(kinds.most_common())


def peer(name: str, plan: ResolvedConfig, device: torch.device, steps: int) -> dict[str, Any]:
    """Measure tokens per second of another program, with the largest micro-batch up to ours that fits."""
    module, build = PEERS[name]
    if not is_installed(module):
        return {"missing": module}
    micro = plan.micro_batch_size
    while micro:
        gc.collect()
        try:
            step = build(plan.spec, device, compiled=device.type == "cuda")
            tokens = torch.randint(plan.spec.vocab, (micro, plan.seq_length + 1), device=device)
            seconds(lambda step=step, tokens=tokens: step(tokens), 3)
            durations = seconds(lambda step=step, tokens=tokens: step(tokens), steps)
        except torch.cuda.OutOfMemoryError:
            micro //= 2
            step = tokens = None
            continue
        return {"micro": micro, "tokens_per_second": micro * plan.seq_length / statistics.median(durations)}
    return {"missing": "memory for one sample"}


def measure(name: str, kernels: str, steps: int, *, peers: bool, fp8: bool = False) -> dict[str, Any]:
    """Measure one case in this process."""
    cuda = torch.cuda.is_available()
    memory = 0.92 * torch.cuda.get_device_properties(0).total_memory if cuda else math.inf
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        run, family = configure(name, kernels, data, memory, fp8=fp8)
        assert run.model.vocab is not None
        write_corpus(data, run.model.vocab)
        ready = prepare(run, family, World())
        mesh = Mesh.join(ready.config.layout, World(), device=ready.config.device)
        trainer = Trainer(ready.config, mesh, IndexedDataset(data))
        seconds(lambda: trainer.step(1e-4), 3)  # compiles, and finds its memory
        durations = seconds(lambda: trainer.step(1e-4), steps)
        kinds = split(lambda: trainer.step(1e-4))
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        rate = product_rate(trainer, steps)
    needed, median = model_flops(build_workload(run, family, 1)), statistics.median(durations)
    tokens = ready.config.global_batch_size * ready.config.seq_length
    result = {
        "case": name,
        "fp8": run.train.fp8,
        "kernels": trainer.kernel_choice.summary,
        "layers": ready.config.spec.layers,
        "tokens_per_second": tokens / median,
        "step_seconds": [min(durations), median, max(durations)],
        "tflops": needed / median / 1e12,
        "mfu": needed / median / PEAK,
        "product_tflops": rate / 1e12,
        "of_products": needed / median / rate,
        "seconds_by_kind": kinds,
        "peak_gib": peak / 2**30,
    }
    print(
        f"{name}: {ready.config.spec.layers} layers, {'FP8, ' * fp8}"
        f"kernels of {trainer.kernel_choice.summary}"
    )
    print(f"  {tokens / median:,.0f} tokens/s, {1e3 * median:.1f} ms a step, peak {peak / 2**30:.1f} GiB")
    print(f"  {needed / median / 1e12:.1f} TFLOP/s, MFU {100 * needed / median / PEAK:.1f} % of 989")
    share = f"the step has {100 * needed / median / rate:.1f} % of that"
    print(f"  products alone {rate / 1e12:.1f} TFLOP/s: {share}")
    for kind, its in kinds.items():
        print(f"  {kind:10} {1e3 * its:9.2f} ms")
    if peers:
        plan, device = ready.config, trainer.mesh.device
        del trainer  # its memory is for the other
        for name in PEERS:
            result[name] = peer(name, plan, device, steps)
            print(f"  {name}: {result[name]}")
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("no GPU here: --smoke shows on a CPU that this runs")
    real = [name for name in CASES if name != "smoke"]
    names = ["smoke"] if args.smoke else args.cases or real
    steps, peers = 2 if args.smoke else args.steps, not args.no_peers
    results = [measure(name, args.kernels, steps, peers=peers, fp8=args.fp8) for name in names]
    if args.json:
        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
        report = {"device": device, "torch": torch.__version__, "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
