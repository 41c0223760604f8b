"""Attention within a window on both sides of each token, in time and memory proportional to the window.

Rows are cut into blocks as long as the window on one side, so a block of queries sees the keys of three
blocks: the one before, its own and the one after. All blocks are rows of one call of the attention kernel,
whose mask has 3 x block numbers for each token; a mask of whole rows has as many as the row has tokens.

Legend: B rows, S tokens of a row, n blocks of a row, c tokens of a block; N query heads, K key heads, H width
of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.kernels import Visible

_MIN_BLOCK = 32  # tokens; shorter blocks cost more than they save
_PADDING = -1  # document of the padding around a row, which no token sees


def block_length(window: int) -> int:
    """Return the tokens of a block for a window of as many tokens, the token itself included."""
    return max(window - 1, _MIN_BLOCK)


def is_shorter(window: int, length: int) -> bool:
    """Return whether blocks compute fewer scores than rows of `length` tokens with a mask."""
    return 3 * block_length(window) < length


def visible_in_blocks(document_BS: Tensor, window: int) -> Tensor:
    """Return the mask of the keys that the queries of each block see, (B·n, 1, c, 3c).

    Args:
        document_BS: document of each token, 0 or more; a token sees only its own.
        window: tokens that a token sees on each side, itself included.
    """
    size = block_length(window)
    padded_BnC = _pad(document_BS, size, _PADDING)
    query_Bc = padded_BnC[:, 1:-1].flatten(0, 1)
    key_BC = _join_neighbours(padded_BnC).flatten(0, 1)
    place_C = torch.arange(3 * size, device=document_BS.device)
    is_near_cC = (place_C[size : 2 * size, None] - place_C).abs() < window
    return ((query_Bc[:, :, None] == key_BC[:, None]) & is_near_cC)[:, None]


def attend_in_blocks(
    attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor],
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    visible: Tensor,
) -> Tensor:
    """Compute attention of every block of queries to the keys of three blocks, (B, N, S, H).

    Args:
        visible: `visible_in_blocks` of these rows.
    """
    rows, _, length, _ = q_BNSH.shape
    size = visible.shape[2]
    q_BnNcH = _pad(q_BNSH.transpose(1, 2), size, 0)[:, 1:-1].transpose(2, 3)
    k_BnKCH, v_BnKCH = (
        _join_neighbours(_pad(x.transpose(1, 2), size, 0)).transpose(2, 3) for x in (k_BKSH, v_BKSH)
    )
    out = attention(q_BnNcH.flatten(0, 1), k_BnKCH.flatten(0, 1), v_BnKCH.flatten(0, 1), visible)
    out_BSNH = out.transpose(1, 2).unflatten(0, (rows, -1)).flatten(1, 2)[:, :length]
    return out_BSNH.transpose(1, 2)


def _pad(x_BS: Tensor, size: int, value: int) -> Tensor:
    """Cut rows into blocks, (B, n + 2, size, ...): a block of padding, the row, and another of padding."""
    length = x_BS.shape[1]
    tail = -length % size + size
    padding = [0, 0] * (x_BS.dim() - 2) + [size, tail]
    return F.pad(x_BS, padding, value=value).unflatten(1, (-1, size))


def _join_neighbours(x_Bnc: Tensor) -> Tensor:
    """Return each block between its neighbours, (B, n, 3c, ...)."""
    return torch.cat((x_Bnc[:, :-2], x_Bnc[:, 1:-1], x_Bnc[:, 2:]), 2)
