"""The layers of a decoder for one token of each of up to eight sequences, in one call, compiled by numba.

`mega_model.block` defines a layer. Results are rounded where its operations round them, so that in bfloat16
too a step computes what they compute, but for the order of sums in norms. Torch's operations on so few
numbers take longer to start than to compute.

Legend: R rows, a token of a sequence each; D width of the residual stream; N query heads, K key heads;
H width of a head; F width inside the feed-forward.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from mega_model.kernels.numba.forms import build_forms
from mega_model.kernels.numba.page_attention import TILE_ROWS, attend_tile
from mega_model.kernels.numba.projection import BIASES, array_at, project
from mega_model.kernels.numba.row_kernels import SWIGLU, activate_row, norm_row, padded_width, round_as
from mega_model.kernels.numba.simd import LANES, bf16_to_float, convert_like, round_like

MAX_ROWS = 8
ATTN_NORM, QKV, OUT, FFN_NORM, UP, DOWN = range(6)  # columns of the table of addresses, see `projection`


class DecoderShape(NamedTuple):
    """Sizes of a decoder, and its functions.

    Attributes:
        activation: GELU_TANH, GELU_ERF or SWIGLU of `row_kernels`.
        window: keys that a token sees; 0: all before it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    activation: int
    window: int


@njit(nogil=True, cache=True)
def _norm(x, layer, norm, eps):
    """Return the norm of all rows; without a bias it is RMSNorm."""
    width = x.shape[1]
    weight = array_at(layer[norm], width, x)
    bias = array_at(layer[BIASES + norm], width if layer[BIASES + norm] else 0, x)
    out = np.empty_like(x)
    row = np.zeros(padded_width(width), np.float32)
    for r in range(len(x)):
        norm_row(x[r], weight, bias, eps, out[r], row)
    return out


@njit(nogil=True, cache=True)
def _activate(inner, layer, shape):
    """Return the activation of all rows; GELU adds the bias of `up` first."""
    address = 0 if shape.activation == SWIGLU else layer[BIASES + UP]
    bias = array_at(address, shape.ffn if address else 0, inner)
    out = np.empty((len(inner), shape.ffn), inner.dtype)
    row = np.zeros(padded_width(shape.ffn), np.float32)
    for r in range(len(inner)):
        activate_row(inner[r], bias, shape.activation, out[r], row)
    return out


@njit(nogil=True, cache=True)
def _rotate(head, cos, sin):
    """Turn the pairs (i, i + len(cos)) of a head in place, rounded as in `reference.apply_rotary`."""
    pairs = len(cos)
    for i in range(pairs):
        c, s = round_as(head, cos[i]), round_as(head, sin[i])
        a, b = bf16_to_float(head[i]), bf16_to_float(head[pairs + i])
        head[i] = round_like(head, round_as(head, a * c) - round_as(head, b * s))
        head[pairs + i] = round_like(head, round_as(head, b * c) + round_as(head, a * s))


@njit(nogil=True, cache=True)
def _attend_heads(qkv, cos, sin, keys, values, out, step, slopes, shape, worker, workers):
    """Turn, store and attend a worker's key heads, with the query heads of each.

    Args:
        qkv: (R, (N + 2 K) H); its queries and keys are turned in place.
        cos, sin: (R, rotary pairs), without columns if the model has no rotary positions.
        keys, values: the layer's pages, written.
        out: (R, N, H).
        step: the arrays chunk_C4, pages, slot_T and the longest length, see `page_attention`.
    """
    chunk_C4, pages, slot_T, longest = step
    width = shape.head_dim
    group = shape.heads // shape.kv_heads
    scale = np.float32(1.0) / np.sqrt(np.float32(width))
    blocks = longest // LANES + 1
    page_size = keys.shape[2] * LANES
    heads = qkv.reshape(len(qkv), shape.heads + 2 * shape.kv_heads, width)
    q = heads[:, : shape.heads]
    scratch = (
        np.empty((TILE_ROWS, width), np.float32),
        np.empty((TILE_ROWS, blocks * LANES), np.float32),
        np.empty((TILE_ROWS, values.shape[4]), np.float32),
        np.empty(blocks, np.intp),
        np.empty(blocks, np.intp),
    )
    for task in range(worker, len(qkv) * shape.kv_heads, workers):
        r, head = task // shape.kv_heads, task % shape.kv_heads
        k, v = heads[r, shape.heads + head], heads[r, shape.heads + shape.kv_heads + head]
        if cos.shape[1]:
            _rotate(k, cos[r], sin[r])
            for n in range(head * group, (head + 1) * group):
                _rotate(heads[r, n], cos[r], sin[r])
        page, offset = slot_T[r] // page_size, slot_T[r] % page_size
        block, lane = offset // LANES, offset % LANES
        for h in range(width):
            keys[page, head, block, h, lane] = convert_like(keys, k[h])
            values[page, head, block, lane, h] = convert_like(values, v[h])
        for tile in range((group + TILE_ROWS - 1) // TILE_ROWS):
            attend_tile(
                q,
                keys,
                values,
                out,
                (r, head, tile),
                chunk_C4,
                pages,
                shape.window,
                slopes,
                scale,
                scratch,
            )


def _run_layers(
    x, weights, layers, cos, sin, keys, values, chunk_C4, pages, slot_T, longest, slopes, eps, shape, threads
):
    """Run all layers: x becomes their output.

    Args:
        x: (R, D), bfloat16 as uint16; R at most 8.
        weights: an array with the dtype of the packed weights.
        layers: (layers, COLUMNS) addresses of norms, weights and biases, see `projection.project`.
        cos, sin: (R, rotary pairs) float32, see `_attend_heads`.
        keys, values: pages of all layers.
        chunk_C4, pages, slot_T, longest: see `page_attention`; every chunk has one token.
        slopes: (N,) float32, 0 without ALiBi.
        eps: of the norms, float32.
        shape: a `DecoderShape`.
        threads: workers.
    """
    rows = len(x)
    assert rows <= MAX_ROWS
    qkv = np.empty((rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim), x.dtype)
    attended = np.empty((rows, shape.heads, shape.head_dim), x.dtype)
    inner = np.empty((rows, shape.ffn * 2 if shape.activation == SWIGLU else shape.ffn), x.dtype)
    step = (chunk_C4, pages, slot_T, longest)
    for number in range(len(layers)):
        layer = layers[number]
        for worker in prange(threads):
            y = _norm(x, layer, ATTN_NORM, eps)
            project(y, weights, layer, QKV, True, qkv, False, worker, threads)
        for worker in prange(threads):
            _attend_heads(
                qkv, cos, sin, keys[number], values[number], attended, step, slopes, shape, worker, threads
            )
        for worker in prange(threads):
            flat = attended.reshape(rows, shape.heads * shape.head_dim)
            project(flat, weights, layer, OUT, True, x, True, worker, threads)
        for worker in prange(threads):
            y = _norm(x, layer, FFN_NORM, eps)
            has_bias = shape.activation == SWIGLU  # GELU's kernel adds it
            project(y, weights, layer, UP, has_bias, inner, False, worker, threads)
        for worker in prange(threads):
            y = _activate(inner, layer, shape)
            project(y, weights, layer, DOWN, True, x, True, worker, threads)


layers_serial, layers_parallel = build_forms(_run_layers)
