"""Benchmark the engine of mega-serve on a GPU against Hugging Face's `generate`, on the same random weights.

    python bench/gpu/serve.py [--cases llama-8b-stream gpt-345m-stream llama-8b-batch] [--json FILE]
    python bench/gpu/serve.py --small    on a CPU, tiny: shows that it runs, measures nothing

llama-8b-stream  Llama 3 8B's shape, 1 prompt of 128 tokens, 128 new ones
gpt-345m-stream  24 layers of 1,024, 1 prompt of 128 tokens, 256 new ones
llama-8b-batch   Llama 3 8B's shape, 256 prompts of 128 tokens, 128 new ones each

bfloat16, greedy, the least of --rounds times after a warm-up, prompts included. `generate` runs with its
static cache, which transformers compiles on a GPU. `rows_equal` counts the rows in which both chose the same
tokens: in bfloat16 a near tie may differ.

The bound of one stream is the memory bandwidth divided by the bytes of the weights that a token reads. The
bandwidth is that of torch summing 4 GiB, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peers import is_installed

from mega_ckpt.formats.huggingface.config_json import from_spec
from mega_ckpt.formats.huggingface.names import aliases
from mega_model.distributed.mesh import Mesh
from mega_model.kernels import REFERENCE
from mega_model.kernels.dispatch import choose_kernels
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.parallel_layout import WHOLE
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt, llama
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_serve.engine.detokenizer import Detokenizer
from mega_serve.engine.engine_core import EngineCore
from mega_serve.engine.requests import EngineRequest, SamplingParams
from mega_serve.engine.scheduler import EngineConfig
from mega_serve.execution.device_sampler import DeviceSampler
from mega_serve.execution.model_runner import RunnerOptions, TorchModelRunner
from mega_serve.execution.weight_loading import fill_model

LLAMA = llama(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, max_seq_len=2048, rope_theta=5e5
)
GPT = gpt(layers=24, hidden=1024, heads=16, vocab=50304, max_seq_len=1024)
CASES: dict[str, tuple[ModelSpec, int, int, int]] = {  # prompts, their tokens, new tokens
    "llama-8b-stream": (LLAMA, 1, 128, 128),
    "gpt-345m-stream": (GPT, 1, 128, 256),
    "llama-8b-batch": (LLAMA, 256, 128, 128),
}
SMALL_LLAMA = llama(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=256, max_seq_len=64)
SMALL = {"small": (SMALL_LLAMA, 1, 8, 6)}
Generate = Callable[[list[list[int]], int], list[list[int]]]


def build_peer(spec: ModelSpec, device: torch.device) -> tuple[Any, Generate]:
    """Return transformers' model of this shape with random weights, and its `generate`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = from_spec(spec, "the model")
    kind = config.pop("model_type")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **config), attn_implementation="sdpa", dtype=dtype
        ).eval()
    model.generation_config.eos_token_id = None
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if device.type == "cuda":
        settings["cache_implementation"] = "static"

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        mask = torch.ones_like(ids)
        rows = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, **settings)
        return [row[ids.shape[1] :] for row in rows.tolist()]

    return model, generate


