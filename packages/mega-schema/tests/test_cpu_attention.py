"""Blockwise attention against the reference in float64, within the rounding of flash-attention."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from mega_model.kernels import REFERENCE, Visible, cpu_attention

SHAPES = [  # rows, heads, key heads, queries, keys, width
    (2, 2, 2, 16, 16, 8),
    (1, 4, 2, 37, 37, 16),
    (3, 3, 1, 5, 29, 8),
    (1, 2, 2, 30, 31, 5),
    (2, 1, 1, 2, 2, 64),
]
CAUSAL: list[Visible] = ["before", None]


def _make_inputs(shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of what comes out, bfloat16, as they lie in a model: a row's tokens first.

    Scores are some 6 either way: rounded to bfloat16 they would be off by more than what is allowed.
    """
    rows, heads, key_heads, queries, keys, width = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(queries, heads), (keys, key_heads), (keys, key_heads), (queries, heads)]
    tensors = [torch.randn(rows, *size, width, generator=generator) for size in sizes]
    tensors[0] *= 6
    return [x.bfloat16().transpose(1, 2) for x in tensors]


def _run_attention(attention: object, inputs: list[Tensor], visible: Visible) -> list[Tensor]:
    """What comes out, and the gradients of q, k and v."""
    assert callable(attention)
    *leaves, grad = (x.detach().requires_grad_() for x in inputs)
    out = attention(*leaves, visible)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]


def _relative_error(x: Tensor, wanted: Tensor) -> float:
    return float((x.double() - wanted).norm() / wanted.norm())


# the parts that small blocks sum are larger than their sum, and so are the parts' roundings
@pytest.mark.parametrize(
    ("rows", "scores", "ends", "roundings"), [(128, 1 << 20, 32, 3), (8, 300, 32, 6), (4, 1, 3, 6)]
)
@pytest.mark.parametrize(("shape", "visible"), list(product(SHAPES, CAUSAL)))
def test_output_and_gradients_are_within_the_roundings_of_their_factors(
    shape: tuple[int, ...],
    visible: Visible,
    rows: int,
    scores: int,
    ends: int,
    roundings: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_attention, "_BLOCK_ROWS", rows)
    monkeypatch.setattr(cpu_attention, "_BLOCK_SCORES", scores)
    monkeypatch.setattr(cpu_attention, "_MAX_WIDTHS", ends)
    inputs = _make_inputs(shape)
    outputs = _run_attention(cpu_attention.attention, inputs, visible)
    wanted = _run_attention(REFERENCE.attention, [x.double() for x in inputs], visible)
    for x, exact in zip(outputs, wanted, strict=True):
        assert x.dtype == torch.bfloat16
        # roundings one on another: of the probabilities or their gradient, of a block's part, of the result.
        # Each is as far off as the result's own, or has no part in it; their squares add up
        assert _relative_error(x, exact) <= 1.2 * roundings**0.5 * _relative_error(exact.bfloat16(), exact)


@pytest.mark.parametrize(("rows", "scores"), [(128, 1 << 20), (8, 300), (4, 1)])
@pytest.mark.parametrize(("shape", "visible"), list(product(SHAPES, CAUSAL)))
def test_output_and_gradients_of_float32_are_as_near_as_torchs(
    shape: tuple[int, ...], visible: Visible, rows: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "_BLOCK_ROWS", rows)
    monkeypatch.setattr(cpu_attention, "_BLOCK_SCORES", scores)
    inputs = [x.float() for x in _make_inputs(shape)]
    outputs = _run_attention(cpu_attention.attention, inputs, visible)
    wanted = _run_attention(REFERENCE.attention, [x.double() for x in inputs], visible)
    for x, exact in zip(outputs, wanted, strict=True):
        assert x.dtype == torch.float32
        assert _relative_error(x, exact) < 2e-6


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_halves_computed_in_float32_are_rounded_once_at_the_end(half: torch.dtype) -> None:
    inputs = [x.to(half) for x in _make_inputs((2, 4, 2, 37, 37, 16))]
    outputs = _run_attention(cpu_attention.attention_in_float32, inputs, "before")
    wanted = _run_attention(cpu_attention.attention, [x.float() for x in inputs], "before")
    for x, exact in zip(outputs, wanted, strict=True):
        assert torch.equal(x, exact.to(half))


@pytest.mark.parametrize("keys", [256, 300])
def test_blocks_of_the_size_that_is_used_are_as_near_as_small_ones(keys: int) -> None:
    inputs = _make_inputs((1, 2, 2, keys, keys, 64))
    outputs = _run_attention(cpu_attention.attention, inputs, "before")
    wanted = _run_attention(REFERENCE.attention, [x.double() for x in inputs], "before")
    for x, exact in zip(outputs, wanted, strict=True):
        assert _relative_error(x, exact) <= 1.2 * 3**0.5 * _relative_error(exact.bfloat16(), exact)


def test_equal_numbers_come_of_rows_computed_alone_and_together() -> None:
    inputs = _make_inputs((3, 2, 2, 40, 40, 16))
    together = _run_attention(cpu_attention.attention, inputs, "before")
    for row in range(3):
        alone = _run_attention(cpu_attention.attention, [x[row : row + 1] for x in inputs], "before")
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_scores_far_from_zero_overflow_nowhere() -> None:
    q, k, v, grad = _make_inputs((1, 2, 2, 33, 33, 16))
    inputs = [10 * q, 60 * k, v, grad]
    outputs = _run_attention(cpu_attention.attention, inputs, "before")
    assert all(torch.isfinite(x).all() for x in outputs)
    wanted = _run_attention(REFERENCE.attention, [x.double() for x in inputs], "before")
    for i in (0, 3):  # each query sees one key alone: the gradients of the scores are rounding and no more
        assert _relative_error(outputs[i], wanted[i]) < 0.01


def test_masks_single_queries_and_other_precisions_are_the_definitions() -> None:
    q, k, v, _ = _make_inputs((1, 4, 2, 8, 8, 16))
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    for inputs, visible in (
        ((q, k, v), seen),
        ((q[:, :, -1:], k, v), "before"),
        ((q.double(), k.double(), v.double()), "before"),
        ((q.half(), k.half(), v.half()), None),
    ):
        assert torch.equal(cpu_attention.attention(*inputs, visible), REFERENCE.attention(*inputs, visible))
    for inputs, visible in (((q, k, v), seen), ((q[:, :, -1:], k, v), "before")):
        wanted = REFERENCE.attention(*inputs, visible)
        assert torch.equal(cpu_attention.attention_in_float32(*inputs, visible), wanted)


@pytest.mark.parametrize("attention", [cpu_attention.attention, cpu_attention.attention_in_float32])
def test_nothing_is_kept_but_what_was_given(attention: Callable[..., Tensor]) -> None:
    *inputs, _ = _make_inputs((1, 2, 2, 40, 40, 16))
    leaves, saved_tensors = [x.detach().requires_grad_() for x in inputs], []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved_tensors.append(x.data_ptr()) or x, lambda x: x
    ):
        attention(*leaves, "before")
    assert saved_tensors == [x.data_ptr() for x in leaves]


def test_the_ends_of_a_long_row_are_few() -> None:
    ends = {block.keys for block in cpu_attention._blocks(1 << 15, 1 << 15, 1, causal=True)}
    assert len(ends) == 32
    assert max(ends) == 1 << 15
