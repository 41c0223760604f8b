"""Attention with T5's learned bias: the blockwise kernel against the equation, in value and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.attention_mask import AttentionMask
from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout, token_keys
from mega_model.kernels import Visible, cpu_attention
from mega_model.kernels.relative_bias import expand_bias, reduce_bias_gradient, relative_attention

DISTANCES = 2 * 5 + 1


def _inputs(queries: int, key_heads: int) -> list[Tensor]:
    """Queries, keys, values, biases and the gradient of the output, float64, of 3 rows and 4 heads."""
    generator = torch.Generator().manual_seed(queries)
    shapes = [(3, 4, queries, 8), (3, key_heads, queries, 8), (3, key_heads, queries, 8)]
    shapes += [(4, DISTANCES), (3, 4, queries, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _visible(name: str, queries: int) -> Visible:
    if name != "padding":
        return "before" if name == "causal" else None
    is_real = torch.arange(queries) < torch.tensor([queries, queries // 2 + 1, 1])[:, None]
    return (is_real[:, :, None] == is_real[:, None])[:, None]


def _run(kernel: Callable[..., Tensor], inputs: list[Tensor], visible: Visible) -> list[Tensor]:
    *leaves, grad = (x.detach().requires_grad_() for x in inputs)
    out = kernel(*leaves[:3], visible, leaves[3])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]


def _equation(q: Tensor, k: Tensor, v: Tensor, visible: Visible, bias: Tensor) -> Tensor:
    """softmax(q kᵀ / √H + bias) v, with the bias of each pair looked up by itself."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    position = torch.arange(q.shape[2])
    distance = (position - position[:, None]).clamp(-5, 5)
    score = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + bias[:, distance + 5]
    if visible == "before":
        score = score.masked_fill(distance > 0, -torch.inf)
    elif isinstance(visible, Tensor):
        score = score.masked_fill(~visible, -torch.inf)
    return score.softmax(-1) @ v


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize(
    ("queries", "key_heads", "block_rows", "block_scores"),
    [
        (3, 4, 16, 1 << 20),  # all rows together
        (3, 4, 3, 80),  # two rows together
        (37, 2, 16, 2400),  # two rows together, in several blocks of queries
        (37, 2, 16, 1),  # one head of a row
    ],
)
def test_output_and_gradients_are_those_of_the_equation(
    mask: str,
    queries: int,
    key_heads: int,
    block_rows: int,
    block_scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_attention, "_BLOCK_ROWS", block_rows)
    monkeypatch.setattr(cpu_attention, "_BLOCK_SCORES", block_scores)
    inputs, visible = _inputs(queries, key_heads), _visible(mask, queries)
    wanted = _run(_equation, inputs, visible)
    for x, y in zip(_run(relative_attention, inputs, visible), wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)
    single = _run(cpu_attention.relative_attention, [x.float() for x in inputs], visible)
    for x, y in zip(single, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)
    halves = [x.float() if x.ndim == 2 else x.bfloat16() for x in inputs]  # the bias is float32
    half = _run(cpu_attention.relative_attention, halves, visible)
    for x, y in zip(half, wanted, strict=True):
        assert (x.double() - y).norm() <= 0.02 * y.norm()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (7, 1), (4, 9), (9, 4)])
def test_the_gradient_of_the_expanded_bias_is_its_sum_by_distance(queries: int, keys: int) -> None:
    bias = torch.randn(2, DISTANCES, dtype=torch.float64).requires_grad_()
    grad = torch.randn(2, queries, keys, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(expand_bias(bias, queries, keys), bias, grad)
    torch.testing.assert_close(reduce_bias_gradient(grad, DISTANCES), wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_probability_zero_changes_nothing(causal: bool) -> None:
    """The path that materialises the probabilities adds the bias too."""
    q, k, v, bias, _ = (x.float() for x in _inputs(6, 2))
    mask = AttentionMask(bias_ND=bias)
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    dropout = Dropout(0.0, 1e-9, token_keys(1, [4, 5, 6], torch.arange(6)), Axis("tp"))
    outputs = [
        PackedAttention(3, 6, causal=causal, dropout=drop)(0, *tokens, mask) for drop in (None, dropout)
    ]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
