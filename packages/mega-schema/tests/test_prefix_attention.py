"""Attention with prefixes: against a dense mask and plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.attention_mask import AttentionMask, alibi_slopes
from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout, token_keys
from mega_model.kernels import Visible, cpu_attention, reference
from mega_model.prefix_attention import PrefixAttention, PrefixSpan, find_prefix_spans

ROWS, LENGTH, HEADS, KEY_HEADS, WIDTH = 3, 9, 4, 2, 8
# one document; three, of which the first is a single token; one that is all prefix
DOCUMENTS = np.array([[0] * 9, [0, 1, 1, 1, 1, 2, 2, 2, 2], [0] * 9])
PREFIXES = np.array([[1] * 4 + [0] * 5, [1, 1, 1, 1, 0, 1, 0, 0, 0], [1] * 9])
SPANS = [
    PrefixSpan(0, 0, 4, 9),
    *(PrefixSpan(1, 0, 1, 1), PrefixSpan(1, 1, 4, 5), PrefixSpan(1, 5, 6, 9)),
    PrefixSpan(2, 0, 9, 9),
]


def test_the_spans_are_the_documents_of_every_row() -> None:
    assert find_prefix_spans(DOCUMENTS, PREFIXES) == SPANS


def _heads(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(ROWS * LENGTH, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _dense_mask() -> Tensor:
    """(B, S, S) which keys a query sees, by the definition: its own document; the prefix, or before it."""
    document_BS, prefix_BS = torch.from_numpy(DOCUMENTS), torch.from_numpy(PREFIXES)
    position_S = torch.arange(LENGTH)
    is_before = position_S[None, :] <= position_S[:, None]
    same = document_BS[:, :, None] == document_BS[:, None, :]
    return same & (is_before | (prefix_BS[:, None, :] == 1))


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...] = ()) -> Tensor:
    """Softmax of all scores in float64, in plain formulas."""
    q, k, v = (x.double().unflatten(0, (ROWS, LENGTH)) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (k, v))
    score = torch.einsum("bsnh,btnh->bnst", q, k) / WIDTH**0.5
    if slopes:  # BigScience adds slope x key position
        score = score + torch.tensor(slopes).double()[:, None, None] * torch.arange(LENGTH)
    probability = score.masked_fill(~_dense_mask()[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bnst,btnh->bsnh", probability, v).flatten(0, 1).float()


@pytest.mark.parametrize(
    "kernel",
    [reference.attention, cpu_attention.attention, cpu_attention.attention_in_float32],
    ids=["torch", "blockwise", "blockwise in float32"],
)
def test_output_and_gradients_are_those_of_a_dense_mask(kernel: Any) -> None:
    inputs = _heads()
    attend = PrefixAttention(ROWS, LENGTH, SPANS, attention=kernel)
    actual, wanted = attend(0, *inputs), _dense_attention(*inputs)
    torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(actual, inputs, grad)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted, inputs, grad), atol=1e-5, rtol=1e-5)


def test_no_kernel_sees_a_dense_mask() -> None:
    seen = list[Visible]()

    def kernel(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        seen.append(visible)
        return reference.attention(q, k, v, visible)

    PrefixAttention(ROWS, LENGTH, SPANS, attention=kernel)(0, *_heads())
    assert seen == [None, "before", None, None, "before", None, "before", None]


def test_alibi_counts_distances_in_the_prefix_too() -> None:
    inputs = _heads()
    slopes = alibi_slopes(HEADS)
    actual = PrefixAttention(ROWS, LENGTH, SPANS)(0, *inputs, AttentionMask(slopes=slopes))
    torch.testing.assert_close(actual, _dense_attention(*inputs, slopes), atol=1e-5, rtol=1e-5)


def test_dropout_drops_the_elements_that_it_drops_in_causal_attention() -> None:
    """A prefix of one token is none: the result is that of `PackedAttention`, dropout included."""
    spans = [PrefixSpan(row, 0, 1, LENGTH) for row in range(ROWS)]
    dropout = Dropout(0.0, 0.4, token_keys(7, range(ROWS), torch.arange(LENGTH)), Axis("tp"))
    inputs = _heads()
    actual = PrefixAttention(ROWS, LENGTH, spans, dropout)(3, *inputs)
    wanted = PackedAttention(ROWS, LENGTH, dropout=dropout)(3, *inputs)
    torch.testing.assert_close(actual, wanted)
    torch.testing.assert_close(
        PrefixAttention(ROWS, LENGTH, spans)(3, *inputs), PackedAttention(ROWS, LENGTH)(3, *inputs)
    )


def test_a_window_is_refused() -> None:
    with pytest.raises(AssertionError, match="sliding window"):
        PrefixAttention(ROWS, LENGTH, SPANS)(0, *_heads(), AttentionMask(window=4))
