"""Pages that FlexAttention reads in place (arXiv:2412.05496).

The keys of the kernel are all slots of the pool. A block mask names the pages of each sequence, and the mask
function turns a slot into the position that it holds for the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_serve.execution.device_inputs import DeviceInputs
from mega_serve.execution.paged_attention import TorchPages
from mega_serve.execution.step_layout import StepLayout, pad_tables

_QUERY_BLOCK = 128

Index = Tensor


class FlexPages(TorchPages):
    """`TorchPages` attended by FlexAttention, compiled on a GPU; on a CPU it materializes all scores.

    Chunks of one token are computed together, every other chunk by itself. On a GPU a page has a multiple of
    128 tokens; `attention_choice` checks that.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._flex: Callable[..., Any] = flex_attention
        if self.device.type == "cuda":
            self._flex = torch.compile(flex_attention, dynamic=True)

    def begin_step(self, layout: StepLayout) -> AttentionBackend:
        """Return the attention backend of one step."""
        slot_T = torch.from_numpy(layout.slot_T).to(self.device)
        table_CW = torch.from_numpy(pad_tables(layout)).to(self.device)
        count_C, start_C = layout.chunk_C4[:, 1], layout.chunk_C4[:, 2]
        groups = [np.flatnonzero(count_C == 1), *np.flatnonzero(count_C > 1)[:, None]]
        parts = []  # tokens of a group, number of its sequences, its sequences
        for group in groups:
            if len(group):
                chunk_C = torch.from_numpy(group).to(self.device)
                first_C, count = layout.chunk_C4[group, 0], int(count_C[group[0]])
                token_T = torch.from_numpy((first_C[:, None] + np.arange(count)).reshape(-1)).to(self.device)
                start = torch.from_numpy(start_C[group]).to(self.device)
                parts.append((token_T, len(group), self._sequences(table_CW[chunk_C], start, count)))

        def attend(
            layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
        ) -> Tensor:
            keys, values = self.store(layer, k_TKH, v_TKH, slot_T)
            out_TNH = torch.empty_like(q_TNH)
            for token_T, rows, sequences in parts:
                q_BsNH = q_TNH[token_T].view(rows, -1, *q_TNH.shape[1:])
                out = self._attend(q_BsNH, keys, values, sequences, mask)
                out_TNH[token_T] = out.flatten(0, 1).to(q_TNH.dtype)
            return out_TNH

        return attend

    def begin_decode(self, inputs: DeviceInputs) -> AttentionBackend:
        """Return the backend of a step with one token per sequence, which reads nothing from the host."""
        sequences = self._sequences(inputs.table_BW, inputs.position_B, 1)

        def attend(
            layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
        ) -> Tensor:
            keys, values = self.store(layer, k_TKH, v_TKH, inputs.slot_B)
            return self._attend(q_TNH[:, None], keys, values, sequences, mask)[:, 0].to(q_TNH.dtype)

        return attend

    def _sequences(self, table_BW: Tensor, start_B: Tensor, count: int) -> _Sequences:
        """Describe sequences with `count` new tokens each."""
        num_pages, page_size = self.layer_pages(self.layers[0])[0].shape[:2]
        return _Sequences(table_BW, start_B, count, num_pages=num_pages, page_size=page_size)

    def _attend(
        self, q_BsNH: Tensor, keys: Tensor, values: Tensor, sequences: _Sequences, mask: AttentionMask
    ) -> Tensor:
        k, v = (pages.flatten(0, 1).transpose(0, 1)[None] for pages in (keys, values))
        out: Tensor = self._flex(
            q_BsNH.transpose(1, 2).to(k.dtype),
            k,
            v,
            score_mod=sequences.score_function(self.slopes(mask)),
            block_mask=sequences.block_mask(mask.window),
            enable_gqa=q_BsNH.shape[2] != k.shape[1],
        )
        return out.transpose(1, 2)


class _Sequences:
    """Sequences with the same number of new tokens: which position each slot of the pool holds for them.

    Args:
        table_BW: the pages of each sequence in order; pages beyond its last token are not read.
        start_B: position of the first new token.
    """

    def __init__(
        self, table_BW: Tensor, start_B: Tensor, count: int, *, num_pages: int, page_size: int
    ) -> None:
        device = table_BW.device
        self._start_B, self._page_size, self._count = start_B, page_size, count
        self._slots = num_pages * page_size
        page_W = torch.arange(table_BW.shape[1], device=device)
        self._used_B = torch.div(start_B + count - 1, page_size, rounding_mode="floor") + 1
        is_used_BW = page_W < self._used_B[:, None]
        # one page more than there are collects what is not used
        place_BW = torch.where(is_used_BW, table_BW.long(), num_pages)
        self._logical_BP = torch.full((len(table_BW), num_pages + 1), -1, dtype=torch.long, device=device)
        self._logical_BP.scatter_(1, place_BW, page_W.expand_as(place_BW))
        self._logical_BP[:, num_pages] = -1
        blocks = -(-count // _QUERY_BLOCK)
        # the pages of a sequence, in a row as wide as the pool
        indices_BP = torch.zeros((len(table_BW), num_pages), dtype=torch.int32, device=device)
        indices_BP[:, : table_BW.shape[1]] = torch.where(is_used_BW, table_BW, 0)[:, :num_pages]
        self._indices = indices_BP[:, None, None].expand(-1, 1, blocks, -1).contiguous()
        self._counts = self._used_B.int()[:, None, None].expand(-1, 1, blocks).contiguous()

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the pages that each sequence reads, and the mask within them."""
        logical_BP, start_B, page_size = self._logical_BP, self._start_B, self._page_size

        def is_visible(b: Index, h: Index, q: Index, slot: Index) -> Tensor:
            page = logical_BP[b, slot // page_size]
            distance = start_B[b] + q - (page * page_size + slot % page_size)
            visible = (page >= 0) & (distance >= 0)
            return visible if window is None else visible & (distance < window)

        return BlockMask.from_kv_blocks(
            self._counts,
            self._indices,
            BLOCK_SIZE=(_QUERY_BLOCK, page_size),
            mask_mod=is_visible,
            seq_lengths=(self._count, self._slots),
        )

    def score_function(self, slope_N: Tensor | None) -> Callable[..., Tensor] | None:
        """Return the function that lowers scores by distance; None without ALiBi."""
        if slope_N is None:
            return None
        logical_BP, start_B, page_size = self._logical_BP, self._start_B, self._page_size

        def lower(score: Tensor, b: Index, h: Index, q: Index, slot: Index) -> Tensor:
            position = logical_BP[b, slot // page_size] * page_size + slot % page_size
            return score - slope_N[h] * (start_B[b] + q - position)

        return lower
