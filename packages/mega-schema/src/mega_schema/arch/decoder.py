"""The parameter table of a decoder-only transformer.

The first matrix of a gated feed-forward is `gate_up`: the rows of the gate, then those of the up projection.
Without a gate it is `up`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mega_schema.params import ONES, ZEROS, Init, Param, StageRef
from mega_schema.sharding import Shape, Split
from mega_schema.spec import ModelSpec


def rows(m: ModelSpec) -> Iterator[Param]:
    """Yield the row of every parameter, in the order of the forward pass."""
    yield from embeddings(m)
    yield from layers(m)
    yield head(m)


def embeddings(m: ModelSpec) -> Iterator[Param]:
    """Yield the rows of tokens and positions."""
    yield embedding(m)
    if m.embed_norm:
        yield from norm(m, "embed_norm", "first")
    if m.positions == "learned":
        yield matrix(m, "position.weight", (m.max_seq_len, m.hidden), "first", None)


def layers(m: ModelSpec) -> Iterator[Param]:
    """Yield the rows of all layers and of the norm after them."""
    for i in range(m.layers):
        yield from attention(m, i)
        yield from feed_forward(m, i)
    yield from norm(m, "final_norm", "last")


def matrix(
    m: ModelSpec, name: str, shape: Shape, stage: StageRef, split: Split | None, *, residual: bool = False
) -> Param:
    """Return the row of a linear layer's or an embedding's matrix.

    Args:
        residual: its output is added to the residual stream, so its initial values are scaled down with
            depth.
    """
    if m.init == "xavier_uniform":
        init = Init("uniform", math.sqrt(2 / sum(shape)))
    else:
        init = Init("normal", m.init_std / math.sqrt(2 * m.scaled_depth) if residual else m.init_std)
    return Param(name, shape, stage, init, split)


def bias(name: str, shape: Shape, stage: StageRef, split: Split | None = None) -> Param:
    """Return the row of a linear layer's bias."""
    return Param(name, shape, stage, ZEROS, split, decay=False)


def norm(m: ModelSpec, name: str, stage: StageRef) -> Iterator[Param]:
    """Yield the rows of a norm of the residual stream."""
    return _norm(m, name, m.hidden, stage, is_per_head=False)


def embedding(m: ModelSpec) -> Param:
    """Return the row of the token embedding."""
    return matrix(m, "embed.weight", (m.vocab, m.hidden), "first", Split("tp", 0, pad=m.vocab_multiple))


def head(m: ModelSpec) -> Param:
    """Return the row of the output matrix."""
    row = embedding(m)
    tied_to = row.name if m.tied else None
    return Param("head.weight", row.shape, "last", row.init, row.split, tied_to=tied_to)


def head_bias(m: ModelSpec) -> Param:
    """Return the row of the output matrix's bias."""
    return bias("head.bias", (m.vocab,), "last", Split("tp", 0, pad=m.vocab_multiple))


def attention(m: ModelSpec, layer: int) -> Iterator[Param]:
    """Yield the rows of a layer's attention and the norm before it."""
    prefix = f"layers.{layer}."
    d = m.hidden
    q = m.q_rows
    kv = m.kv_rows
    heads = Split("tp", 0, (q, kv, kv), unit=m.head_dim, repeats=(1, 2))
    if layer or m.first_attention_norm:
        yield from norm(m, prefix + "attn_norm", layer)
    yield matrix(m, prefix + "qkv.weight", (q + 2 * kv, d), layer, heads)
    if m.qkv_bias:
        yield bias(prefix + "qkv.bias", (q + 2 * kv,), layer, heads)
    if m.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield from _norm(m, prefix + name, m.head_dim, layer, is_per_head=True)
    yield matrix(m, prefix + "out.weight", (d, q), layer, Split("tp", 1, unit=m.head_dim), residual=True)
    if m.bias:
        yield bias(prefix + "out.bias", (d,), layer)


def feed_forward(m: ModelSpec, layer: int) -> Iterator[Param]:
    """Yield the rows of a layer's feed-forward and the norm before it."""
    prefix = f"layers.{layer}."
    first = prefix + ("gate_up" if m.is_gated else "up")
    blocks = (m.ffn, m.ffn) if m.is_gated else ()
    inner = 2 * m.ffn if m.is_gated else m.ffn
    split = Split("tp", 0, blocks)
    yield from norm(m, prefix + "ffn_norm", layer)
    yield matrix(m, first + ".weight", (inner, m.hidden), layer, split)
    if m.bias:
        yield bias(first + ".bias", (inner,), layer, split)
    yield matrix(m, prefix + "down.weight", (m.hidden, m.ffn), layer, Split("tp", 1), residual=True)
    if m.bias:
        yield bias(prefix + "down.bias", (m.hidden,), layer)


def _norm(m: ModelSpec, name: str, width: int, stage: StageRef, *, is_per_head: bool) -> Iterator[Param]:
    scale = ZEROS if m.norm_1p else ONES
    yield Param(name + ".weight", (width,), stage, scale, decay=False, is_per_head=is_per_head)
    if m.norm == "layernorm" and m.norm_bias:
        yield Param(name + ".bias", (width,), stage, ZEROS, decay=False, is_per_head=is_per_head)
