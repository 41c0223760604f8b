"""Build the model section of run.toml, with which the same run can be started again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mega_schema.errors import ConfigError
from mega_schema.presets import PRESETS
from mega_schema.spec import ModelSpec
from mega_train.config import ModelConfig, RunConfig
from mega_train.resolve.model import model_spec


def recorded_model(run: RunConfig, spec: ModelSpec, loaded_spec: ModelSpec | None) -> ModelConfig:
    """Return the model section as configured; for a model from a checkpoint, the keys that describe it.

    If no keys describe the model, such as one with tied weights that no preset has, only the family is
    recorded.

    Args:
        spec: the run's model.
        loaded_spec: the checkpoint's.
    """
    config = replace(run.model, family=spec.family)
    if (
        loaded_spec is None
        or config.preset is not None
        or {config.layers, config.hidden, config.heads} != {None}
    ):
        return config
    for model in _candidates(spec):
        try:
            if model_spec(replace(run, model=model), spec.family, vocab=None, loaded_spec=None) == spec:
                return model
        except ConfigError:  # a preset of another family
            continue
    return config


def _candidates(spec: ModelSpec) -> Iterator[ModelConfig]:
    """Yield model sections that may describe the model, the shortest first."""
    complete = all_model_keys(spec)
    yield from (ModelConfig(family=complete.family, preset=name) for name in PRESETS)
    yield complete
    yield from (replace(complete, preset=name) for name in PRESETS)


def all_model_keys(spec: ModelSpec) -> ModelConfig:
    """Return the model section with every key that describes the model.

    Sinusoidal positions have none, nor have the head of an encoder and what only the presets of ModernBERT
    and T5 have.
    """
    return ModelConfig(
        family=spec.family,
        layers=spec.encoder_layers or spec.layers,
        decoder_layers=None if spec.encoder_layers is None else spec.layers - spec.encoder_layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        max_seq_len=spec.max_seq_len,
        vocab=spec.vocab,
        vocab_multiple=spec.vocab_multiple,
        norm="RMSNorm" if spec.norm == "rmsnorm" else "LayerNorm",
        norm_eps=spec.norm_eps,
        norm_1p=spec.norm_1p,
        embed_norm=spec.embed_norm,
        qk_norm=spec.qk_norm,
        post_norm_residual=spec.post_norm_residual,
        parallel_residual=spec.parallel_residual,
        # Megatron's defaults for BERT, a GELU by tanh and one by erf in the head, are those without the key
        activation=None
        if (spec.activation, spec.head_transform) == ("gelu_tanh", "gelu_erf")
        else spec.activation,
        positions=(
            "learned_absolute"
            if spec.positions == "learned"
            else None
            if spec.positions == "sinusoidal"  # only presets have it
            else spec.positions
        ),
        relative_buckets=spec.relative_buckets,
        relative_max_distance=spec.relative_max_distance,
        rope_theta=spec.rope_theta,
        rotary_fraction=spec.rotary_fraction,
        rope_interleaved=spec.rope_interleaved,
        rope_interpolation=spec.rope_interpolation,
        rope_scaled=spec.rope_scaling != 1,
        rope_scaling=spec.rope_scaling if spec.rope_scaling != 1 else None,
        sliding_window=_window(spec),
        global_attention_every=spec.global_attention_every,
        rope_theta_local=None if spec.global_attention_every is None else spec.rope_theta_local,
        untied=not spec.tied,
        no_bias=not spec.bias,
        qkv_bias=spec.qkv_bias and not spec.bias,
        init_std=spec.init_std,
        xavier=spec.init == "xavier_uniform",
    )


def _window(spec: ModelSpec) -> str | None:
    """Return the window in tokens before and after a token."""
    if spec.sliding_window is None:
        return None
    before = spec.sliding_window - 1
    return f"{before},{0 if spec.causal else before}"
