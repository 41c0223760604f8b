"""The parameters of a Llama style model: RMSNorm, rotary positions, a gated feed-forward, no biases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mega_schema.errors import ConfigError
from mega_schema.params import ONES, Init, Param
from mega_schema.shard import Split
from mega_schema.spec import ModelSpec

_FIXED: Mapping[str, object] = MappingProxyType(
    {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "bias": False,
        "qkv_bias": False,
        "post_norm_residual": False,
        "scale_embedding": False,
    }
)


def rows(m: ModelSpec) -> Iterator[Param]:
    """Every parameter, in the order of the forward pass.

    Raises:
        ConfigError: the spec asks for something this family does not have.
    """
    for name, only in _FIXED.items():
        if getattr(m, name) != only:
            raise ConfigError(
                f"model.{name}",
                "the llama family has one choice",
                found=getattr(m, name),
                wanted=only,
                hint='family = "gpt" has the others',
            )
    d, q, kv, f = m.hidden, m.q_rows, m.kv_rows, m.ffn
    narrow, residual = Init("normal", m.init_std), Init("normal", m.init_std / math.sqrt(2 * m.layers))
    vocab = Split("tp", 0, pad=m.vocab_multiple)

    yield Param("embed.weight", (m.vocab, d), "first", narrow, vocab)
    for i in range(m.layers):
        at = f"layers.{i}."
        yield Param(at + "attn_norm.weight", (d,), i, ONES, decay=False)
        yield Param(
            at + "qkv.weight",
            (q + 2 * kv, d),
            i,
            narrow,
            Split("tp", 0, (q, kv, kv), unit=m.head_width, repeats=(1, 2)),
        )
        yield Param(at + "out.weight", (d, q), i, residual, Split("tp", 1, unit=m.head_width))
        yield Param(at + "ffn_norm.weight", (d,), i, ONES, decay=False)
        yield Param(at + "gate_up.weight", (2 * f, d), i, narrow, Split("tp", 0, (f, f)))
        yield Param(at + "down.weight", (d, f), i, residual, Split("tp", 1))
    yield Param("final_norm.weight", (d,), "last", ONES, decay=False)
    yield Param(
        "head.weight", (m.vocab, d), "last", narrow, vocab, tied_to="embed.weight" if m.tied else None
    )
