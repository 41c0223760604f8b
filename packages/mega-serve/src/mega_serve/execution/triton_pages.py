"""Pages that Triton kernels read in place, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_serve.execution.device_inputs import DeviceInputs
from mega_serve.execution.paged_attention import TorchPages
from mega_serve.execution.step_layout import StepLayout, pad_tables
from mega_serve.execution.triton_attention import Tiles, attend_pages, store_pages, tile_tokens

_INTERPRETER_PROCESSORS = 16


class TritonPages(TorchPages):
    """`TorchPages` attended by `triton_attention`: no gather, and one launch for all sequences of a layer."""

    def begin_step(self, layout: StepLayout) -> AttentionBackend:
        """Return the attention backend of one step."""
        slot_T = torch.from_numpy(layout.slot_T).to(self.device)
        table_CW = torch.from_numpy(pad_tables(layout)).to(self.device)
        tiles: dict[int, Tiles] = {}  # by query heads of a key head; shared by all layers

        def choose_tiles(group_size: int) -> Tiles:
            if group_size not in tiles:
                longest = int(layout.chunk_C4[:, 1].max())
                most = tile_tokens(longest, group_size)
                token, count, start, chunk = torch.from_numpy(_split_chunks(layout, most)).to(self.device)
                tiles[group_size] = Tiles(token, count, start, chunk, table_CW, most)
            return tiles[group_size]

        return self._backend(slot_T, choose_tiles)

    def begin_decode(self, inputs: DeviceInputs) -> AttentionBackend:
        """Return the backend of a step with one token per sequence, which reads nothing from the host."""
        row_B = torch.arange(len(inputs.token_B), dtype=torch.int32, device=self.device)
        tiles = Tiles(row_B, torch.ones_like(row_B), inputs.position_B, row_B, inputs.table_BW, 1)
        return self._backend(inputs.slot_B, lambda group_size: tiles)

    def _backend(self, slot_T: Tensor, choose_tiles: Callable[[int], Tiles]) -> AttentionBackend:
        processors = _INTERPRETER_PROCESSORS
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count

        def attend(
            layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
        ) -> Tensor:
            keys, values = self.layer_pages(layer)
            store_pages(k_TKH, v_TKH, keys, values, slot_T)
            tiles = choose_tiles(q_TNH.shape[1] // k_TKH.shape[1])
            return attend_pages(
                q_TNH,
                keys,
                values,
                tiles,
                window=mask.window,
                slope_N=self.slopes(mask),
                processors=processors,
            )

        return attend


def _split_chunks(layout: StepLayout, tile_tokens: int) -> np.ndarray:
    """Return (4, tiles) int32: first token, number of tokens, position of the first, and chunk."""
    columns = []
    for chunk, (first, count, start, _) in enumerate(layout.chunk_C4.tolist()):
        for offset in range(0, count, tile_tokens):
            columns.append((first + offset, min(tile_tokens, count - offset), start + offset, chunk))
    return np.ascontiguousarray(np.array(columns, np.int32).T)