def build_ours(spec: ModelSpec, peer: Any, device: torch.device, rows: int) -> Generate:
    """Return a function that continues prompts in our engine with the peer's weights."""
    params = {row.name: row for row in table(spec)}
    state = peer.state_dict()
    values: dict[str, torch.Tensor] = {}
    dtype = next(peer.parameters()).dtype
    for alias in aliases(spec):
        row = params[alias.ours]
        whole = values.setdefault(alias.ours, torch.empty(row.shape, dtype=dtype, device=device))
        tensor = state[alias.foreign]
        whole[box_of(alias.slab(row))] = tensor.T if alias.transpose else tensor

    def read(name: str, slab: Slab) -> torch.Tensor:
        return values[name][box_of(slab)].clone()

    kernels = choose_kernels("auto", device).kernels if device.type == "cuda" else REFERENCE
    rt = Runtime.from_mesh(Mesh(WHOLE, 0, device), spec, dtype=dtype, kernels=kernels)
    model = fill_model(rt, read, dtype="bfloat16" if dtype == torch.bfloat16 else "float32")
    values.clear()
    is_cuda = device.type == "cuda"
    memory = 24 << 30 if is_cuda else 1 << 22
    runner = TorchModelRunner(
        model, RunnerOptions(kv_memory=memory, spare_page=is_cuda, attention="auto" if is_cuda else "torch")
    )
    if is_cuda:
        runner.capture_graphs(rows)
    core: Any = EngineCore(
        runner,
        open_tokenizer("NullTokenizer", vocab_size=spec.vocab - 1),
        DeviceSampler(spec.vocab),
        EngineConfig(max_num_seqs=max(8, rows), max_num_batched_tokens=8192, prefix_caching=False),
        clock=time.monotonic,
        detokenizer_factory=Detokenizer,
        draw_seed=lambda: 0,
    )
    return lambda prompts, new_tokens: run_engine(core, prompts, new_tokens)


def run_engine(core: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Continue prompts greedily, all at once."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for request_id, prompt in zip(outputs, prompts, strict=True):
        core.add(EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=params))
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            outputs[output.request_id] += output.token_ids
    return list(outputs.values())


def box_of(slab: Slab) -> tuple[slice, ...]:
    """Return a box of a whole tensor as an index."""
    return tuple(slice(start, start + size) for start, size in zip(slab.start, slab.shape, strict=True))


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second at which torch reads the device's memory."""
    x = torch.ones(1 << (30 if device.type == "cuda" else 22), dtype=torch.float32, device=device)
    return x.nbytes / min(least_seconds(x.sum, device) for _ in range(5))


def least_seconds(function: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Return the least seconds of a call, with the device idle before and after."""
    durations = []
    for _ in range(times):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
    return min(durations)


def measure(
    name: str, case: tuple[ModelSpec, int, int, int], device: torch.device, rounds: int
) -> dict[str, Any]:
    """Run a case both ways and return its row."""
    spec, rows, length, new_tokens = case
    rng = random.Random(0)
    prompts = [[rng.randrange(spec.vocab) for _ in range(length)] for _ in range(rows)]
    peer, generate = build_peer(spec, device)
    ours = build_ours(spec, peer, device, rows)
    outputs = {}
    result: dict[str, Any] = {"case": name, "bandwidth": measure_bandwidth(device)}
    for way, function in (("ours", ours), ("hugging_face", generate)):
        outputs[way] = function(prompts, new_tokens)  # warm-up
        seconds = least_seconds(lambda run=function: run(prompts, new_tokens), device, rounds)
        result[way] = {"seconds": seconds, "tokens_per_second": rows * new_tokens / seconds}
    result["rows_equal"] = sum(a == b for a, b in zip(*outputs.values(), strict=True))
    if rows == 1:
        weights = sum(weight.nbytes for weight in peer.parameters())
        if not spec.tied:  # a token reads one row of the embedding
            weights -= peer.get_input_embeddings().weight.nbytes
        result["bound_tokens_per_second"] = result["bandwidth"] / weights
        result["of_bound"] = result["ours"]["tokens_per_second"] / result["bound_tokens_per_second"]
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if not options.small and not torch.cuda.is_available():
        print("no GPU here: --small shows on a CPU that this runs", file=sys.stderr)
        return 1
    if not is_installed("transformers"):
        print("transformers is not installed: pip install -r requirements-test.txt", file=sys.stderr)
        return 1
    device = torch.device("cpu" if options.small else "cuda")
    cases = SMALL if options.small else {name: CASES[name] for name in options.cases}
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": platform.machine() if options.small else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "results": [measure(name, case, device, options.rounds) for name, case in cases.items()],
    }
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
