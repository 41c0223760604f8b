"""KV cache for generation from prompts of unequal lengths, whose rows leave the batch as they finish.

Keys and values of all rows end at the same column, so that a step writes one column and rows need no
padding between prompt and continuation.

Legend: B rows; T tokens of the prompts, those of a shared prefix once; S columns; N query heads, K key heads;
H width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.kernels import Visible
from mega_model.kernels.reference import attention, to_attention_dtype
from mega_model.token_tree import IntArray
from mega_schema.spec import ModelSpec


def cache_token_bytes(spec: ModelSpec, width_bytes: int, *, layers: int, tp: int) -> int:
    """Return the bytes that a cached token takes in these layers on one of `tp` ranks."""
    return 2 * width_bytes * layers * (spec.kv_heads // tp) * spec.head_dim


class RowCache:
    """Attention of one new token for each row to the cached tokens of that row.

    Args:
        layers: those of this pipeline stage, by their global numbers.
        lengths: tokens of each prompt; `PromptAttention` stores them.
        new_tokens: most tokens that a row appends.

    Attributes:
        rows: B.
        length: columns in use.
    """

    def __init__(self, layers: range, lengths: Sequence[int], *, new_tokens: int) -> None:
        self.rows = len(lengths)
        self.length = max(lengths)
        self._starts = [self.length - length for length in lengths]
        self._layers = layers
        self._columns = self.length + new_tokens
        # (layers, B, K, S, H); allocated when the first keys tell their heads, dtype and device
        self._keys = self._values = torch.empty(0)
        self._visible: dict[AttentionMask, Visible] = {}  # of one step, shared by all layers

    @property
    def positions(self) -> list[int]:
        """The position of the next token of each row."""
        return [self.length - start for start in self._starts]

    def store_prompts(self, layer: int, source_BS: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Set the prompts' keys and values of a layer.

        Args:
            source_BS: index on the axis of tokens for each column; any before a row's first token.
        """
        if layer == self._layers[0]:
            shape = (len(self._layers), self.rows, k_TKH.shape[1], self._columns, k_TKH.shape[2])
            self._keys, self._values = k_TKH.new_zeros(shape), v_TKH.new_zeros(shape)
        place = layer - self._layers[0]
        self._keys[place, :, :, : self.length] = k_TKH[source_BS].transpose(1, 2)
        self._values[place, :, :, : self.length] = v_TKH[source_BS].transpose(1, 2)

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Append a token to each row and compute its attention, (B, N, H); the last layer ends the step."""
        total = self.length + 1
        place = layer - self._layers[0]
        self._keys[place, :, :, self.length] = k_TKH
        self._values[place, :, :, self.length] = v_TKH
        first = 0 if mask.window is None else max(0, total - mask.window)
        if mask not in self._visible:
            self._visible[mask] = self._build_visible(mask, first, q_TNH)
        keys, values = (x[place, :, :, first:total] for x in (self._keys, self._values))
        out = attention(q_TNH[:, :, None], keys, values, self._visible[mask])
        if layer == self._layers[-1]:
            self.length = total
            self._visible.clear()
        return out[:, :, 0]

    def _build_visible(self, mask: AttentionMask, first: int, q: Tensor) -> Visible:
        if max(self._starts) <= first and not mask.slopes:
            return None  # nothing to hide: the one query sees all keys
        key_S = torch.arange(first, self.length + 1, device=q.device)
        start_B = torch.tensor(self._starts, device=q.device)
        visible_B11S = (key_S >= start_B[:, None])[:, None, None]
        return mask.bias(visible_B11S, key_S[-1:], key_S, to_attention_dtype(q).dtype)

    def select(self, numbers: Sequence[int]) -> None:
        """Keep these rows, in this order, and only the columns that one of them uses."""
        starts = [self._starts[number] for number in numbers]
        first = min(starts)
        row_B = torch.tensor(numbers, device=self._keys.device)
        self._keys = self._keys[:, :, :, first:].index_select(1, row_B)
        self._values = self._values[:, :, :, first:].index_select(1, row_B)
        self._starts = [start - first for start in starts]
        self.length -= first
        self.rows = len(numbers)


class PromptAttention:
    """Attention of the prompts by another backend, which also fills a cache with their keys and values.

    Args:
        attend: computes the attention.
        paths: for each row of the cache, the indices of its prompt's tokens.
    """

    def __init__(self, attend: AttentionBackend, cache: RowCache, paths: Sequence[IntArray]) -> None:
        self._attend = attend
        self._cache = cache
        source_BS = np.zeros((cache.rows, cache.length), np.int64)
        for source_S, path in zip(source_BS, paths, strict=True):
            source_S[cache.length - len(path) :] = path
        self._source_BS = torch.from_numpy(source_BS)

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Compute what the other backend does."""
        self._source_BS = self._source_BS.to(k_TKH.device)
        self._cache.store_prompts(layer, self._source_BS, k_TKH, v_TKH)
        return self._attend(layer, q_TNH, k_TKH, v_TKH, mask)
