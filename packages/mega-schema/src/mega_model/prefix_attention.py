"""Attention of prefix language models: tokens of a prefix see each other, later tokens are causal.

Legend: T tokens of B rows of S; N query heads, K key heads; H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mega_model.attention_backends import attend_with_dropout
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.dropout import Dropout
from mega_model.kernels import Visible
from mega_model.kernels.reference import attention, masked_softmax, to_attention_dtype


class PrefixSpan(NamedTuple):
    """A document of a row: positions `begin` to `end`, of which those before `middle` are its prefix."""

    row: int
    begin: int
    middle: int
    end: int


@dataclass(frozen=True, slots=True)
class PrefixAttention:
    """Attention for training and scoring with a prefix in every document (arXiv:1910.10683 §3.2.1).

    A token sees the prefix of its own document and the tokens of the document up to itself. A document is two
    calls of the kernel: its prefix without a mask, then its other tokens with the causal one. So kernels that
    know no masks, such as flash-attn's, compute it, and there are no S² numbers in memory. ALiBi and dropout
    of the probabilities do build the mask.

    Attributes:
        rows, length: B and S; T = B·S.
        spans: the documents of all rows, in order and without gaps.
        dropout, attention, softmax: as of `PackedAttention`.
    """

    rows: int
    length: int
    spans: Sequence[PrefixSpan]
    dropout: Dropout | None = None
    attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor] = attention
    softmax: Callable[[Tensor, Tensor | None, float], Tensor] = masked_softmax
    _visible: dict[AttentionMask, Tensor] = field(
        init=False, repr=False, default_factory=dict
    )  # shared by all layers

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Compute attention, (T, N, H)."""
        assert mask.window is None, "a prefix with a sliding window is not defined"
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
        drop = self.dropout
        score_key = None if drop is None else drop.score_keys(layer, self.rows, q.shape[1])
        if mask.slopes or score_key is not None:
            if mask not in self._visible:
                self._visible[mask] = self._build_visible(mask, q)
            visible = self._visible[mask]
            out = attend_with_dropout(self.attention, self.softmax, q, k, v, visible, drop, score_key)
            return out.transpose(1, 2).flatten(0, 1)
        parts = [
            self.attention(
                q[span.row, None, :, begin:end],
                k[span.row, None, :, span.begin : end],
                v[span.row, None, :, span.begin : end],
                visible_keys,
            )
            for span in self.spans
            for begin, end, visible_keys in _calls(span)
        ]
        return torch.cat([part[0].transpose(0, 1) for part in parts])

    def _build_visible(self, mask: AttentionMask, q: Tensor) -> Tensor:
        """Build the mask of the keys that each query sees, (B, 1, S, S) bool, or the bias with slopes."""
        visible_B1SS = torch.zeros(self.rows, 1, self.length, self.length, dtype=torch.bool)
        for row, begin, middle, end in self.spans:
            within = visible_B1SS[row, 0, begin:end, begin:end]
            within.fill_(True).tril_()
            within[:, : middle - begin] = True
        position_S = torch.arange(self.length, device=q.device)
        dtype = to_attention_dtype(q).dtype
        return mask.bias(visible_B1SS.to(q.device), position_S, position_S, dtype)


def find_prefix_spans(document_BS: NDArray[Any], prefix_BS: NDArray[Any]) -> list[PrefixSpan]:
    """Find the documents of every row, and where their prefixes end.

    Args:
        document_BS: document number of each token; equal numbers are next to each other.
        prefix_BS: whether each token is in the prefix of its document, which is its first tokens.
    """
    spans = list[PrefixSpan]()
    for row, (document_S, prefix_S) in enumerate(zip(document_BS, prefix_BS, strict=True)):
        begins = [0, *(np.flatnonzero(np.diff(document_S)) + 1).tolist()]
        for begin, end in zip(begins, [*begins[1:], len(document_S)], strict=True):
            middle = begin + int(np.count_nonzero(prefix_S[begin:end]))
            spans.append(PrefixSpan(row, begin, middle, end))
    return spans


def _calls(span: PrefixSpan) -> list[tuple[int, int, Visible]]:
    """List the calls of the kernel: first and last + 1 of the queries, and which of their keys they see."""
    calls: list[tuple[int, int, Visible]] = [
        (span.begin, span.middle, None),
        (span.middle, span.end, "before"),
    ]
    return [call for call in calls if call[0] < call[1]]
