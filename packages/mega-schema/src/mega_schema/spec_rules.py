"""Rules between the fields of a `ModelSpec`: the parts of encoders and decoders, and relative positions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from mega_schema.spec import ModelSpec

ENCODER_FIELDS = (
    *("token_types", "pooler", "binary_head", "head_transform"),
    *("norm_bias", "first_attention_norm", "global_attention_every", "task_head"),
)
# only a model with an encoder and a decoder has these
_ENCODER_DECODER_FIELDS = ("relative_per_layer", "scale_output", "scale_attention")
_NOT_IN_ENCODER_DECODER = ("sliding_window", "parallel_residual", "qk_norm")


def check_direction(m: ModelSpec) -> None:
    """Refuse an encoder's parts in a decoder, and a decoder's positions in an encoder.

    Raises:
        ConfigError: a field does not fit the direction of attention.
    """
    if m.causal:
        _require_defaults(m, ENCODER_FIELDS, "a decoder", "model.causal = false")
    if m.encoder_layers is None:
        kind = "a decoder" if m.causal else "an encoder"
        _require_defaults(m, _ENCODER_DECODER_FIELDS, f"{kind} alone", "model.encoder_layers")
    if m.global_attention_every is not None and m.sliding_window is None:
        raise ConfigError(
            "model.global_attention_every",
            "needs model.sliding_window",
            found=m.global_attention_every,
            wanted="None, or a window for the other layers",
        )
    if not m.is_decoder_only and m.positions == "alibi":
        raise ConfigError(
            "model.positions",
            "is not supported in an encoder",
            found=m.positions,
            wanted="learned | rope | sinusoidal | none",
        )
    if m.binary_head and not m.pooler:
        raise ConfigError("model.binary_head", "needs model.pooler", found=True, wanted=False)
    if m.head_bias and m.is_decoder_only:
        raise ConfigError(
            "model.head_bias", "is not supported in a decoder", found=True, wanted="False, or an encoder"
        )
    families = ("gpt", "llama") if m.is_decoder_only else ("t5",) if m.causal else ("bert",)
    if m.family not in families:
        field = "model.causal" if m.encoder_layers is None else "model.encoder_layers"
        wanted = " | ".join(families)
        raise ConfigError("model.family", f"does not fit {field}", found=m.family, wanted=wanted)
    if m.encoder_layers is not None:
        _check_encoder_decoder(m, m.encoder_layers)


def check_relative_positions(m: ModelSpec) -> None:
    """Refuse relative positions outside an encoder with a decoder, and tables that cannot be.

    Raises:
        ConfigError: there is no such model.
    """
    if m.positions != "relative":
        return
    if m.encoder_layers is None:
        raise ConfigError(
            "model.positions",
            "is supported only in an encoder with a decoder",
            found=m.positions,
            wanted="learned | rope | sinusoidal | none",
        )
    if m.relative_buckets < 4 or m.relative_buckets % 4:
        raise ConfigError(
            "model.relative_buckets",
            "cannot be halved by direction and by distance",
            found=m.relative_buckets,
            wanted="a multiple of 4",
        )
    if m.relative_max_distance <= m.relative_buckets // 2:
        raise ConfigError(
            "model.relative_max_distance",
            "is within the distances that have a bucket of their own",
            found=m.relative_max_distance,
            wanted=f"more than {m.relative_buckets // 2}, half of model.relative_buckets",
        )


def _check_encoder_decoder(m: ModelSpec, encoder_layers: int) -> None:
    """Refuse what a model with an encoder and a decoder does not have."""
    if not m.causal or encoder_layers >= m.layers:
        raise ConfigError(
            "model.encoder_layers",
            "leaves no layer for a decoder",
            found=f"{encoder_layers} of {m.layers}, causal={str(m.causal).lower()}",
            wanted=f"fewer than {m.layers} and model.causal = true",
        )
    _require_defaults(m, _NOT_IN_ENCODER_DECODER, "an encoder with a decoder", "")


def _require_defaults(m: ModelSpec, names: tuple[str, ...], kind: str, alternative: str) -> None:
    """Refuse fields that a kind of model does not have.

    Args:
        alternative: the setting with which the fields are supported; empty if there is none.
    """
    fields = {field.name: field.default for field in dataclasses.fields(m)}
    for name in names:
        if getattr(m, name) != fields[name]:
            raise ConfigError(
                f"model.{name}",
                f"is not supported in {kind}",
                found=getattr(m, name),
                wanted=f"{fields[name]}, or {alternative}" if alternative else fields[name],
            )
