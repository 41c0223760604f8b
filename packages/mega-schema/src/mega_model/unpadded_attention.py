"""Attention of rows of different lengths that are end to end on the axis of tokens, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend, PackedAttention, PaddedCrossAttention
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.dropout import Dropout
from mega_model.kernels import Visible
from mega_model.kernels.reference import attention, masked_softmax

_GROUP_TOKENS = 256  # fewer tokens cost less than one more call of the kernel


@dataclass(frozen=True, slots=True)
class UnpaddedAttention:
    """Attention among the tokens of each row.

    Neighbouring short rows are one call of the kernel, with a mask.

    Attributes:
        lengths: tokens of each group of rows.
        backends: the attention of each group.
        joined: the attention of all rows as one, for the layers with a window.
    """

    lengths: Sequence[int]
    backends: Sequence[AttentionBackend]
    joined: PackedAttention

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        causal: bool = True,
        device: torch.device | None = None,
        dropout: Dropout | None = None,
        attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor] = attention,
        softmax: Callable[[Tensor, Tensor | None, float], Tensor] = masked_softmax,
    ) -> UnpaddedAttention:
        """Build the attention of rows of these lengths.

        Args:
            causal, attention, softmax: as of `PackedAttention`.
            device: of the tokens; None: the CPU.
            dropout: of all tokens, in the order of the rows. What it drops depends on the positions of keys
                in their row, so with dropout of attention every row is a group of its own.
        """
        drops_scores = dropout is not None and dropout.attention > 0
        groups = _group_rows(lengths, 0 if drops_scores else max(_GROUP_TOKENS, *lengths))
        sizes = [sum(group) for group in groups]
        drops: Sequence[Dropout | None] = [None] * len(groups)
        if dropout is not None:
            drops = [replace(dropout, token_T=part) for part in dropout.token_T.split(sizes)]
        build = partial(PackedAttention, 1, causal=causal, attention=attention, softmax=softmax)
        backends = [
            build(size, _row_numbers(group, device), dropout=drop)
            for size, group, drop in zip(sizes, groups, drops, strict=True)
        ]
        joined = build(sum(lengths), _row_numbers(lengths, device), dropout=dropout)
        return cls(sizes, backends, joined)

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Compute attention; queries, keys and values are of all rows."""
        if self.joined.attends_in_blocks(mask, q_TNH.device):
            return self.joined(layer, q_TNH, k_TKH, v_TKH, mask)
        parts = zip(*(x.split(list(self.lengths)) for x in (q_TNH, k_TKH, v_TKH)), strict=True)
        groups = zip(self.backends, parts, strict=True)
        return torch.cat([attend(layer, q, k, v, mask) for attend, (q, k, v) in groups])


@dataclass(frozen=True, slots=True)
class UnpaddedCrossAttention:
    """Attention of a decoder's rows to the encoder's rows of the same samples, both without padding.

    Attributes:
        lengths, source_lengths: tokens of each row of the decoder and of the encoder.
        backends: the attention of each row of the decoder.
        sources: number of the encoder's row that each row of the decoder sees.
    """

    lengths: Sequence[int]
    source_lengths: Sequence[int]
    backends: Sequence[AttentionBackend]
    sources: Sequence[int]

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        source_lengths: Sequence[int],
        *,
        samples: int,
        dropout: Dropout | None = None,
        attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor] = attention,
        softmax: Callable[[Tensor, Tensor | None, float], Tensor] = masked_softmax,
    ) -> UnpaddedCrossAttention:
        """Build the attention of rows of these lengths.

        Args:
            samples: rows of samples; both sides may have another row after them, whose output is not used.
            dropout: of all tokens of the decoder, in the order of the rows.
        """
        drops: Sequence[Dropout | None] = [None] * len(lengths)
        if dropout is not None:
            drops = [replace(dropout, token_T=part) for part in dropout.token_T.split(list(lengths))]
        backends = [PaddedCrossAttention(1, None, drop, attention, softmax) for drop in drops]
        sources = [row if row < samples else 0 for row in range(len(lengths))]
        return cls(lengths, source_lengths, backends, sources)

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Compute attention; k and v are of the encoder's tokens."""
        queries = q_TNH.split(list(self.lengths))
        keys, values = (x.split(list(self.source_lengths)) for x in (k_TKH, v_TKH))
        rows = zip(self.backends, queries, self.sources, strict=True)
        return torch.cat([attend(layer, q, keys[i], values[i], mask) for attend, q, i in rows])


def _group_rows(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Divide the lengths into groups of neighbours, each of one row or of at most `most` tokens."""
    groups: list[list[int]] = []
    for length in lengths:
        if groups and sum(groups[-1]) + length <= most:
            groups[-1].append(length)
        else:
            groups.append([length])
    return groups


def _row_numbers(group: Sequence[int], device: torch.device | None) -> Tensor | None:
    """Return the number of each token's row, (1, S); None for one row."""
    if len(group) == 1:
        return None
    length_R = torch.tensor(group, device=device)
    return torch.arange(len(group), device=device).repeat_interleave(length_R)[None]
