"""Run one workload in another program's engine, for `serve.py`, and print the result as JSON.

    python bench/serving_peers.py {hf,hf-continuous,vllm,vllm-eager} MODEL WORKLOAD --dtype bf16 --threads 1

MODEL is a Hugging Face folder, WORKLOAD a file of `serve.py`. vLLM pins its own dependencies: `serve.py` runs
this file with the Python that MEGA_VLLM names. It imports nothing of ours.

hf             `generate` on one batch, padded on the left
hf-continuous  transformers' continuous batching, `generate_batch`, with as many pages as the workload needs
vllm           vLLM's engine in this process, compiled as it is by default
vllm-eager     the same with enforce_eager
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]


def hugging_face(folder: str, dtype: str) -> Generate:
    """Return a function that continues prompts by `generate`, greedily."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=_torch_dtype(dtype), attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        if min(map(len, prompts)) == width:
            mask = torch.ones_like(ids)  # nothing is padded
        rows = model.generate(input_ids=ids, attention_mask=mask, **settings)
        return [row[width:] for row in rows.tolist()]

    return generate


def hugging_face_continuous(folder: str, dtype: str) -> Generate:
    """Return a function that continues prompts by transformers' continuous batching, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=_torch_dtype(dtype), attn_implementation="sdpa"
    ).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        pages = sum(-(-(len(prompt) + new_tokens) // 32) for prompt in prompts) + 8
        settings = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            num_blocks=pages,
            block_size=32,
            max_batch_tokens=512,
        )
        with torch.inference_mode():
            results = model.generate_batch(prompts, generation_config=settings, progress_bar=False)
        ordered = sorted(results.values(), key=lambda result: int(result.request_id.rpartition("_")[2]))
        return [list(result.generated_tokens) for result in ordered]

    return generate


def vllm(folder: str, dtype: str, *, eager: bool) -> Generate:
    """Return a function that continues prompts in vLLM's engine, greedily, without detokenizing."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its CPU time counts as this process'
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine: Any = LLM(
        folder,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
        skip_tokenizer_init=True,
        enforce_eager=eager,
        enable_prefix_caching=True,
        max_model_len=1024,
        disable_log_stats=True,
        seed=0,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        settings = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = engine.generate(inputs, settings, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def measure(generate: Generate, workload: dict[str, Any]) -> dict[str, Any]:
    """Run the batches of a workload one after another, and time each but the first `warmups`."""
    new_tokens = workload["new_tokens"]
    runs = []
    for i, prompts in enumerate(workload["batches"]):
        cpu, wall = time.process_time(), time.perf_counter()
        outputs = generate(prompts, new_tokens)
        run = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        if i >= workload["warmups"]:
            runs.append({**run, "outputs": outputs})
    return {"runs": runs, "python": platform.python_version()}


def _torch_dtype(dtype: str) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("way", choices=["hf", "hf-continuous", "vllm", "vllm-eager"])
    options.add_argument("model")
    options.add_argument("workload", type=Path)
    options.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    options.add_argument("--threads", type=int, default=1)
    arguments = options.parse_args()
    workload = json.loads(arguments.workload.read_text())
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    if arguments.way.startswith("vllm"):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            [f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0])]
        )
        generate = vllm(arguments.model, arguments.dtype, eager=arguments.way == "vllm-eager")
        versions = {"vllm": version("vllm-cpu")}
    else:
        import torch

        torch.set_num_threads(arguments.threads)
        way = hugging_face if arguments.way == "hf" else hugging_face_continuous
        generate = way(arguments.model, arguments.dtype)
        versions = {"transformers": version("transformers")}
    result = measure(generate, workload)
    print(json.dumps({**result, "versions": {**versions, "torch": version("torch")}}))


if __name__ == "__main__":
    main()
