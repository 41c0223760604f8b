"""The inputs of a decode step in device memory that stays in place, so that a CUDA graph can read it.

Legend: B rows of the batch, padding rows included; W pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mega_serve.engine.interfaces import Chunk


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """One new token of each of B sequences. All tensors are on the device.

    Attributes:
        token_B: ids, int64.
        position_B: positions in the sequences, int64.
        slot_B: page · page size + offset in the page, int64.
        table_BW: the pages of each sequence in order, int32.
    """

    token_B: Tensor
    position_B: Tensor
    slot_B: Tensor
    table_BW: Tensor


class InputBuffers:
    """Device memory for the inputs of up to `rows` sequences, filled before every step.

    A padding row writes its token to the spare page, which belongs to no sequence, and attends to nothing
    else.

    Args:
        max_pages: pages of the longest sequence.
        spare_page: number of the page that padding rows use.
    """

    def __init__(
        self, rows: int, *, max_pages: int, page_size: int, spare_page: int, device: torch.device
    ) -> None:
        is_cuda = device.type == "cuda"
        # copies from pinned memory do not wait for the device
        self._host_3B = torch.zeros((3, rows), dtype=torch.int64, pin_memory=is_cuda)
        self._host_BW = torch.full((rows, max_pages), spare_page, dtype=torch.int32, pin_memory=is_cuda)
        self._device_3B = self._host_3B.to(device, copy=True)
        self._device_BW = self._host_BW.to(device, copy=True)
        self._page_size = page_size
        self._spare_page = spare_page

    def view(self, rows: int) -> DeviceInputs:
        """Return the first `rows` rows, which later calls of `fill` change in place."""
        token_B, position_B, slot_B = self._device_3B[:, :rows]
        return DeviceInputs(token_B, position_B, slot_B, self._device_BW[:rows])

    def fill(self, chunks: Sequence[Chunk], rows: int) -> None:
        """Copy chunks of one token each to the first rows, and padding to the others up to `rows`.

        The host's memory is written again by the next call, so the caller must have read a result of this
        step before.
        """
        token_B, position_B, slot_B = self._host_3B.numpy()
        table_BW = self._host_BW.numpy()
        size = self._page_size
        for i, chunk in enumerate(chunks):
            pages = chunk.pages[: chunk.start // size + 1]
            assert len(chunk.token_ids) == 1, f"{len(chunk.token_ids)} tokens in a decode step"
            assert len(pages) * size > chunk.start, f"position {chunk.start} in {len(pages)} pages"
            assert max(pages) < self._spare_page, f"page {max(pages)} of {self._spare_page}"
            token_B[i] = chunk.token_ids[0]
            position_B[i] = chunk.start
            slot_B[i] = pages[-1] * size + chunk.start % size
            table_BW[i, : len(pages)] = np.asarray(pages, np.int32)
        padding = slice(len(chunks), rows)
        token_B[padding] = 0
        position_B[padding] = 0
        slot_B[padding] = self._spare_page * size
        table_BW[padding, 0] = self._spare_page
        self._device_3B.copy_(self._host_3B, non_blocking=True)
        self._device_BW[:rows].copy_(self._host_BW[:rows], non_blocking=True)
