"""Attention of sequences that share prefixes: a prefix is computed once for all that begin with it.

`TokenTreeAttention` adds up attention to the tokens of each node, whose parts are merged by their softmax
sums (arXiv:2205.14135 §3.1): one product for all queries that see a node, and nothing is copied.
`PagedTreeAttention` is the server's kernel over pages, whose bits do not depend on what is shared.

Legend: T tokens of a tree; R tokens whose attention is computed; P cached tokens; S keys of a node;
N query heads, K key heads; H width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.kernels.numba import NumbaKernels, as_array, run_kernel
from mega_model.kernels.page_tiles import tile_tasks
from mega_model.kernels.reference import attention, to_attention_dtype
from mega_model.token_tree import IntArray, PageLayout, TokenTree

_PAGE = 16  # tokens


class PrefixKeyValues:
    """Keys and values of the tokens that begin all sequences of later passes, of all layers."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `length` tokens, (P, K, H) each."""
        k, v = self._layers[layer]
        assert len(k) >= length, f"{length} tokens of a prefix of {len(k)}"
        return k[:length], v[:length]

    def store(self, layer: int, start: int, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Set the tokens from position `start` on; what was stored after them is forgotten."""
        if start:
            k, v = self.read(layer, start)
            k_TKH, v_TKH = torch.cat((k, k_TKH)), torch.cat((v, v_TKH))
        else:  # copies: the arguments are views of a whole projection
            k_TKH, v_TKH = k_TKH.clone(), v_TKH.clone()
        self._layers[layer] = k_TKH, v_TKH


class _TreeBackend:
    """What both backends share: the tree, the cached prefix, and which tokens attend.

    Args:
        tree: the tokens of the pass.
        row_R: sorted tokens whose attention the last layer computes; its queries are these tokens only.
        prefix: holds the keys and values of the tree's cached tokens.
        stores: append the tokens of the tree, which is one node then, to the prefix.
    """

    def __init__(self, tree: TokenTree, row_R: IntArray, prefix: PrefixKeyValues, *, stores: bool) -> None:
        assert not stores or len(tree.count_C) == 1, "a prefix is one node"
        self.tree = tree
        self.prefix = prefix
        self.stores = stores
        self.row_R = row_R
        self.all_T = np.arange(tree.tokens)

    def choose_rows(self, queries: int) -> IntArray:
        """Return the tokens that the queries belong to."""
        if queries == self.tree.tokens:
            return self.all_T
        assert queries == len(self.row_R), f"{queries} queries for {len(self.row_R)} rows"
        return self.row_R

    def extend_prefix(self, layer: int, k_TKH: Tensor, v_TKH: Tensor) -> None:
        if self.stores:
            self.prefix.store(layer, self.tree.cached, k_TKH, v_TKH)


class TokenTreeAttention(_TreeBackend):
    """Attention by torch's operations, on any device and in any dtype."""

    def __init__(self, tree: TokenTree, row_R: IntArray, prefix: PrefixKeyValues, *, stores: bool) -> None:
        super().__init__(tree, row_R, prefix, stores=stores)
        self._masks: dict[Any, Tensor] = {}  # shared by all layers

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Compute attention, (T, N, H), or (R, N, H) for the queries of R tokens."""
        self.extend_prefix(layer, k_TKH, v_TKH)
        row_R = self.choose_rows(len(q_TNH))
        if not len(row_R):
            return torch.empty_like(q_TNH)
        if q_TNH.device.type == "cpu" and mask.is_plain:
            return self._merge_nodes(layer, q_TNH, k_TKH, v_TKH, row_R)
        return self._gather_paths(layer, q_TNH, k_TKH, v_TKH, row_R, mask)

    def _merge_nodes(
        self, layer: int, q_RNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, row_R: IntArray
    ) -> Tensor:
        """Attend to the tokens of one node at a time, and merge."""
        group = q_RNH.shape[1] // k_TKH.shape[1]
        q, k, v = (to_attention_dtype(x) for x in (q_RNH, k_TKH, v_TKH))
        tree = self.tree
        bounds = tree.row_bounds(row_R).tolist()
        merged = _MergedAttention(q)
        first_C, end_C = tree.first_C.tolist(), (tree.first_C + tree.count_C).tolist()
        for node, (first, end) in enumerate(zip(first_C, end_C, strict=True)):
            keys = k[first:end].repeat_interleave(group, 1) if group > 1 else k[first:end]
            values = v[first:end].repeat_interleave(group, 1) if group > 1 else v[first:end]
            begin, own, last = bounds[node], bounds[node + 1], bounds[tree.end_C[node]]
            if own > begin:
                visible = self._own_mask(row_R[begin:own] - first, end - first, q)
                merged.add(begin, own, keys, values, visible, causal=visible is None)
            if last > own:
                merged.add(own, last, keys, values)
        if tree.cached:
            keys, values = (to_attention_dtype(x) for x in self.prefix.read(layer, tree.cached))
            if group > 1:
                keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            merged.add(0, len(row_R), keys, values)
        return merged.out_RNH.to(q_RNH.dtype)

    def _own_mask(self, offset_r: IntArray, keys: int, q: Tensor) -> Tensor | None:
        """Return the bias of a node's rows to its own keys; None: all its tokens are rows."""
        if len(offset_r) == keys:
            return None
        key = offset_r.tobytes(), keys
        if key not in self._masks:
            hidden = torch.arange(keys) > torch.from_numpy(offset_r)[:, None]
            self._masks[key] = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        return self._masks[key]

    def _gather_paths(
        self, layer: int, q_RNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, row_R: IntArray, mask: AttentionMask
    ) -> Tensor:
        """Attend to all keys of a node's sequence, which are gathered."""
        tree = self.tree
        if tree.cached:
            past_k, past_v = self.prefix.read(layer, tree.cached)
            k_TKH, v_TKH = torch.cat((past_k, k_TKH)), torch.cat((past_v, v_TKH))
        bounds = tree.row_bounds(row_R).tolist()
        parts = []
        paths: list[IntArray] = []
        for node, parent in enumerate(tree.parent_C.tolist()):
            path = np.arange(tree.cached) if parent < 0 else paths[parent]
            first, count = int(tree.first_C[node]), int(tree.count_C[node])
            paths.append(np.append(path, np.arange(first, first + count) + tree.cached))
            begin, end = bounds[node], bounds[node + 1]
            if begin == end:
                continue
            index_S = torch.from_numpy(paths[-1]).to(k_TKH.device)
            k, v = (x[index_S].transpose(0, 1)[None] for x in (k_TKH, v_TKH))
            q = q_RNH[begin:end].transpose(0, 1)[None]
            query_s = torch.from_numpy(row_R[begin:end] - first + len(path)).to(k.device)
            key_S = torch.arange(len(index_S), device=k.device)
            visible = mask.bias(mask.visible(query_s, key_S), query_s, key_S, to_attention_dtype(q).dtype)
            parts.append(attention(q, k, v, visible)[0].transpose(0, 1))
        return torch.cat(parts)


class _MergedAttention:
    """Attention of rows to several sets of keys, each weighted by its share of the softmax's sum."""

    def __init__(self, q_RNH: Tensor) -> None:
        self._q_RNH = q_RNH
        self.out_RNH = torch.empty_like(q_RNH, memory_format=torch.contiguous_format)
        self._log_sum_RN = q_RNH.new_empty(q_RNH.shape[:2])
        self._is_filled = np.zeros(len(q_RNH), np.bool_)

    def add(
        self,
        begin: int,
        end: int,
        k_SNH: Tensor,
        v_SNH: Tensor,
        visible: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> None:
        """Add attention of the rows `begin` to `end`; the first keys of a row are those of its own node."""
        q, k, v = (x.transpose(0, 1)[None] for x in (self._q_RNH[begin:end], k_SNH, v_SNH))
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=visible, scale=None
        )
        out_rNH, log_sum_rN = out[0].transpose(0, 1), log_sum[0].T
        rows = slice(begin, end)
        if not self._is_filled[begin]:
            self._is_filled[rows] = True
            self.out_RNH[rows] = out_rNH
            self._log_sum_RN[rows] = log_sum_rN
            return
        share_rN1 = torch.sigmoid(log_sum_rN - self._log_sum_RN[rows])[..., None].to(out.dtype)
        self._log_sum_RN[rows] = torch.logaddexp(self._log_sum_RN[rows], log_sum_rN)
        self.out_RNH[rows].lerp_(out_rNH, share_rN1)


class PagedTreeAttention(_TreeBackend):
    """Attention by `kernels.numba.page_attention`, with windows and slopes, on a CPU."""

    def __init__(
        self,
        kernels: NumbaKernels,
        tree: TokenTree,
        row_R: IntArray,
        prefix: PrefixKeyValues,
        *,
        stores: bool,
    ) -> None:
        super().__init__(tree, row_R, prefix, stores=stores)
        self._module = kernels.attention
        self._layout = PageLayout.from_tree(tree, _PAGE)
        self._source_X: Tensor | None = None
        if len(self._layout.source_X) > tree.tokens:
            self._source_X = torch.from_numpy(self._layout.source_X)
        self._steps: dict[int, tuple[IntArray, IntArray]] = {}  # tasks and chunks, by number of rows
        self._buffers: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Compute attention, (T, N, H), or (R, N, H) for the queries of R tokens."""
        self.extend_prefix(layer, k_TKH, v_TKH)
        out_RNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        row_R = self.choose_rows(len(q_TNH))
        if not len(row_R):
            return out_RNH
        heads, width = q_TNH.shape[1:]
        kv_heads = k_TKH.shape[1]
        if len(row_R) not in self._steps:
            self._steps[len(row_R)] = self._cut_tasks(row_R, kv_heads, heads // kv_heads)
        tasks, chunk_C4 = self._steps[len(row_R)]
        k_XKH, v_XKH = self._keys_to_write(layer, k_TKH, v_TKH)
        keys, values = self._pages(kv_heads, width, q_TNH.dtype)
        run_kernel(
            self._module,
            "attend",
            *(as_array(x) for x in (q_TNH, k_XKH, v_XKH)),
            keys,
            values,
            as_array(out_RNH),
            tasks,
            chunk_C4,
            self._layout.pages,
            self._layout.slot_X,
            int((chunk_C4[:, 1] + chunk_C4[:, 2]).max()),
            mask.window or 0,
            np.array(mask.slopes or [0.0] * heads, np.float32),
            np.float32(width**-0.5),
        )
        return out_RNH

    def _cut_tasks(self, row_R: IntArray, kv_heads: int, group: int) -> tuple[IntArray, IntArray]:
        chunk_C4 = self._layout.chunks(self.tree, row_R)
        tasks = tile_tasks(
            chunk_C4,
            kv_heads,
            group,
            tile_rows=self._module.TILE_ROWS,
            sequence_rows=self._module.SEQUENCE_ROWS,
            threads=torch.get_num_threads(),
        )
        return tasks, chunk_C4

    def _keys_to_write(self, layer: int, k_TKH: Tensor, v_TKH: Tensor) -> Sequence[Tensor]:
        """Return the tree's keys and values with the cached ones, those that two pages hold twice."""
        if self._source_X is None:
            return k_TKH, v_TKH
        new = (k_TKH, v_TKH)
        if self.tree.cached:
            past = self.prefix.read(layer, self.tree.cached)
            new = (torch.cat((past[0], k_TKH)), torch.cat((past[1], v_TKH)))
        return [x[self._source_X] for x in new]

    def _pages(
        self, kv_heads: int, width: int, dtype: torch.dtype
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the memory of a layer's pages, which the layers use one after another."""
        if self._buffers is None:
            element = np.dtype(np.uint16 if dtype == torch.bfloat16 else np.float32)
            pages = self._layout.count
            self._buffers = (
                np.zeros((pages, kv_heads, 1, width, _PAGE), element),
                np.zeros((pages, kv_heads, 1, _PAGE, -(-width // _PAGE) * _PAGE), element),
            )
        return self._buffers
