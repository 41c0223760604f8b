"""Paged keys and values: a pool of pages for all layers, and attention backends that read it.

A page holds the keys and values of `page_size` consecutive tokens of one sequence, in all layers. A chunk's
block table names its pages in order (arXiv:2309.06180). `TorchPages` runs on any device; `NumbaPages` reads
the pages in place on a CPU. `triton_pages`, `flash_pages` and `flex_pages` are for GPUs.

Legend: T tokens; N query heads, K key heads of this rank; H width of a head; S keys of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.kernels import Visible
from mega_model.kernels.numba import as_array, run_kernel
from mega_model.kernels.page_tiles import tile_tasks
from mega_model.kernels.reference import attention
from mega_schema.spec import ModelSpec
from mega_serve.execution.device_inputs import DeviceInputs
from mega_serve.execution.resident_memory import populate_in_background
from mega_serve.execution.step_layout import StepLayout


class KeyValuePages(Protocol):
    """Keys and values in pages, with the attention backend that reads them."""

    def begin_step(self, layout: StepLayout) -> AttentionBackend:
        """Return the attention backend of one step, which writes its keys and values to their pages."""

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, target), in all layers. No target is a source."""


class DecodePages(KeyValuePages, Protocol):
    """Pages with an attention backend that reads nothing from the host, so that a CUDA graph can hold it."""

    def begin_decode(self, inputs: DeviceInputs) -> AttentionBackend:
        """Return the attention backend of a step with one new token per sequence.

        It may compute on the device from the inputs: a graph must capture this call too.
        """


