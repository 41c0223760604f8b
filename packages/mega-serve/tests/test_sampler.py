"""The batch sampler against a naive definition in Python, row by row, and against Megatron's masks."""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from mega_model.kernels.numba import NumbaKernels, has_numba, load_kernels
from mega_model.sampling import top_k_mask, top_p_mask
from mega_serve.engine.interfaces import SamplingRow
from mega_serve.engine.requests import SamplingParams
from mega_serve.execution.philox import draw_uniforms
from mega_serve.execution.sampler import BatchSampler
from mega_serve.execution.token_weights import (
    MAX_WEIGHT,
    compute_weights,
    cut_nucleus,
    draw_index,
    top_k_ids,
)


def make_row(prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **fields: Any) -> SamplingRow:
    seed = fields.pop("seed", 0)
    sequence = fields.pop("sequence_index", 0)
    params = SamplingParams(max_tokens=100, **fields)
    return SamplingRow(
        params=params,
        prompt_token_ids=prompt,
        output_token_ids=list(output),
        sequence_index=sequence,
        position=len(prompt) + len(output),
        seed=seed,
        top_p=params.top_p,
    )


def naive_logits(logits: np.ndarray, row: SamplingRow, eod: int | None) -> np.ndarray:
    """Penalties, bias and masks as the documentation of SamplingParams words them."""
    params = row.params
    logits = logits.copy()
    history = [*row.prompt_token_ids, *row.output_token_ids]
    for i in range(len(logits)):
        if i in history and params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
        count = row.output_token_ids.count(i)  # type: ignore[attr-defined]
        if count:
            logits[i] -= np.float32(params.presence_penalty + params.frequency_penalty * count)
    for i, bias in params.logit_bias:
        logits[i] += np.float32(bias)
    banned = {
        word[-1] for word in params.bad_words if history[len(history) - len(word) + 1 :] == list(word[:-1])
    }
    if params.banned_bigram and history[-1] == params.banned_bigram[0]:
        banned.add(params.banned_bigram[1])
    if len(row.output_token_ids) < params.min_tokens:
        banned |= set(params.stop_token_ids)
        if eod is not None and not params.ignore_eos:
            banned.add(eod)
        if params.stop_repeated_id == history[-1]:
            banned.add(history[-1])
    allowed = params.allowed_token_ids
    for i in range(len(logits)):
        if i in banned or (allowed is not None and i not in allowed):
            logits[i] = -np.inf
    return logits


def naive_sample(logits: np.ndarray, row: SamplingRow) -> int:
    """Sort the vocabulary, cut it, and search the drawn word, with exact fractions."""
    params = row.params
    if params.is_greedy:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    ids = list(range(len(logits)))
    if params.top_k:
        kth = sorted(logits, reverse=True)[min(params.top_k, len(logits)) - 1]
        ids = [i for i in ids if logits[i] >= kth]
    array = compute_weights(logits[ids], params.temperature, np.empty(len(ids), np.float32))
    weights = {i: int(weight) for i, weight in zip(ids, array, strict=True)}
    if row.top_p < 1.0:
        target = Fraction(row.top_p * float(sum(weights.values())))
        nucleus = []
        mass = 0
        for i in sorted(ids, key=lambda i: (-weights[i], i)):
            nucleus.append(i)
            mass += weights[i]
            if mass > target:
                break
        ids = sorted(nucleus)
    if params.min_p:
        ids = [i for i in ids if weights[i] >= np.float32(params.min_p * MAX_WEIGHT)]
    total = sum(weights[i] for i in ids)
    uniform = float(draw_uniforms([row.seed], [row.sequence_index], [row.position])[0])
    threshold = min(math.floor(uniform * total), total - 1)
    for i in ids:
        threshold -= weights[i]
        if threshold < 0:
            return i
    raise AssertionError("no word")


