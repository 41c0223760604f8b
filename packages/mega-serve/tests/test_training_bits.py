"""`--batch-invariant`: the server's log-probabilities are those of a training forward pass, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

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
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt, llama
from mega_serve.engine.interfaces import Chunk
from mega_serve.execution.model_runner import RunnerOptions, TorchModelRunner
from mega_serve.execution.packed_weights import WeightDtype
from mega_serve.execution.weight_loading import compute_dtype, fill_model

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 131, "max_seq_len": 160, "init_std": 0.15}
SPECS = {
    "gpt": gpt(**SIZES),
    "llama": llama(**SIZES, kv_heads=2, ffn=96, sliding_window=21),
    "bloom": replace(gpt(**SIZES), positions="alibi", embed_norm=True, kv_heads=1, head_dim=24, bias=True),
}
DTYPES: list[WeightDtype] = ["float32", "bfloat16"]


def _reader(spec: ModelSpec) -> Callable[[str, Slab], Tensor]:
    return initial_values(table(spec), seed=5)


@cache
def build_trained_model(name: str, dtype: WeightDtype) -> Decoder:
    """Build the model as mega-train does."""
    spec = SPECS[name]
    rt = Runtime.single_process(spec, dtype=compute_dtype(dtype))
    rt = replace(rt, kernels=build_kernels(REFERENCE, load_kernels()))
    model = build_model(rt)
    fill_weights(model, _reader(spec), rt)
    return model


@cache
def training_logprobs(name: str, dtype: WeightDtype, ids: tuple[int, ...]) -> list[float]:
    """Return the log-probability of every id but the first, from one training forward pass."""
    token, length = torch.tensor(ids), len(ids) - 1
    attend = BatchInvariantAttention(load_kernels(), 1, length)
    losses = build_trained_model(name, dtype).token_losses(
        token[:-1], torch.arange(length), attend, token[1:]
    )
    return (-losses).tolist()


def build_runner(name: str, dtype: WeightDtype, page_size: int = 16) -> TorchModelRunner:
    rt = Runtime.single_process(SPECS[name], dtype=compute_dtype(dtype))
    model = fill_model(rt, _reader(SPECS[name]), dtype=dtype, kernels=load_kernels(), batch_invariant=True)
    options = RunnerOptions(page_size=page_size, kv_memory=4 << 20, batch_invariant=True)
    return TorchModelRunner(model, options)


@pytest.mark.parametrize("dtype", DTYPES)
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