def page_bytes(spec: ModelSpec, layers: int, kv_heads: int, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one page, in `layers` layers with `kv_heads` heads of a rank."""
    head_dim = -(-spec.head_dim // _LANES) * _LANES
    return 2 * layers * kv_heads * page_size * head_dim * dtype.itemsize


_LANES = 16  # NumbaPages rounds a head's width up to this


class TorchPages:
    """Pages as torch tensors, (layers, pages, page size, K, H), attended sequence by sequence.

    A sequence in consecutive pages is a view; the pages of any other are gathered.

    Args:
        layers: global numbers of the layers of this rank's stage.
        dtype: of keys and values; on a CPU float32, in which torch's attention for one query is five times as
            fast as in bfloat16.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._index = {layer: number for number, layer in enumerate(layers)}
        shape = (len(layers), num_pages, page_size, kv_heads, head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = tuple(layers)
        self._slopes: dict[tuple[float, ...], Tensor] = {}
        self.device = device

    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer, (pages, page size, K, H)."""
        number = self._index[layer]
        return self._keys[number], self._values[number]

    def slopes(self, mask: AttentionMask) -> Tensor | None:
        """Return the ALiBi slopes of the heads, (N,) float32, copied to the device once; None: no ALiBi."""
        if not mask.slopes:
            return None
        if mask.slopes not in self._slopes:
            self._slopes[mask.slopes] = torch.tensor(mask.slopes, device=self.device)
        return self._slopes[mask.slopes]

    def store(self, layer: int, k_TKH: Tensor, v_TKH: Tensor, slot_T: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of tokens to their slots; return the layer's pages."""
        keys, values = self.layer_pages(layer)
        keys.flatten(0, 1)[slot_T] = k_TKH.to(keys.dtype)
        values.flatten(0, 1)[slot_T] = v_TKH.to(values.dtype)
        return keys, values

    def begin_step(self, layout: StepLayout) -> AttentionBackend:
        """Return the attention backend of one step."""
        slot_T = torch.from_numpy(layout.slot_T).to(self._keys.device)
        tables = [self._table_index(layout.block_table(c)) for c in range(len(layout.chunk_C4))]
        bounds = layout.chunk_C4[:, :3].tolist()
        visible: dict[AttentionMask, list[Visible]] = {}  # shared by all layers

        def attend(
            layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
        ) -> Tensor:
            keys, values = self.store(layer, k_TKH, v_TKH, slot_T)
            if mask not in visible:
                visible[mask] = [self._visible(mask, count, start) for _, count, start in bounds]
            outputs = []
            for (first, count, start), table, seen in zip(bounds, tables, visible[mask], strict=True):
                q = q_TNH[first : first + count].to(keys.dtype).transpose(0, 1)[None]
                past = _first_key(mask, start)
                k, v = (
                    pages[table].flatten(0, 1)[past : start + count].transpose(0, 1)[None]
                    for pages in (keys, values)
                )
                outputs.append(attention(q, k, v, seen)[0].transpose(0, 1))
            return torch.cat(outputs).to(q_TNH.dtype)

        return attend

    def begin_decode(self, inputs: DeviceInputs) -> AttentionBackend:
        """Return the backend of steps with one token per sequence: all pages of the tables are gathered.

        Its cost is that of sequences of full length, because a shape cannot depend on their lengths.
        """
        key_S = torch.arange(inputs.table_BW.shape[1] * self._keys.shape[2], device=self.device)

        def attend(
            layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
        ) -> Tensor:
            keys, values = self.store(layer, k_TKH, v_TKH, inputs.slot_B)
            distance_BS = inputs.position_B[:, None] - key_S
            visible_BS = distance_BS >= 0
            if mask.window is not None:
                visible_BS &= distance_BS < mask.window
            seen = visible_BS[:, None, None]
            if (slope_N := self.slopes(mask)) is not None:
                cost_BN1S = -slope_N[:, None, None] * distance_BS[:, None, None]
                seen = cost_BN1S.masked_fill(~seen, -torch.inf).to(keys.dtype)
            table_BW = inputs.table_BW.long()
            k, v = (pages[table_BW].flatten(1, 2).transpose(1, 2) for pages in (keys, values))
            q = q_TNH.to(keys.dtype)[:, :, None]
            return attention(q, k, v, seen)[:, :, 0].to(q_TNH.dtype)

        return attend

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages in all layers."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self._keys.device).T
            for pages in (self._keys, self._values):
                pages[:, targets] = pages[:, sources]

    def _table_index(self, table: np.ndarray) -> slice | Tensor:
        """Return a slice if the pages are consecutive, else their numbers."""
        first = int(table[0])
        if np.array_equal(table, np.arange(first, first + len(table))):
            return slice(first, first + len(table))
        return torch.from_numpy(table).to(self._keys.device)

    def _visible(self, mask: AttentionMask, count: int, start: int) -> Visible:
        """Return which keys, from the first that any query sees, each query of a chunk sees."""
        if mask.is_plain or (count == 1 and not mask.slopes):
            return "before"
        device = self._keys.device
        key_S = torch.arange(_first_key(mask, start), start + count, device=device)
        query_s = torch.arange(start, start + count, device=device)
        return mask.bias(mask.visible(query_s, key_S), query_s, key_S, self._keys.dtype)


def _first_key(mask: AttentionMask, start: int) -> int:
    """Return the first position that a query at `start` sees."""
    return 0 if mask.window is None else max(0, start + 1 - mask.window)


class NumbaPages:
    """Pages in the layout of `page_attention`, which computes all chunks of a layer in one call.

    Args:
        layers: global numbers of the layers of this rank's stage.
        dtype: of keys and values, bfloat16 or float32.
        kernels: the module `page_attention`, as `kernels.numba.load_kernels` returns it.

    Attributes:
        keys, values: pages of all layers, (layers, pages, ...); bfloat16 as uint16.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kernels: ModuleType,
    ) -> None:
        assert page_size % _LANES == 0, f"pages of {page_size} tokens"
        width = -(-head_dim // _LANES) * _LANES
        blocks = (len(layers), num_pages, kv_heads, page_size // _LANES)
        element = np.dtype(np.uint16 if dtype == torch.bfloat16 else np.float32)
        # numpy asks for huge pages, with which reading pages in a random order is faster
        self.keys = np.zeros((*blocks, head_dim, _LANES), element)
        self.values = np.zeros((*blocks, _LANES, width), element)
        populate_in_background([self.keys, self.values])
        self._index = {layer: number for number, layer in enumerate(layers)}
        self._kernels = kernels

    def begin_step(self, layout: StepLayout) -> AttentionBackend:
        """Return the attention backend of one step."""
        kv_heads = self.keys.shape[2]
        tasks: dict[int, np.ndarray] = {}  # by query heads of a key head; shared by all layers

        def attend(
            layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
        ) -> Tensor:
            number = self._index[layer]
            heads = q_TNH.shape[1]
            group_size = heads // kv_heads
            if group_size not in tasks:
                tasks[group_size] = tile_tasks(
                    layout.chunk_C4,
                    kv_heads,
                    group_size,
                    tile_rows=self._kernels.TILE_ROWS,
                    sequence_rows=self._kernels.SEQUENCE_ROWS,
                    threads=torch.get_num_threads(),
                )
            out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
            slopes = np.array(mask.slopes or [0.0] * heads, np.float32)
            run_kernel(
                self._kernels,
                "attend",
                *map(as_array, (q_TNH, k_TKH, v_TKH)),
                self.keys[number],
                self.values[number],
                as_array(out_TNH),
                tasks[group_size],
                layout.chunk_C4,
                layout.pages,
                layout.slot_T,
                layout.longest,
                mask.window or 0,
                slopes,
                np.float32(q_TNH.shape[2] ** -0.5),
            )
            return out_TNH

        return attend

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages in all layers."""
        if pairs:
            sources, targets = np.array(pairs, np.intp).T
            for pages in (self.keys, self.values):
                pages[:, targets] = pages[:, sources]
