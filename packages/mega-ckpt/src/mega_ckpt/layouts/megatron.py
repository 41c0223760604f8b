"""Megatron-LM's legacy GPT names, nested dictionaries joined with dots, tensors whole and without padding.

The names of the norms changed after release 23.08 (`input_layernorm` became `input_norm`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from mega_ckpt.layouts import Alias
from mega_schema.arch import table
from mega_schema.spec import ModelSpec

_WHOLE: Mapping[str, str] = MappingProxyType(
    {
        "embed": "language_model.embedding.word_embeddings",
        "position": "language_model.embedding.position_embeddings",
        "final_norm": "language_model.encoder.final_{norm}",
        "head": "language_model.output_layer",
    }
)
_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_{norm}",
        "qkv": "self_attention.query_key_value",
        "out": "self_attention.dense",
        "ffn_norm": "post_attention_{norm}",
        "up": "mlp.dense_h_to_4h",
        "gate_up": "mlp.dense_h_to_4h",  # gate first, as here
        "down": "mlp.dense_4h_to_h",
    }
)


def aliases(spec: ModelSpec, *, norm: Literal["layernorm", "norm"] = "layernorm") -> Iterator[Alias]:
    """Every tensor of the model in Megatron's names; a tied head has none of its own.

    Args:
        norm: what this release calls a norm.
    """
    order = qkv_order(spec)
    for row in table(spec):
        if row.tied_to is not None:
            continue
        place, _, kind = row.name.rpartition(".")
        if place.startswith("layers."):
            _, number, part = place.split(".")
            foreign = f"language_model.encoder.layers.{number}.{_LAYER[part]}"
        else:
            part, foreign = place, _WHOLE[place]
        yield Alias(f"{foreign.format(norm=norm)}.{kind}", row.name, order=order if part == "qkv" else None)


def qkv_order(spec: ModelSpec) -> tuple[int, ...]:
    """Rows of a fused weight of Megatron's that make ours: its groups taken apart into all Q, all K, all V.

    A group there is its query heads, one key head and one value head (checkpoint version 2.0 on); with as
    many groups as heads that is q, k, v per head.
    """
    width, queries = spec.head_width, spec.heads // spec.kv_heads
    group = (queries + 2) * width

    def rows(group_number: int, first: int, count: int) -> range:
        return range(group_number * group + first, group_number * group + first + count)

    groups = range(spec.kv_heads)
    q = [r for g in groups for r in rows(g, 0, queries * width)]
    k = [r for g in groups for r in rows(g, queries * width, width)]
    v = [r for g in groups for r in rows(g, (queries + 1) * width, width)]
    return (*q, *k, *v)
