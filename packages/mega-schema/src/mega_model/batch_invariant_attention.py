"""Attention of training and scoring by the server's kernel: a token's bits are those of any served step.

Legend: T tokens of B rows of S; N query heads, K key heads; H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.kernels import Visible
from mega_model.kernels.numba import NumbaKernels, as_array, run_kernel
from mega_model.kernels.page_tiles import IntArray, tile_tasks
from mega_model.kernels.recomputed_gradient import with_gradient
from mega_model.kernels.reference import attention

_PAGE = 16  # tokens


@dataclass(frozen=True, slots=True)
class BatchInvariantAttention:
    """`PackedAttention` on one rank of cp, without dropout, by `kernels.numba.page_attention`.

    Attributes:
        rows, length, document_BS: as for `PackedAttention`.
        attention: computes the gradient.
    """

    kernels: NumbaKernels
    rows: int
    length: int
    document_BS: Tensor | None = None
    attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor] = attention
    _chunk_C4: IntArray = field(init=False, repr=False)
    _slot_T: IntArray = field(init=False, repr=False)
    _definition: PackedAttention = field(init=False, repr=False)

    def __post_init__(self) -> None:
        definition = PackedAttention(self.rows, self.length, self.document_BS, attention=self.attention)
        object.__setattr__(self, "_definition", definition)
        token_T = np.arange(self.rows * self.length)
        starts = token_T % self.length == 0
        if self.document_BS is not None:
            document_T = self.document_BS.flatten().numpy()
            starts[1:] |= document_T[1:] != document_T[:-1]
        first_C = np.flatnonzero(starts)
        count_C = np.diff(first_C, append=len(token_T))
        pages_C = -(-count_C // _PAGE)
        table_C = np.cumsum(pages_C) - pages_C
        chunk_C4 = np.stack((first_C, count_C, np.zeros_like(first_C), table_C), 1).astype(np.intp)
        object.__setattr__(self, "_chunk_C4", chunk_C4)
        object.__setattr__(
            self, "_slot_T", token_T - np.repeat(first_C, count_C) + np.repeat(table_C * _PAGE, count_C)
        )

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Compute attention, (T, N, H)."""
        definition = partial(self._definition, layer, mask=mask)
        return with_gradient(partial(self._attend, mask=mask), definition, q_TNH, k_TKH, v_TKH)

    def _attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, mask: AttentionMask) -> Tensor:
        heads, width = q_TNH.shape[1:]
        kv_heads = k_TKH.shape[1]
        module = self.kernels.attention
        pages = int(self._chunk_C4[-1, 3] - (-self._chunk_C4[-1, 1] // _PAGE))
        element = np.dtype(np.uint16 if q_TNH.dtype == torch.bfloat16 else np.float32)
        keys = np.zeros((pages, kv_heads, 1, width, _PAGE), element)
        values = np.zeros((pages, kv_heads, 1, _PAGE, -(-width // _PAGE) * _PAGE), element)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        run_kernel(
            module,
            "attend",
            *(as_array(x) for x in (q_TNH, k_TKH, v_TKH)),
            keys,
            values,
            as_array(out_TNH),
            tile_tasks(
                self._chunk_C4,
                kv_heads,
                heads // kv_heads,
                tile_rows=module.TILE_ROWS,
                sequence_rows=module.SEQUENCE_ROWS,
                threads=torch.get_num_threads(),
            ),
            self._chunk_C4,
            np.arange(pages),
            self._slot_T,
            int(self._chunk_C4[:, 1].max()),
            mask.window or 0,
            np.array(mask.slopes or [0.0] * heads, np.float32),
            np.float32(width**-0.5),
        )
        return out_TNH
