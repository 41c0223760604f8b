"""The device sampler against the batch sampler: same logits, same seed, same token."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from mega_serve.engine.interfaces import SamplingRow
from mega_serve.engine.requests import SamplingParams
from mega_serve.execution.device_sampler import DeviceSampler, is_plain
from mega_serve.execution.sampler import BatchSampler

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device to compare with a CPU")
PLAIN_FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-45},
    {"temperature": 1.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "top_p": 0.999999},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.6},
    {"temperature": 0.8, "top_k": 10**6},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 2.0, "min_p": 0.02, "top_p": 0.8, "top_k": 50},
]
HOST_FIELDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": ((3, 4.0),)},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.0, "bad_words": ((5,),)},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": (7,)},
    {"temperature": 1.0, "allowed_token_ids": (1, 2, 9)},
]


def random_row(rng: random.Random, fields: dict[str, Any]) -> SamplingRow:
    params = SamplingParams(max_tokens=100, **fields)
    output = [rng.randrange(60) for _ in range(rng.randint(0, 5))]
    return SamplingRow(
        params=params,
        prompt_token_ids=(1, 2),
        output_token_ids=output,
        sequence_index=rng.randrange(4),
        position=2 + len(output),
        seed=rng.getrandbits(64) - 2**63,
        top_p=params.top_p,
    )


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Peaked, flat, tied, partly masked and infinite rows."""
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    logits[1::7] *= 0.01
    logits[2::7] = logits[2::7].round()
    logits[3::7, ::2] = -np.inf
    logits[4::7, [5, 9]] = np.inf
    return torch.from_numpy(logits)


@pytest.mark.parametrize("vocab", [61, 3000])
def test_plain_rows_are_sampled_as_on_the_cpu(vocab: int) -> None:
    rng, numbers = random.Random(vocab), np.random.default_rng(vocab)
    expected, actual = BatchSampler(vocab), DeviceSampler(vocab)
    tokens = set()
    for _ in range(40):
        rows = [random_row(rng, rng.choice(PLAIN_FIELDS)) for _ in range(rng.randint(1, 24))]
        assert all(map(is_plain, rows))
        logits = random_logits(numbers, len(rows), vocab + 3)  # columns that are padding
        wanted = expected.sample(logits.clone(), rows)
        assert actual.sample(logits, rows) == wanted
        tokens |= {result.token_id for result in wanted}
    assert len(tokens) > vocab // 10


def test_other_rows_are_sampled_on_the_cpu_beside_plain_ones() -> None:
    rng, numbers = random.Random(4), np.random.default_rng(4)
    expected, actual = BatchSampler(60, 7), DeviceSampler(60, 7)
    for _ in range(30):
        rows = [random_row(rng, rng.choice(PLAIN_FIELDS + HOST_FIELDS)) for _ in range(8)]
        logits = random_logits(numbers, 8, 60).clamp(max=50)  # a log-probability of inf is NaN
        assert actual.sample(logits, rows) == expected.sample(logits.clone(), rows)
    assert not any(is_plain(random_row(rng, fields)) for fields in HOST_FIELDS[:4])


def test_a_row_without_a_possible_word_has_an_error() -> None:
    rng = random.Random(5)
    rows = [random_row(rng, {"temperature": 1.0, "top_p": 0.5}) for _ in range(3)]
    logits = torch.zeros(3, 60)
    logits[0] = -torch.inf
    logits[1, 5] = torch.nan
    results = DeviceSampler(60).sample(logits, rows)
    assert results == BatchSampler(60).sample(logits, rows)
    assert [result.error is None for result in results] == [False, False, True]


def test_a_beam_search_asks_for_the_same_words() -> None:
    logits = random_logits(np.random.default_rng(6), 3, 60)
    expected = BatchSampler(60).top_logprobs(logits, 4, [None, 3, None])
    assert DeviceSampler(60).top_logprobs(logits, 4, [None, 3, None]) == expected


@pytest.mark.gpu
@NO_GPU
def test_a_gpu_samples_as_the_cpu_does() -> None:
    rng, numbers = random.Random(9), np.random.default_rng(9)
    for _ in range(20):
        rows = [random_row(rng, rng.choice(PLAIN_FIELDS)) for _ in range(16)]
        logits = random_logits(numbers, 16, 3000)
        assert DeviceSampler(3000).sample(logits.cuda(), rows) == BatchSampler(3000).sample(logits, rows)
