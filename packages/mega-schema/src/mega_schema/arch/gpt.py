"""The parameters of a GPT-2 style model, with every variation Megatron's GPT has."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mega_schema.params import ONES, ZEROS, Init, Param, Where
from mega_schema.shard import Split
from mega_schema.spec import ModelSpec


def rows(m: ModelSpec) -> Iterator[Param]:
    """Every parameter, in the order of the forward pass."""
    d, q, kv = m.hidden, m.q_rows, m.kv_rows
    narrow, residual = Init("normal", m.init_std), Init("normal", m.init_std / math.sqrt(2 * m.layers))
    vocab = Split("tp", 0, pad=m.vocab_multiple)
    heads = Split("tp", 0, (q, kv, kv), unit=m.head_width, repeats=(1, 2))
    inner = Split("tp", 0, (m.ffn, m.ffn) if m.gated else ())
    inner_rows = 2 * m.ffn if m.gated else m.ffn

    yield Param("embed.weight", (m.vocab, d), "first", narrow, vocab)
    if m.positions == "learned":
        yield Param("position.weight", (m.context, d), "first", narrow)
    for i in range(m.layers):
        at = f"layers.{i}."
        yield from _norm(m, at + "attn_norm", i)
        yield Param(at + "qkv.weight", (q + 2 * kv, d), i, narrow, heads)
        if m.qkv_bias:
            yield Param(at + "qkv.bias", (q + 2 * kv,), i, ZEROS, heads, decay=False)
        yield Param(at + "out.weight", (d, q), i, residual, Split("tp", 1, unit=m.head_width))
        if m.bias:
            yield Param(at + "out.bias", (d,), i, ZEROS, decay=False)
        yield from _norm(m, at + "ffn_norm", i)
        yield Param(at + "up.weight", (inner_rows, d), i, narrow, inner)
        if m.bias:
            yield Param(at + "up.bias", (inner_rows,), i, ZEROS, inner, decay=False)
        yield Param(at + "down.weight", (d, m.ffn), i, residual, Split("tp", 1))
        if m.bias:
            yield Param(at + "down.bias", (d,), i, ZEROS, decay=False)
    yield from _norm(m, "final_norm", "last")
    yield Param(
        "head.weight", (m.vocab, d), "last", narrow, vocab, tied_to="embed.weight" if m.tied else None
    )


def _norm(m: ModelSpec, name: str, stage: Where) -> Iterator[Param]:
    yield Param(name + ".weight", (m.hidden,), stage, ONES, decay=False)
    if m.norm == "layernorm":
        yield Param(name + ".bias", (m.hidden,), stage, ZEROS, decay=False)