def random_row(rng: random.Random, vocab: int) -> SamplingRow:
    """A row with some of all parameters."""

    def maybe(value: Any, default: Any, probability: float = 0.3) -> Any:
        return value if rng.random() < probability else default

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(rng.randrange(1, most)))

    output = maybe(ids(12), (), 0.7)
    prompt = ids(6)
    tail = (*prompt, *output)
    return make_row(
        prompt,
        output,
        temperature=rng.choice([0.0, 1e-30, 0.3, 0.8, 1.0, 1.0, 1.7, 100.0]),
        top_k=maybe(rng.choice([1, 2, 3, 5, vocab - 1, vocab, vocab + 9]), 0),
        top_p=maybe(rng.choice([0.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999, rng.random()]), 1.0, 0.6),
        min_p=maybe(rng.choice([0.01, 0.1, 0.5, 1.0]), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe(((rng.randrange(vocab), rng.uniform(-100, 100)),), ()),
        allowed_token_ids=maybe(ids(9) + (0, 1, 2, 3, 4), None),
        bad_words=maybe(((5,), (tail[-1], 6), (*tail[-2:], 7), (tail[0], 8)), ()),
        stop_token_ids=maybe((9, 10), ()),
        stop_repeated_id=maybe(tail[-1], None),
        banned_bigram=maybe((tail[-1], 11), None),
        min_tokens=maybe(8, 0),
        ignore_eos=maybe(True, False),
        seed=rng.randrange(2**64),
        sequence_index=rng.randrange(4),
    )


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    logits = rng.normal(0, rng.choice([0.01, 0.5, 3.0, 30.0]), (rows, vocab)).astype(np.float32)
    if rng.random() < 0.5:  # ties
        logits = np.round(logits)
    if rng.random() < 0.2:
        logits[:, rng.integers(12, vocab)] = -np.inf
    return logits


def check_rows(seed: int, batches: int, rows: int, vocab: int, kernels: NumbaKernels | None = None) -> None:
    numbers = np.random.default_rng(seed)
    rng = random.Random(seed)
    sampler = BatchSampler(vocab, eod=vocab - 1, kernels=kernels)
    for _ in range(batches):
        logits = random_logits(numbers, rows, vocab + 3)
        logits[:, vocab:] = 1e9  # padding of the vocabulary
        batch = [random_row(rng, vocab) for _ in range(rows)]
        for i, token in enumerate(sampler.sample(torch.from_numpy(logits), batch)):
            changed = naive_logits(logits[i, :vocab], batch[i], vocab - 1)
            assert token.error is None
            assert token.token_id == naive_sample(changed, batch[i]), batch[i]


def test_thousands_of_random_rows_equal_the_definition() -> None:
    check_rows(1, batches=60, rows=32, vocab=40)


def test_a_vocabulary_of_many_blocks_equals_the_definition() -> None:
    check_rows(2, batches=4, rows=16, vocab=3001)


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_random_rows_by_numba_equal_the_definition() -> None:
    kernels = load_kernels()
    check_rows(6, batches=30, rows=32, vocab=40, kernels=kernels)
    check_rows(7, batches=2, rows=16, vocab=3001, kernels=kernels)


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@pytest.mark.parametrize("vocab", [1, 3, 700, 5003])
def test_the_nucleus_by_numba_has_the_same_words(vocab: int) -> None:
    kernels = load_kernels()
    rng = np.random.default_rng(vocab)
    for p in (0.0, 1e-9, 0.1, 0.5, 0.9, 0.999999, 1 - 2**-53, *rng.uniform(0, 1, 40)):
        logits = random_logits(rng, 1, vocab)[0] if vocab > 12 else rng.normal(0, 1, vocab).astype(np.float32)
        expected = compute_weights(logits, 1.0, np.empty_like(logits))
        weights = expected.copy()
        cut_nucleus(expected, p)
        kernels.nucleus.cut_nucleus(weights, p)
        assert np.array_equal(weights, expected)


@pytest.mark.long
def test_a_campaign_of_random_rows_equals_the_definition() -> None:
    for seed in range(20):
        check_rows(100 + seed, batches=100, rows=32, vocab=64)
    check_rows(200, batches=4, rows=32, vocab=50_257)


def test_the_same_row_gets_the_same_token_in_any_batch() -> None:
    rng = random.Random(3)
    vocab = 500
    logits = torch.from_numpy(random_logits(np.random.default_rng(3), 24, vocab))
    rows = [random_row(rng, vocab) for _ in range(24)]
    rows = [dataclasses.replace(row, params=dataclasses.replace(row.params, logprobs=3)) for row in rows]
    sampler = BatchSampler(vocab)
    whole = sampler.sample(logits, rows)
    for i in range(24):
        assert sampler.sample(logits[i : i + 1], rows[i : i + 1])[0] == whole[i]
    order = rng.sample(range(24), 24)
    shuffled = sampler.sample(logits[order], [rows[i] for i in order])
    assert shuffled == [whole[i] for i in order]


def test_top_k_keeps_what_megatron_keeps() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        logits = random_logits(rng, 1, 700)
        for k in (1, 2, 17, 300, 699):
            ids = ~top_k_mask(torch.from_numpy(logits), k)[0]
            assert np.array_equal(top_k_ids(logits[0], k), np.flatnonzero(ids.numpy()))


def test_the_nucleus_is_megatrons() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        logits = rng.normal(0, rng.choice([0.5, 3.0]), 700).astype(np.float32)
        p = float(rng.uniform(0.01, 0.99))
        weights = compute_weights(logits, 1.0, np.empty_like(logits))
        cut_nucleus(weights, p)
        wanted = np.flatnonzero(~top_p_mask(torch.from_numpy(logits[None]), p)[0].numpy())
        ids = np.flatnonzero(weights)
        if not np.array_equal(ids, wanted):
            # Megatron sums in float32: only the word at the border may differ, by rounding
            assert len(np.setxor1d(ids, wanted)) == 1
            sums = np.cumsum(np.sort(torch.from_numpy(logits).double().softmax(-1).numpy())[::-1])
            assert np.abs(sums - p).min() < 1e-6


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 0.5}], ids=str
)
def test_draws_have_the_distribution_of_the_softmax(fields: dict[str, Any]) -> None:
    vocab, size = 30, 8000
    logits = np.random.default_rng(6).normal(0, 1.5, vocab).astype(np.float32)
    row = make_row(**fields, seed=11)
    scaled = torch.from_numpy(logits[None]).double() / row.params.temperature
    if row.params.top_k:
        scaled = scaled.masked_fill(top_k_mask(scaled, row.params.top_k), -math.inf)
    if row.top_p < 1.0:
        scaled = scaled.masked_fill(top_p_mask(scaled, row.top_p), -math.inf)
    probability = scaled.softmax(-1)[0].numpy()
    probability[probability < row.params.min_p * probability.max()] = 0.0
    probability /= probability.sum()
    rows = [dataclasses.replace(row, position=i) for i in range(size)]
    tokens = BatchSampler(vocab).sample(torch.from_numpy(logits).expand(size, -1), rows)
    counts = np.bincount([token.token_id for token in tokens], minlength=vocab)
    assert counts[probability == 0.0].sum() == 0
    is_frequent = probability * size >= 5
    expected = probability[is_frequent] * size
    chi_square = ((counts[is_frequent] - expected) ** 2 / expected).sum()
    freedom = is_frequent.sum() - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_logprobs_are_of_the_unmodified_logits() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(7)) * 3
    fields: dict[str, Any] = {"temperature": 0.1, "top_k": 3, "logit_bias": ((5, 50.0),)}
    rows = [make_row(logprobs=n, **fields) for n in (0, 1, 7)] + [make_row(**fields)]
    tokens = BatchSampler(48).sample(logits, rows)
    reference = logits.log_softmax(-1)
    assert [token.token_id for token in tokens] == [5] * 4
    assert tokens[3].logprob is None
    for i, count in enumerate((0, 1, 7)):
        logprob = tokens[i].logprob
        assert logprob is not None
        assert logprob.logprob == reference[i, 5].item()
        assert logprob.rank == 1 + int((logits[i] > logits[i, 5]).sum())
        best = reference[i].argsort(descending=True)[:count]
        assert logprob.top == tuple((int(j), reference[i, j].item()) for j in best)


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, 600)
    sampler = BatchSampler(600)
    assert sampler.sample(logits, [make_row(temperature=0.0)])[0].token_id == 0
    assert sampler.sample(logits, [make_row(top_p=1e-6)])[0].token_id == 0
    assert [i for i, _ in sampler.top_logprobs(logits, 5, [None])[0]] == [0, 1, 2, 3, 4]


