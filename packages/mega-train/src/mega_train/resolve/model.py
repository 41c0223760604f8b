"""Resolve the model of a run, from its flags or from the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mega_schema.errors import ConfigError
from mega_schema.presets import preset
from mega_schema.spec import (
    FAMILY_DEFAULTS,
    GATED,
    Activation,
    Family,
    ModelSpec,
    bert,
    gpt,
    llama,
    t5,
)
from mega_schema.task_heads import add_task_head
from mega_schema.tasks.pair_tasks import head_of_task
from mega_train.config import ModelConfig, RunConfig
from mega_train.config.refusals import Refusals
from mega_train.resolve.required import require_positive


def model_spec(
    run: RunConfig, family: Family, *, vocab: int | None, loaded_spec: ModelSpec | None
) -> ModelSpec:
    """Return the model of the flags, or the checkpoint's without flags; if both exist they must be equal."""
    if run.model.family not in (None, family):
        raise ConfigError(
            "model.family",
            "is not that of the command",
            found=run.model.family,
            wanted=family,
            hint=f"mega-train {run.model.family}",
        )
    if run.model.decoder_layers is not None and family != "t5":
        layers = run.model.decoder_layers
        hint = "mega-train t5, or leave it out"
        raise ConfigError("--decoder-num-layers", "applies to T5 only", found=layers, hint=hint)
    if run.model.decoder_layers is not None and run.model.decoder_layers < 1:
        layers = run.model.decoder_layers
        raise ConfigError("--decoder-num-layers", "not a count", found=layers, wanted="1 or more")
    if loaded_spec is not None and not {family, loaded_spec.family} <= {"gpt", "llama"}:
        _check_family(run, family, loaded_spec)
    if replace(run.model, family=None) == ModelConfig() and loaded_spec is not None:
        _check_family(run, family, loaded_spec)
        return loaded_spec
    spec = _spec_from_flags(
        run, family, loaded_spec.vocab if loaded_spec and run.model.vocab is None else vocab, loaded_spec
    )
    spec = add_run_head(run, spec)
    if run.model.padded_vocab is not None:
        spec = replace(spec, vocab_multiple=_padded_rows_per_rank(run, spec.vocab))
    if run.model.rope_theta_local is not None and spec.global_attention_every is None:
        raise ConfigError(
            "--local-rotary-base",
            "applies to models with windows in some of their layers only",
            found=run.model.rope_theta_local,
            hint="--global-attention-every-n-layers 3, or leave it out",
        )
    if loaded_spec is not None:
        for name, value in loaded_spec.to_dict().items():
            if name not in _UNCOMPARED_FIELDS and getattr(spec, name) != value:
                raise ConfigError(
                    f"model.{name}",
                    "differs from the checkpoint's",
                    found=getattr(spec, name),
                    wanted=value,
                    hint="omit the model's flags to use the checkpoint's model",
                )
    return spec


def add_run_head(run: RunConfig, spec: ModelSpec) -> ModelSpec:
    """Return the model with the head of the run's task; an unchanged one without a task."""
    head = "none" if run.task.name is None else head_of_task(run.task.name)
    return spec if head == "none" else add_task_head(spec, head, run.task.labels)


# fields that change no result, or only the initial weights
_UNCOMPARED_FIELDS = frozenset({"family", "vocab_multiple", "init", "init_std"})


