"""Tensor names of T5 and UMT5, whose encoder and decoder have lists of layers of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mega_ckpt.name_maps.alias import TensorAlias
from mega_schema.arch import table
from mega_schema.spec import ModelSpec

_WHOLE: Mapping[str, str] = MappingProxyType(
    {
        "embed": "shared",
        "encoder_norm": "encoder.final_layer_norm",
        "final_norm": "decoder.final_layer_norm",
        "head": "lm_head",
    }
)
# names of the blocks of a fused weight, or one name
_SELF_ATTENTION: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attn_norm": ("layer.0.layer_norm",),
        "qkv": tuple(f"layer.0.SelfAttention.{part}" for part in "qkv"),
        "out": ("layer.0.SelfAttention.o",),
        "relative_bias": ("layer.0.SelfAttention.relative_attention_bias",),
    }
)
_CROSS_ATTENTION: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cross.norm": ("layer.1.layer_norm",),
        "cross.q": ("layer.1.EncDecAttention.q",),
        "cross.kv": tuple(f"layer.1.EncDecAttention.{part}" for part in "kv"),
        "cross.out": ("layer.1.EncDecAttention.o",),
    }
)
# copies of the embedding in files of torch
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def t5_aliases(spec: ModelSpec) -> Iterator[TensorAlias]:
    """Yield every tensor of the model under the names of T5; a tied head and shared tables have none."""
    assert spec.encoder_layers is not None
    for row in table(spec):
        if row.tied_to is not None:
            continue
        module = row.name.removesuffix(".weight")
        if module in _WHOLE:
            yield TensorAlias(f"{_WHOLE[module]}.weight", row.name)
            continue
        first, second, *rest = module.split(".")
        layer = int(second)
        part = first if first == "relative_bias" else ".".join(rest)
        side, number = (
            ("encoder", layer)
            if layer < spec.encoder_layers
            else (
                "decoder",
                layer - spec.encoder_layers,
            )
        )
        foreign = _layer_names(side)[part]
        for block, name in enumerate(foreign):
            yield TensorAlias(
                f"{side}.block.{number}.{name}.weight", row.name, block if len(foreign) > 1 else None
            )


def _layer_names(side: str) -> dict[str, tuple[str, ...]]:
    """Return the names inside a layer; the feed-forward is its last sublayer."""
    last = "layer.1" if side == "encoder" else "layer.2"
    return {
        **_SELF_ATTENTION,
        **_CROSS_ATTENTION,
        "ffn_norm": (f"{last}.layer_norm",),
        "gate_up": (f"{last}.DenseReluDense.wi_0", f"{last}.DenseReluDense.wi_1"),
        "up": (f"{last}.DenseReluDense.wi",),
        "down": (f"{last}.DenseReluDense.wo",),
    }
