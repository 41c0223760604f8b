"""The parameters of a GPT-2 style model, with all variations of Megatron's GPT."""

from __future__ import annotations

from collections.abc import Iterator

from mega_schema.arch.common import attention, bias, embedding, head, matrix, norm
from mega_schema.params import Param
from mega_schema.sharding import Split
from mega_schema.spec import ModelSpec


def rows(m: ModelSpec) -> Iterator[Param]:
    """Yield the row of every parameter, in the order of the forward pass."""
    d = m.hidden
    inner = Split("tp", 0, (m.ffn, m.ffn) if m.is_gated else ())
    inner_rows = 2 * m.ffn if m.is_gated else m.ffn

    yield embedding(m)
    if m.embed_norm:
        yield from norm(m, "embed_norm", "first")
    if m.positions == "learned":
        yield matrix(m, "position.weight", (m.context, d), "first", None)
    for i in range(m.layers):
        prefix = f"layers.{i}."
        yield from attention(m, i)
        yield from norm(m, prefix + "ffn_norm", i)
        yield matrix(m, prefix + "up.weight", (inner_rows, d), i, inner)
        if m.bias:
            yield bias(prefix + "up.bias", (inner_rows,), i, inner)
        yield matrix(m, prefix + "down.weight", (d, m.ffn), i, Split("tp", 1), residual=True)
        if m.bias:
            yield bias(prefix + "down.bias", (d,), i)
    yield from norm(m, "final_norm", "last")
    yield head(m)