def _padded_rows_per_rank(run: RunConfig, vocab: int) -> int:
    """Return the rows of the padded vocabulary on one rank of tp.

    Raises:
        ConfigError: the ranks cannot share the padded vocabulary, or it is smaller than the vocabulary.
    """
    flag = "--pad-vocab-size-to"
    rows = run.model.padded_vocab or 0
    tp = run.parallel.tp
    if rows % (run.model.vocab_multiple or 1):
        multiple = f"a multiple of --make-vocab-size-divisible-by {run.model.vocab_multiple}"
        raise ConfigError(flag, "disagrees with another flag", found=rows, wanted=multiple)
    if rows < vocab:
        raise ConfigError(flag, "is less than the vocabulary", found=rows, wanted=f"{vocab} or more")
    if rows % tp:
        near = -(-rows // tp) * tp
        raise ConfigError(
            flag, "cannot be shared evenly", found=f"{rows} rows over tp={tp}", hint=f"{flag} {near}"
        )
    return rows // tp


def _spec_from_flags(
    run: RunConfig, family: Family, vocab: int | None, loaded_spec: ModelSpec | None
) -> ModelSpec:
    """Build the model spec from the flags.

    Args:
        loaded_spec: the checkpoint's model, the default of flags that are not given (--use-checkpoint-args).
    """
    m = run.model
    given_values = _given_values(run, family)
    if m.preset is not None:
        base = preset(m.preset)
        _check_family(run, family, base)
        sizes = {**_scale_preset(base, given_values), **given_values}
        return ModelSpec.from_dict({**base.to_dict(), **_number_layers(sizes, base)})
    if loaded_spec is not None and not given_values.keys() & {"layers", "hidden", "heads"}:
        _check_family(run, family, loaded_spec)
        return ModelSpec.from_dict({**loaded_spec.to_dict(), **_number_layers(given_values, loaded_spec)})
    given_values.setdefault("max_seq_len", run.batch.length)
    given_values.setdefault("vocab", vocab)
    missing = Refusals()
    for name, flag in _REQUIRED_FLAGS.items():
        missing.attempt(
            require_positive,
            given_values.get(name),
            flag,
            "a number, or --preset",
            f"--preset gpt2-124m or {flag} N",
        )
    missing.raise_any()
    if "head_dim" not in given_values:
        _check_head_dim(given_values["hidden"], given_values["heads"])
    activation = given_values.get("activation", _default_activation(m, family))
    given_values.setdefault("ffn", _default_ffn(m, family, given_values["hidden"], activation))
    return _BUILDERS[family](**given_values)


def _number_layers(values: Mapping[str, Any], base: ModelSpec) -> dict[str, Any]:
    """Replace the layers of T5's encoder and of its decoder by the fields of `ModelSpec`.

    Args:
        base: the model whose layers are replaced.
    """
    if base.encoder_layers is None:
        return dict(values)
    encoder = values.get("layers", base.encoder_layers)
    decoder = values.get("decoder_layers", values.get("layers", base.layers - base.encoder_layers))
    others = {name: value for name, value in values.items() if name != "decoder_layers"}
    return others | {"layers": encoder + decoder, "encoder_layers": encoder}


def _build_t5(*, layers: int, decoder_layers: int | None = None, **fields: Any) -> ModelSpec:
    """Build a T5 from the layers of its encoder, which are also those of its decoder if not given."""
    return t5(encoder_layers=layers, decoder_layers=decoder_layers or layers, **fields)


def _scale_preset(base: ModelSpec, given_values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a preset that follow the sizes of the flags, as without a preset.

    Key heads follow the heads in a preset without grouped-query attention. The size of a head follows where
    the preset's heads share its hidden size. The feed-forward size keeps its ratio to the hidden size.

    Raises:
        ConfigError: the heads do not divide the hidden size, or the ratio gives no whole number.
    """
    sizes: dict[str, int] = {}
    heads, hidden = given_values.get("heads", base.heads), given_values.get("hidden", base.hidden)
    if heads < 1 or hidden < 1:
        return sizes  # the spec refuses them
    if base.kv_heads == base.heads:
        sizes["kv_heads"] = heads
    if "head_dim" not in given_values and base.head_dim * base.heads == base.hidden:
        _check_head_dim(hidden, heads)
        sizes["head_dim"] = hidden // heads
    if "ffn" not in given_values:
        sizes["ffn"], remainder = divmod(base.ffn * hidden, base.hidden)
        if remainder:
            raise ConfigError(
                "--ffn-hidden-size",
                "missing",
                found=f"--hidden-size {hidden}, and {base.ffn} for {base.hidden} in the preset",
                hint=f"--ffn-hidden-size {max(1, sizes['ffn'] // _FFN_MULTIPLE) * _FFN_MULTIPLE}",
            )
    return sizes


def _check_head_dim(hidden: int, heads: int) -> None:
    """Check that the heads share the hidden size.

    Raises:
        ConfigError: they do not.
    """
    if hidden % heads:
        raise ConfigError(
            "--num-attention-heads",
            "does not divide --hidden-size",
            found=f"{heads} heads, hidden {hidden}",
            wanted=f"a divisor of {hidden}, or --kv-channels",
        )


def _given_values(run: RunConfig, family: Family) -> dict[str, Any]:
    """Return the fields of the spec that the flags give."""
    m = run.model
    values = {
        "layers": m.layers,
        "decoder_layers": m.decoder_layers,
        "hidden": m.hidden,
        "heads": m.heads,
        "kv_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "ffn": m.ffn,
        "vocab": m.vocab,
        "max_seq_len": m.max_seq_len,
        "vocab_multiple": m.vocab_multiple,
        "norm": m.norm.lower() if m.norm else None,
        "norm_eps": m.norm_eps,
        "norm_1p": m.norm_1p or None,
        "embed_norm": m.embed_norm or None,
        "qk_norm": m.qk_norm or None,
        "post_norm_residual": m.post_norm_residual or None,
        "parallel_residual": m.parallel_residual or None,
        "activation": _activation(m, family),
        "head_transform": _head_transform(m, family),
        "positions": "learned" if m.positions == "learned_absolute" else m.positions,
        "relative_buckets": m.relative_buckets,
        "relative_max_distance": m.relative_max_distance,
        "rope_theta": m.rope_theta,
        "rotary_fraction": m.rotary_fraction,
        "rope_interleaved": m.rope_interleaved or None,
        "rope_interpolation": m.rope_interpolation,
        "rope_scaling": _rope_scaling(m),
        "sliding_window": _window(m.sliding_window, family),
        "global_attention_every": m.global_attention_every,
        "rope_theta_local": m.rope_theta_local,
        "init": "xavier_uniform" if m.xavier else None,
        "init_std": m.init_std,
        "tied": False if m.untied else None,
        "bias": False if m.no_bias else None,
        "qkv_bias": True if m.qkv_bias else False if m.no_bias else None,
    }
    given_values: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if family == "bert" and run.encoder_data.no_binary_head:
        given_values |= _NO_BINARY_HEAD
    return given_values


_BUILDERS: Mapping[Family, Callable[..., ModelSpec]] = MappingProxyType(
    {"gpt": gpt, "llama": llama, "bert": bert, "t5": _build_t5}
)
# Megatron's --bert-no-binary-head leaves out the token types too, as all tokens are of one segment
_NO_BINARY_HEAD: Mapping[str, Any] = MappingProxyType(
    {"token_types": None, "pooler": False, "binary_head": False}
)
_FFN_MULTIPLE = 64  # of a proposed feed-forward size
_REQUIRED_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "layers": "--num-layers",
        "hidden": "--hidden-size",
        "heads": "--num-attention-heads",
        "max_seq_len": "--max-position-embeddings",
        "vocab": "--vocab-size",
    }
)


def _activation(m: ModelConfig, family: Family) -> str | None:
    activation = m.activation
    for flag, gated in (("--swiglu", "swiglu" if m.swiglu else None), ("--glu-activation", m.glu)):
        if gated is not None and activation not in (None, gated):
            conflicting = "--activation" if m.activation else "--swiglu"
            raise ConfigError(conflicting, f"disagrees with {flag}", found=activation, wanted=gated)
        activation = gated or activation  # type: ignore[assignment]
    # Megatron's tanh approximation exists only in the kernel that adds a bias
    if activation is not None or (m.bias_gelu_fusion and not m.no_bias):
        return activation
    return "gelu_erf" if _default_activation(m, family) == "gelu_tanh" else None


def _head_transform(m: ModelConfig, family: Family) -> str | None:
    """Return the GELU of BERT's head if --activation gives one; else it is GELU by erf, as in Megatron.

    Megatron's --openai-gelu, which is read as --activation gelu_tanh, applies to the head too.
    """
    return m.activation if family == "bert" and m.activation in ("gelu_tanh", "gelu_erf") else None


def _default_activation(m: ModelConfig, family: Family) -> Activation:
    """Return the activation of the preset, or without a preset that of the family."""
    default: Activation = FAMILY_DEFAULTS[family].get("activation", "gelu_tanh")
    return preset(m.preset).activation if m.preset else default


def _default_ffn(m: ModelConfig, family: Family, hidden: int, activation: Activation) -> int:
    """Return 4 x hidden, or 8/3 x hidden with a gate; BigScience's gated activations keep 4 x hidden."""
    wide = family == "gpt" and m.glu is not None and not m.swiglu
    return (int(hidden * 4 * 2 / 3 / 64) * 64 or 64) if activation in GATED and not wide else 4 * hidden


def _rope_scaling(m: ModelConfig) -> float | None:
    if m.rope_scaling is not None and not m.rope_scaled:
        hint = "--use-rope-scaling, or leave it out"
        raise ConfigError(
            "--rope-scaling-factor", "needs --use-rope-scaling", found=m.rope_scaling, hint=hint
        )
    if not m.rope_scaled:
        return None
    return 8.0 if m.rope_scaling is None else m.rope_scaling


def _window(text: str | None, family: Family) -> int | None:
    """Convert Megatron's (left, right) window to a number of visible tokens, the token itself included.

    An encoder's window has as many tokens on the right as on the left; this number is that of the left.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\(?\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)?", text)
    if family == "bert":
        if match is None or match[2] is None or int(match[1]) != int(match[2]):
            raise ConfigError(
                "--window-size",
                "not a window of as many tokens before as after",
                found=text,
                wanted="N,N",
                hint="--window-size 64,64",
            )
    elif match is None or int(match[2] or 0):
        raise ConfigError(
            "--window-size",
            "not a window of tokens before",
            found=text,
            wanted="LEFT,0",
            hint="--window-size 4095,0",
        )
    return int(match[1]) + 1


def _check_family(run: RunConfig, family: Family, spec: ModelSpec) -> None:
    if spec.family != family and run.task.name is not None:
        key = "--preset" if run.model.preset is not None else "--pretrained-checkpoint"
        hints = {"t5": "--task TEXT2TEXT", "bert": "a task of BERT, such as --task CLASSIFY"}
        raise ConfigError(
            key,
            f"is not a model for --task {run.task.name}",
            found=spec.family,
            wanted=family,
            hint=hints.get(spec.family, "a checkpoint or preset of BERT or T5"),
        )
    if spec.family != family:
        raise ConfigError(
            "command",
            "trains another family",
            found=family,
            wanted=spec.family,
            hint=f"mega-train {spec.family}",
        )
