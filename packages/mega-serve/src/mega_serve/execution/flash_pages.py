"""Pages that flash-attn reads in place, on a GPU (arXiv:2307.08691)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_serve.execution.device_inputs import DeviceInputs
from mega_serve.execution.paged_attention import TorchPages
from mega_serve.execution.step_layout import StepLayout, pad_tables


class FlashPages(TorchPages):
    """`TorchPages` attended by flash-attn: its varlen function for chunks, its kvcache function for decoding.

    The package asks for pages of a multiple of 256 tokens, for bfloat16 or float16, and for heads of at most
    256; `attention_choice` checks that.
    """

    def begin_step(self, layout: StepLayout) -> AttentionBackend:
        """Return the attention backend of one step."""
        flash = import_module("flash_attn")
        count_C = layout.chunk_C4[:, 1]
        length_C = count_C + layout.chunk_C4[:, 2]
        slot_T = torch.from_numpy(layout.slot_T).to(self.device)
        settings = {
            "cu_seqlens_q": self._sum_lengths(count_C),
            "cu_seqlens_k": self._sum_lengths(length_C),
            "max_seqlen_q": int(count_C.max()),
            "max_seqlen_k": int(length_C.max()),
            "block_table": torch.from_numpy(pad_tables(layout)).to(self.device),
        }

        def attend(
            layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
        ) -> Tensor:
            keys, values = self.store(layer, k_TKH, v_TKH, slot_T)
            out_TNH: Tensor = flash.flash_attn_varlen_func(
                q_TNH.to(keys.dtype), keys, values, **settings, **self._mask_settings(mask)
            )
            return out_TNH.to(q_TNH.dtype)

        return attend

    def begin_decode(self, inputs: DeviceInputs) -> AttentionBackend:
        """Return the backend of a step with one token per sequence, which reads nothing from the host."""
        flash = import_module("flash_attn")
        length_B = (inputs.position_B + 1).int()

        def attend(
            layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
        ) -> Tensor:
            keys, values = self.store(layer, k_TKH, v_TKH, inputs.slot_B)
            out_B1NH: Tensor = flash.flash_attn_with_kvcache(
                q_TNH.to(keys.dtype)[:, None],
                keys,
                values,
                cache_seqlens=length_B,
                block_table=inputs.table_BW,
                **self._mask_settings(mask),
            )
            return out_B1NH[:, 0].to(q_TNH.dtype)

        return attend

    def _sum_lengths(self, length_C: np.ndarray) -> Tensor:
        """Return (C + 1,) int32: where each sequence begins, and the end."""
        return torch.from_numpy(np.append(0, np.cumsum(length_C)).astype(np.int32)).to(self.device)

    def _mask_settings(self, mask: AttentionMask) -> Mapping[str, Any]:
        """Return a mask as flash-attn's arguments; its window does not count the query's own position."""
        left = -1 if mask.window is None else mask.window - 1
        return {
            "causal": True,
            "window_size": (left, 0 if left >= 0 else -1),
            "alibi_slopes": self.slopes(mask),
        }
