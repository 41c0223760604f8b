"""`--batch-invariant`: the server's log-probabilities are those of a training forward pass, bit for bit."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from mega_model.batch_invariant_attention import BatchInvariantAttention
from mega_model.build import build_model, fill_weights
from mega_model.decoder import Decoder
from mega_model.init import initial_values
from mega_model.kernels import REFERENCE
from mega_model.kernels.batch_invariant import build_kernels
from mega_model.kernels.log_probabilities import LogProbabilities
from mega_model.kernels.numba import load_kernels
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt, llama
from mega_serve.engine.engine_core import EngineCore
from mega_serve.engine.interfaces import Chunk
from mega_serve.engine.requests import BeamSearchParams, EngineRequest, SamplingParams
from mega_serve.execution.engine_factory import build_engine
from mega_serve.execution.model_runner import RunnerOptions, TorchModelRunner
from mega_serve.execution.packed_weights import WeightDtype
from mega_serve.execution.weight_loading import compute_dtype, fill_model
from tests.serving.server_program import run_server

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 131, "max_seq_len": 160, "init_std": 0.15}
SPECS = {
    "gpt": gpt(**SIZES),
    "llama": llama(**SIZES, kv_heads=2, ffn=96, sliding_window=21),
    "bloom": replace(gpt(**SIZES), positions="alibi", embed_norm=True, kv_heads=1, head_dim=24, bias=True),
}


def _reader(spec: ModelSpec) -> Callable[[str, Slab], Tensor]:
    return initial_values(table(spec), seed=5)


def build_training_model(spec: ModelSpec, dtype: WeightDtype, read: Callable[[str, Slab], Tensor]) -> Decoder:
    """Build a model as mega-train does."""
    rt = Runtime.single_process(spec, dtype=compute_dtype(dtype))
    rt = replace(rt, kernels=build_kernels(REFERENCE, load_kernels()))
    model = build_model(rt)
    fill_weights(model, read, rt)
    return model


@cache
def build_trained_model(name: str, dtype: WeightDtype) -> Decoder:
    return build_training_model(SPECS[name], dtype, _reader(SPECS[name]))


@cache
def training_logprobs(name: str, dtype: WeightDtype, ids: tuple[int, ...]) -> list[float]:
    """Return the log-probability of every id but the first, from one training forward pass."""
    return score_by_training(build_trained_model(name, dtype), [ids])[0]


def score_by_training(model: Decoder, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """Return the log-probabilities of every id but the first, from a micro-batch padded to one length."""
    length = max(map(len, sequences)) - 1
    token = torch.tensor([ids + (0,) * (length + 1 - len(ids)) for ids in sequences])
    attend = BatchInvariantAttention(load_kernels(), len(sequences), length)
    position = torch.arange(length).repeat(len(sequences))
    losses = model.token_losses(token[:, :-1].flatten(), position, attend, token[:, 1:].flatten())
    rows = (-losses).view(len(sequences), length).tolist()
    return [row[: len(ids) - 1] for row, ids in zip(rows, sequences, strict=True)]


def build_runner(name: str, dtype: WeightDtype, page_size: int = 16) -> TorchModelRunner:
    rt = Runtime.single_process(SPECS[name], dtype=compute_dtype(dtype))
    model = fill_model(rt, _reader(SPECS[name]), dtype=dtype, kernels=load_kernels(), batch_invariant=True)
    options = RunnerOptions(page_size=page_size, kv_memory=4 << 20, batch_invariant=True)
    return TorchModelRunner(model, options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("seed", "page_size"), [(1, 16), (2, 32)])
def test_any_chunks_batches_pages_and_reuse_give_the_bits_of_training(
    name: str, dtype: WeightDtype, seed: int, page_size: int
) -> None:
    """Rows arrive, are cut anywhere, share the pages of a prefix, lose all their pages and start again."""
    rng = random.Random(seed)
    runner = build_runner(name, dtype, page_size)
    log_softmax = LogProbabilities(load_kernels()).log_softmax
    free = list(range(runner.num_pages))
    rng.shuffle(free)
    prefix = [rng.randrange(131) for _ in range(2 * page_size)]
    rows = [prefix + [rng.randrange(131) for _ in range(rng.randint(2, 60))] for _ in range(5)]
    rows += [[rng.randrange(131) for _ in range(rng.randint(2, 60))] for _ in range(3)]
    computed, shared, pages = [0] * len(rows), [free.pop(), free.pop()], [list[int]() for _ in rows]
    pages[0] = list(shared)
    is_preempted = compared = 0
    while any(computed[i] < len(ids) - 1 for i, ids in enumerate(rows)):
        if not is_preempted and computed[5] > len(rows[5]) // 2:
            is_preempted, computed[5], pages[5] = 1, 0, []
        ready = [i for i, ids in enumerate(rows) if computed[i] < len(ids) - 1]
        chunks, spans = [], []
        for i in rng.sample(ready, rng.randint(1, len(ready))):
            if i in range(1, 5) and not pages[i]:
                if computed[0] < len(prefix):
                    continue
                computed[i], pages[i] = len(prefix), list(shared)
            count = min(rng.choice([1, 1, 3, 20, 60]), len(rows[i]) - 1 - computed[i])
            while len(pages[i]) * page_size < computed[i] + count:
                pages[i].append(free.pop())
            follow = rows[i][computed[i] + 1 : computed[i] + count + 1]
            chunks.append(
                Chunk(rows[i][computed[i] : computed[i] + count], computed[i], list(pages[i]), 0, follow, 2)
            )
            spans.append((i, computed[i]))
            computed[i] += count
        if not chunks:
            continue
        output = runner.run(chunks)
        assert isinstance(output.logits, Tensor)
        logprobs = iter(log_softmax(output.logits))
        for (i, start), chunk, scores in zip(spans, chunks, output.scores, strict=True):
            wanted = training_logprobs(name, dtype, tuple(rows[i]))[start : start + len(chunk.token_ids)]
            assert [score.logprob for score in scores] == wanted
            assert [float(next(logprobs)[score.token_id]) for score in scores] == wanted
            compared += len(wanted)
    assert is_preempted
    assert compared > 150


def random_prompts(rng: random.Random, count: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return prompts by request id; most begin with one of four prefixes."""
    prefixes = [tuple(rng.randrange(vocab) for _ in range(20)) for _ in range(4)]
    return {
        str(i): rng.choice([(), *prefixes]) + tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 20)))
        for i in range(count)
    }


