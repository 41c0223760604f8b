"""Filters of the sampler, and reproducible draws."""

from __future__ import annotations

import json

import pytest
import torch

from mega_model.sampling import sample_token, top_k_mask, top_p_mask
from tests.shared_data import SHARED, needs_shared

GOLDEN = SHARED / "golden" / "sampling_filters.json"


@needs_shared
def test_filters_drop_the_words_that_megatron_drops() -> None:
    golden = json.loads(GOLDEN.read_text("utf-8"))
    logits_BV = torch.tensor(golden["logits"])
    assert golden["topk"]
    assert golden["topp"]
    for k, removed in golden["topk"].items():
        assert top_k_mask(logits_BV, int(k)).int().tolist() == removed, f"top_k {k}"
    for p, removed in golden["topp"].items():
        assert top_p_mask(logits_BV, float(p)).int().tolist() == removed, f"top_p {p}"


def test_words_tied_with_the_kth_stay() -> None:
    assert top_k_mask(torch.tensor([[3.0, 2.0, 2.0, 1.0]]), 2).tolist() == [[False, False, False, True]]


def test_the_likeliest_word_stays_however_small_p_is() -> None:
    assert top_p_mask(torch.tensor([[0.0, 5.0, 1.0]]), 1e-30).tolist() == [[True, False, True]]


def test_a_choice_is_never_a_word_that_the_filter_drops() -> None:
    logits_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        by_k = sample_token(logits_BV, top_k=5, generator=generator)
        by_p = sample_token(logits_BV, top_p=0.3, generator=generator)
        assert not top_k_mask(logits_BV, 5).gather(1, by_k[:, None]).any()
        assert not top_p_mask(logits_BV, 0.3).gather(1, by_p[:, None]).any()


def test_top_k_of_one_is_argmax_at_any_temperature() -> None:
    logits_BV = torch.randn(8, 30, generator=torch.Generator().manual_seed(2))
    assert sample_token(logits_BV, top_k=1, temperature=99.0).tolist() == logits_BV.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-39, 1e-300, 5e-324])
def test_a_temperature_near_zero_takes_the_likeliest_word(temperature: float) -> None:
    logits_BV = torch.tensor([[100.0, -3.0, 20.0], [-1e4, 7.0, -2.0]])
    assert sample_token(logits_BV, temperature=temperature).tolist() == [0, 1]


def test_a_seed_decides_the_draw() -> None:
    logits_BV = torch.zeros(6, 1000)
    first, repeat, different = (
        sample_token(logits_BV, generator=torch.Generator().manual_seed(s)) for s in (7, 7, 8)
    )
    assert first.tolist() == repeat.tolist()
    assert first.tolist() != different.tolist()


def test_temperature_flattens_the_draw_as_the_formula_says() -> None:
    generator = torch.Generator().manual_seed(3)
    logits_BV = torch.tensor([[2.0, 0.0]]).expand(20_000, 2)
    share = sample_token(logits_BV, temperature=2.0, generator=generator).eq(0).float().mean().item()
    # p = 1 / (1 + e^-1); five standard errors of 20,000 draws are 0.016
    assert share == pytest.approx(0.7311, abs=0.016)


def test_top_k_above_the_vocabulary_keeps_every_word() -> None:
    assert not top_k_mask(torch.randn(2, 5), 1000).any()
