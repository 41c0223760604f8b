"""Hugging Face's config.json of a GPT-2 or a Llama, to our spec and back.

What our model does not compute is refused by name: weights that load and mean something else are the worst
a converter can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec

# theirs to ours; the last of equal ones is what we write
_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu": "gelu_erf",
        "relu2": "squared_relu",
    }
)
# keys that change what is computed, with the one value that is ours
_GPT2_ONLY: Mapping[str, object] = MappingProxyType(
    {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
)
_LLAMA_ONLY: Mapping[str, object] = MappingProxyType(
    {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
)

_LLAMA3: Mapping[str, str] = MappingProxyType(
    {
        "rope_scaling": "factor",
        "rope_scaling_low": "low_freq_factor",
        "rope_scaling_high": "high_freq_factor",
    }
)
# what none of their classes has
_PLAIN: Mapping[str, object] = MappingProxyType(
    {
        "norm_1p": False,
        "qk_norm": False,
        "window": None,
        "rope_interleaved": False,
    }
)


def to_spec(config: Mapping[str, Any], where: object) -> ModelSpec:
    """The model that a config.json describes.

    Args:
        where: the file, to begin messages with.

    Raises:
        FormatError: the architecture is neither gpt2 nor llama, it has something ours has not, or a key is
            missing or out of range.
    """
    kind = config.get("model_type")
    reader = {"gpt2": _from_gpt2, "llama": _from_llama}.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise FormatError(f"{where}: model_type", "unknown architecture", found=kind, wanted="gpt2 | llama")
    try:
        return ModelSpec.from_dict(reader(config, where))
    except ConfigError as error:
        raise FormatError(where, str(error)) from error
    except KeyError as error:
        raise FormatError(f"{where}: {error.args[0]}", "missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise FormatError(where, "is not the config of a model", found=error) from error


def from_spec(spec: ModelSpec, where: object) -> dict[str, Any]:
    """The config.json of a model, without dtype and token ids.

    Args:
        where: the checkpoint, to begin messages with.

    Raises:
        ConfigError: Hugging Face's class has not what the model has.
    """
    return {"gpt": _to_gpt2, "llama": _to_llama}[spec.family](spec, where)


def _from_gpt2(config: Mapping[str, Any], where: object) -> dict[str, object]:
    _only(config, _GPT2_ONLY, where)
    hidden, heads = config["n_embd"], config["n_head"]
    activation = config.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise FormatError(
            f"{where}: activation_function", "unknown", found=activation, wanted=" | ".join(_ACTIVATIONS)
        )
    return {
        "family": "gpt",
        "layers": config["n_layer"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_width": _head_width(hidden, heads, where),
        "ffn": 4 * hidden if config.get("n_inner") is None else config["n_inner"],
        "vocab": config["vocab_size"],
        "context": config["n_positions"],
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": _ACTIVATIONS[activation],
        "tied": config.get("tie_word_embeddings", True),
        "init_std": config.get("initializer_range", 0.02),
    }


def _from_llama(config: Mapping[str, Any], where: object) -> dict[str, object]:
    _only(config, _LLAMA_ONLY, where)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head_width = config.get("num_key_value_heads"), config.get("head_dim")
    return {
        "family": "llama",
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_width": _head_width(hidden, heads, where) if head_width is None else head_width,
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "context": config.get("max_position_embeddings", 2048),
        "norm": "rmsnorm",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "positions": "rope",
        **_rope(config, where),
        "tied": config.get("tie_word_embeddings", False),
        "bias": False,
        "qkv_bias": False,
        "init_std": config.get("initializer_range", 0.02),
    }


def _rope(config: Mapping[str, Any], where: object) -> dict[str, object]:
    """The base, which moved into `rope_parameters` with transformers 5, and scalings that are ours too."""
    found: dict[str, object] = {"rope_base": float(config.get("rope_theta", 10000.0))}
    for key in ("rope_scaling", "rope_parameters"):
        values = config.get(key)
        if not values:
            continue
        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise FormatError(
                f"{where}: {key}",
                "positions scaled in this way are not supported",
                found=kind,
                wanted="default | linear | llama3",
            )
        _only(values, {"partial_rotary_factor": 1.0}, f"{where}: {key}")
        if "rope_theta" in values:
            found["rope_base"] = float(values["rope_theta"])
        if kind == "linear":
            found["rope_interpolation"] = float(values["factor"])
        elif kind == "llama3":
            found |= {ours: float(values[theirs]) for ours, theirs in _LLAMA3.items()}
            found["rope_scaling_context"] = values["original_max_position_embeddings"]
    return found


def _head_width(hidden: int, heads: int, where: object) -> int:
    if hidden % heads:
        raise FormatError(where, "heads do not divide the hidden size", found=f"{heads} heads, {hidden}")
    return hidden // heads


def _only(config: Mapping[str, Any], wanted: Mapping[str, object], where: object) -> None:
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise FormatError(f"{where}: {key}", "is not supported", found=config[key], wanted=value)


def _to_gpt2(spec: ModelSpec, where: object) -> dict[str, Any]:
    _has(
        spec,
        where,
        "GPT2LMHeadModel",
        norm="layernorm",
        positions="learned",
        bias=True,
        qkv_bias=True,
        post_norm_residual=False,
        scale_embedding=False,
        embed_norm=False,
        **_PLAIN,
        kv_heads=spec.heads,
        head_width=spec.hidden // spec.heads,
    )
    theirs = {ours: name for name, ours in _ACTIVATIONS.items()}
    if spec.activation not in theirs:
        raise ConfigError(
            f"{where}: model.activation",
            "GPT2LMHeadModel has no such thing",
            found=spec.activation,
            wanted=" | ".join(theirs),
        )
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": spec.vocab,
        "n_positions": spec.context,
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": None if spec.ffn == 4 * spec.hidden else spec.ffn,
        "activation_function": theirs[spec.activation],
        "layer_norm_epsilon": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
    }


def _to_llama(spec: ModelSpec, where: object) -> dict[str, Any]:
    _has(spec, where, "LlamaForCausalLM", rope_share=1.0, qkv_bias=False, **_PLAIN)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_base}
    if spec.rope_scaling != 1:
        _has(spec, where, "LlamaForCausalLM with scaled positions", rope_interpolation=1.0)
        rope |= {"rope_type": "llama3"} | {theirs: getattr(spec, ours) for ours, theirs in _LLAMA3.items()}
        rope["original_max_position_embeddings"] = spec.rope_scaling_context
    elif spec.rope_interpolation != 1:
        rope |= {"rope_type": "linear", "factor": spec.rope_interpolation}
    # transformers 4 reads the base and, where there is one, the scaling; transformers 5 the parameters
    scaling = {"rope_scaling": rope} if rope["rope_type"] != "default" else {}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_width,
        "intermediate_size": spec.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_base,
        "rope_parameters": rope,
        **scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
    }


def _has(spec: ModelSpec, where: object, theirs: str, **wanted: object) -> None:
    for name, value in wanted.items():
        if getattr(spec, name) != value:
            raise ConfigError(
                f"{where}: model.{name}",
                f"{theirs} has no such thing",
                found=getattr(spec, name),
                wanted=value,
            )