def random_request(rng: random.Random, key: str, prompt: tuple[int, ...]) -> EngineRequest:
    """Return a greedy, sampled or forked request with scores; every seventh is a beam search."""
    number = int(key)
    if number % 7 == 0:
        return EngineRequest(
            request_id=key, prompt_token_ids=prompt, params=BeamSearchParams(max_tokens=5, width=3)
        )
    params = SamplingParams(
        max_tokens=rng.randint(1, 20),
        temperature=float(number % 2),
        top_p=0.9 if number % 5 == 0 else 1.0,
        ignore_eos=True,
        seed=rng.randrange(100),
        logprobs=number % 4,
        prompt_logprobs=number % 3,
    )
    return EngineRequest(request_id=key, prompt_token_ids=prompt, params=params, n=rng.choice([1, 1, 3]))


def serve(core: EngineCore) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
    """Return the new ids of every sequence, and the log-probabilities of its prompt, if any, and of these."""
    sequences: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None
            ids, logprobs = sequences.setdefault((output.request_id, output.index), ([], []))
            ids.extend(output.token_ids)
            logprobs.extend(entry.logprob for entry in (*output.prompt_logprobs, *output.logprobs) if entry)
    return sequences


@pytest.mark.parametrize(
    ("requests", "rounds"), [(40, 1), pytest.param(200, 5, marks=pytest.mark.long)], ids=["short", "long"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_concurrent_mixed_requests_are_served_with_the_bits_of_training(
    checkpoint: Path, spec: ModelSpec, dtype: WeightDtype, requests: int, rounds: int
) -> None:
    """All requests are there at once, share prefixes, and have too few pages."""
    model = build_training_model(spec, dtype, Checkpoint.open(checkpoint).model_slab)
    rng = random.Random(3)
    prompts = random_prompts(rng, requests, spec.vocab - 2)
    preemptions = 0
    for _ in range(rounds):
        options = {
            "load": str(checkpoint),
            "device": "cpu",
            "dtype": dtype,
            "batch_invariant": True,
            "max_num_seqs": rng.choice([32, 64]),
            "max_num_batched_tokens": rng.choice([64, 300]),
            "kv_cache_memory": 60_000 * compute_dtype(dtype).itemsize,
            "page_size": rng.choice([16, 32]),
            "speculative_tokens": rng.choice([0, 3]),
        }
        core = build_engine(options).core
        for key in rng.sample(sorted(prompts), len(prompts)):
            core.add(random_request(rng, key, prompts[key]))
        served = {key: value for key, value in serve(core).items() if int(key[0]) % 7}
        assert len({request for request, _ in served}) == requests - len(range(0, requests, 7))
        preemptions += core.stats().preemptions
        wanted = score_by_training(model, [prompts[key[0]] + tuple(ids) for key, (ids, _) in served.items()])
        for (key, (ids, logprobs)), trained in zip(served.items(), wanted, strict=True):
            assert logprobs == (trained if key[1] == 0 else trained[-len(ids) :]), key
    assert preemptions


def random_completion(rng: random.Random, number: int, prompt: tuple[int, ...]) -> dict[str, Any]:
    """Return the body of a greedy or sampled completion with scores, by itself or after its prompt."""
    return {
        "prompt": list(prompt),
        "max_tokens": rng.randint(1, 20),
        "temperature": float(number % 2),
        "top_p": 0.9 if number % 5 == 0 else 1.0,
        "n": rng.choice([1, 1, 3]) if number % 2 else 1,
        "seed": rng.randrange(100),
        "logprobs": number % 4,
        "echo": number % 3 == 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def complete_all(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Send all bodies at once, and return the bytes of the choices of each."""
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as http:
        responses = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    assert [response.text for response in responses if response.status_code != 200] == []
    # the rest differs: id, time, tokens that were cached
    return [re.findall(rb'"choices":(\[.*\]),"usage"', response.content)[0] for response in responses]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_200_concurrent_requests_get_the_bits_of_training_in_json(
    checkpoint: Path, spec: ModelSpec, dtype: WeightDtype
) -> None:
    """JSON carries every float32 whole, and the same request gets the same bytes under another load."""
    model = build_training_model(spec, dtype, Checkpoint.open(checkpoint).model_slab)
    rng = random.Random(5)
    prompts = random_prompts(rng, 200, spec.vocab - 2)
    bodies = [random_completion(rng, int(key), prompt) for key, prompt in prompts.items()]
    flags = ("--batch-invariant", "--dtype", dtype, "--max-num-seqs", "32", "--max-num-batched-tokens", "64")
    memory = str(60_000 * compute_dtype(dtype).itemsize)  # fewer pages than the batch needs
    with run_server(checkpoint, *flags, "--kv-cache-memory", memory) as server:
        contents = asyncio.run(complete_all(server.url, bodies))
        order = rng.sample(range(200), 150)
        repeated = asyncio.run(complete_all(server.url, [bodies[i] for i in order]))
        assert repeated == [contents[i] for i in order]
        assert server.read_metrics()["num_preemptions_total"]
    sequences, served = [], []
    for body, content in zip(bodies, contents, strict=True):
        for choice in json.loads(content):
            sequences.append((*body["prompt"], *choice["token_ids"]))
            served.append([score for score in choice["logprobs"]["token_logprobs"] if score is not None])
    assert len(sequences) > 250
    for scores, trained in zip(served, score_by_training(model, sequences), strict=True):
        assert scores == trained[-len(scores) :]