def test_top_logprobs_exclude_the_banned_id_and_ids_beyond_the_tokenizer() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(8))
    logits[:, 38:] = 5.0
    logits[1, 4] = 9.0
    before = logits.clone()
    tops = BatchSampler(38).top_logprobs(logits, 6, [None, 4, None])
    assert torch.equal(logits, before)
    logits[1, 4] = -1e10
    for i, top in enumerate(tops):
        reference = logits[i].log_softmax(-1)
        best = reference[:38].argsort(descending=True)[:6]
        assert top == [(int(j), reference[j].item()) for j in best]
    assert len(BatchSampler(38).top_logprobs(logits, 99, [None] * 3)[0]) == 38


def test_a_row_without_possible_ids_reports_an_error_and_others_are_sampled() -> None:
    logits = torch.zeros(3, 20)
    logits[2] = math.nan
    rows = [make_row(allowed_token_ids=(3,), bad_words=((3,),)), make_row(temperature=0.0), make_row()]
    tokens = BatchSampler(20).sample(logits, rows)
    assert "no id is allowed" in (tokens[0].error or "")
    assert tokens[1].error is None
    assert tokens[2].error == "logits are NaN"


def test_infinite_logits_share_the_probability() -> None:
    logits = torch.zeros(1, 20)
    logits[0, [4, 7]] = math.inf
    rows = [make_row(seed=i) for i in range(64)]
    tokens = BatchSampler(20).sample(logits.expand(64, -1), rows)
    assert {token.token_id for token in tokens} == {4, 7}


def test_the_largest_uniform_draws_the_last_word_of_positive_weight() -> None:
    weights = np.zeros(5000, np.float32)
    weights[[10, 4000]] = MAX_WEIGHT
    assert draw_index(weights, 1 - 2.0**-53) == 4000
    assert draw_index(weights, 0.0) == 10
    assert draw_index(weights, 0.5) == 4000
