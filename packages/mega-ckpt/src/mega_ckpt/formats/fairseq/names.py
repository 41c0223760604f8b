"""Tensor names of fairseq's language models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from mega_ckpt.name_maps.alias import ForeignTensor, TensorAlias
from mega_schema.arch import table
from mega_schema.sharding import Split
from mega_schema.spec import ModelSpec

EMBEDDING = "decoder.embed_tokens.weight"
_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "self_attn_layer_norm",
        "out": "self_attn.out_proj",
        "ffn_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    }
)


def aliases(spec: ModelSpec) -> Iterator[TensorAlias]:
    """Yield every tensor of the model; positions are not stored, and the head is the embedding."""
    yield TensorAlias(EMBEDDING, "embed.weight")
    for i in range(spec.layers):
        fairseq, mega = f"decoder.layers.{i}.", f"layers.{i}."
        for kind in ("weight", "bias"):
            for block, part in enumerate("qkv"):
                yield TensorAlias(f"{fairseq}self_attn.{part}_proj.{kind}", f"{mega}qkv.{kind}", block)
            for mega_name, foreign in _LAYER.items():
                yield TensorAlias(f"{fairseq}{foreign}.{kind}", f"{mega}{mega_name}.{kind}")
    for kind in ("weight", "bias"):
        yield TensorAlias(f"decoder.layer_norm.{kind}", f"final_norm.{kind}")


def part_tensors(spec: ModelSpec, rank: int, tp: int) -> Iterator[ForeignTensor]:
    """Yield the tensors of rank `rank` of `tp`; the vocabulary is split evenly.

    Raises:
        LayoutError: the model cannot be split this way.
    """
    rows = {row.name: row for row in table(spec)}
    rows["embed.weight"] = replace(rows["embed.weight"], split=Split("tp", 0))
    for alias in aliases(spec):
        yield alias.rank_shard(rows[alias.ours], rank, tp)
