"""The parameter table of an encoder and a decoder that share the embeddings (arXiv:1910.10683).

Layers are numbered through both: a decoder's layer is that of a decoder-only model with cross-attention
between its attention and its feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mega_schema.arch import decoder
from mega_schema.params import Param
from mega_schema.sharding import Split
from mega_schema.spec import ModelSpec


def rows(m: ModelSpec, encoder_layers: int) -> Iterator[Param]:
    """Yield the row of every parameter, in the order of the forward pass."""
    yield from decoder.embeddings(m)
    for i in range(encoder_layers):
        yield from _relative_bias(m, i, 0)
        yield from decoder.attention(m, i)
        yield from decoder.feed_forward(m, i)
    yield from decoder.norm(m, "encoder_norm", encoder_layers - 1)
    for i in range(encoder_layers, m.layers):
        yield from _relative_bias(m, i, encoder_layers)
        yield from decoder.attention(m, i)
        yield from _cross_attention(m, i)
        yield from decoder.feed_forward(m, i)
    yield from decoder.norm(m, "final_norm", "last")
    yield decoder.head(m)
    if m.head_bias:
        yield decoder.head_bias(m)


def _relative_bias(m: ModelSpec, layer: int, first_layer: int) -> Iterator[Param]:
    """Yield the row of a layer's table of relative positions, tied to that of its side's first layer.

    A pipeline stage holds one table for all its layers of a side, by the name of the first of them.
    """
    if m.positions != "relative":
        return
    row = decoder.matrix(
        m, f"relative_bias.{layer}.weight", (m.relative_buckets, m.heads), layer, Split("tp", 1)
    )
    is_shared = layer != first_layer and not m.relative_per_layer
    yield replace(row, tied_to=f"relative_bias.{first_layer}.weight" if is_shared else None)


def _cross_attention(m: ModelSpec, layer: int) -> Iterator[Param]:
    """Yield the rows of a layer's attention to the encoder's output, and of the norm before it."""
    prefix = f"layers.{layer}.cross."
    d = m.hidden
    q = m.q_rows
    kv = m.kv_rows
    query_heads = Split("tp", 0, unit=m.head_dim)
    key_heads = Split("tp", 0, (kv, kv), unit=m.head_dim, repeats=(0, 1))
    yield from decoder.norm(m, prefix + "norm", layer)
    yield decoder.matrix(m, prefix + "q.weight", (q, d), layer, query_heads)
    yield decoder.matrix(m, prefix + "kv.weight", (2 * kv, d), layer, key_heads)
    if m.qkv_bias:
        yield decoder.bias(prefix + "q.bias", (q,), layer, query_heads)
        yield decoder.bias(prefix + "kv.bias", (2 * kv,), layer, key_heads)
    yield decoder.matrix(
        m, prefix + "out.weight", (d, q), layer, Split("tp", 1, unit=m.head_dim), residual=True
    )
    if m.bias:
        yield decoder.bias(prefix + "out.bias", (d,), layer)
