"""Hugging Face's classes as tables: the keys of a config.json and the fields of ours that mean the same.

A table is read in both directions. A field that a class neither has a key for nor implies is at its default
there, so a model with another value is not that class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

Rule = Callable[[Mapping[str, Any]], object]
"""A value that follows from fields of ours; None where it would be no whole number."""

NEEDED: Final = object()


@dataclass(frozen=True, slots=True)
class Key:
    """One key of theirs and the field of ours that means the same.

    Attributes:
        theirs: the key that is written.
        ours: a field of `ModelSpec`.
        missing, null: what the class takes where the key is missing, and where it is null: a value of ours,
            a rule, or NEEDED.
        older: other names of the key, in files of older versions.
        values: theirs to ours where they differ; the last of equal ones is written.
    """

    theirs: str
    ours: str
    missing: object = NEEDED
    null: object = NEEDED
    older: tuple[str, ...] = ()
    values: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Keys of rotary positions, beside the `rope_parameters` that transformers 5 has for all of them.

    Attributes:
        base, share: of the angles' base, and of the share of components that turn; None: all do.
        missing: the share where its key is missing.
    """

    base: str = "rope_theta"
    share: str | None = None
    missing: float = 1.0


@dataclass(frozen=True, slots=True)
class Class:
    """A class of `transformers`.

    Attributes:
        model_type, architecture: its two names in a config.json.
        family: of ours that it is read as.
        keys: in an order in which a rule finds what it needs read already.
        fixed: keys of theirs that change what is computed, with the one value that is ours.
        implied: fields of ours without a key, with a value or a rule.
        rope: None: positions are not rotary.
        window: "switch": `use_sliding_window` and the layers it is for; "key": as `keys` say; None: there is
            no window.
    """

    model_type: str
    architecture: str
    family: Literal["gpt", "llama"]
    keys: tuple[Key, ...]
    fixed: Mapping[str, object]
    implied: Mapping[str, object]
    rope: Rope | None = None
    window: Literal["key", "switch"] | None = None


def same_heads(found: Mapping[str, Any]) -> object:
    """As many key heads as query heads."""
    return found["heads"]


def even_width(found: Mapping[str, Any]) -> object:
    """The heads of a layer share the width of the stream; None where they cannot."""
    return None if found["hidden"] % found["heads"] else found["hidden"] // found["heads"]


def four_times(found: Mapping[str, Any]) -> object:
    """A feed-forward of four times the width of the stream."""
    return 4 * found["hidden"]


_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu": "gelu_erf",
        "relu2": "squared_relu",
    }
)
_SILU: Mapping[str, str] = MappingProxyType({"swish": "swiglu", "silu": "swiglu"})
_INIT = Key("initializer_range", "init_std", 0.02)

_GPT2 = Class(
    "gpt2",
    "GPT2LMHeadModel",
    "gpt",
    (
        Key("vocab_size", "vocab"),
        Key("n_positions", "context", older=("max_position_embeddings",)),
        Key("n_embd", "hidden", older=("hidden_size",)),
        Key("n_layer", "layers", older=("num_hidden_layers",)),
        Key("n_head", "heads", older=("num_attention_heads",)),
        Key("n_inner", "ffn", four_times, four_times),
        Key("activation_function", "activation", "gelu_tanh", values=_ACTIVATIONS),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        _INIT,
        Key("tie_word_embeddings", "tied", True),
    ),
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    implied={"kv_heads": same_heads, "head_width": even_width},
)

_BLOOM = Class(
    "bloom",
    "BloomForCausalLM",
    "gpt",
    (
        Key("vocab_size", "vocab"),
        Key("seq_length", "context", 2048),
        Key("hidden_size", "hidden", older=("n_embed",)),
        Key("n_layer", "layers", older=("num_hidden_layers",)),
        Key("n_head", "heads", older=("num_attention_heads",)),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("apply_residual_connection_post_layernorm", "post_norm_residual", False),
        _INIT,
        Key("tie_word_embeddings", "tied", True),
    ),
    fixed={"alibi": True},
    implied={
        "kv_heads": same_heads,
        "head_width": even_width,
        "ffn": four_times,
        "positions": "alibi",
        "embed_norm": True,
    },
)

_NEOX = Class(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt",
    (
        Key("vocab_size", "vocab"),
        Key("max_position_embeddings", "context", 2048),
        Key("hidden_size", "hidden"),
        Key("num_hidden_layers", "layers"),
        Key("num_attention_heads", "heads"),
        Key("intermediate_size", "ffn"),
        Key("hidden_act", "activation", "gelu_erf", values=_ACTIVATIONS),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Key("use_parallel_residual", "parallel_residual", True),
        _INIT,
        Key("tie_word_embeddings", "tied", False),
    ),
    fixed={"attention_bias": True, "head_dim": None},
    implied={"kv_heads": same_heads, "head_width": even_width, "positions": "rope"},
    rope=Rope("rotary_emb_base", "rotary_pct", 0.25),
)


def _like_llama(
    model_type: str,
    architecture: str,
    *,
    context: int,
    kv_heads: object = NEEDED,
    head_width: object = even_width,
    keys: tuple[Key, ...] = (),
    fixed: Mapping[str, object],
    window: Literal["key", "switch"] | None = None,
    **implied: object,
) -> Class:
    """A class with Llama's keys; `context`, `kv_heads`, `head_width` are taken where theirs are missing."""
    return Class(
        model_type,
        architecture,
        "llama",
        (
            Key("vocab_size", "vocab"),
            Key("max_position_embeddings", "context", context),
            Key("hidden_size", "hidden"),
            Key("num_hidden_layers", "layers"),
            Key("num_attention_heads", "heads"),
            Key("num_key_value_heads", "kv_heads", kv_heads, same_heads),
            Key("head_dim", "head_width", head_width, even_width),
            Key("intermediate_size", "ffn"),
            Key("hidden_act", "activation", "swiglu", values=_SILU),
            Key("rms_norm_eps", "norm_eps", 1e-6),
            _INIT,
            Key("tie_word_embeddings", "tied", False),
            *keys,
        ),
        fixed={"partial_rotary_factor": 1.0, **fixed},
        implied={"norm": "rmsnorm", "positions": "rope", "bias": False, "qkv_bias": False, **implied},
        rope=Rope(),
        window=window,
    )


CLASSES: tuple[Class, ...] = (
    _like_llama(
        "llama",
        "LlamaForCausalLM",
        context=2048,
        kv_heads=same_heads,
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    _like_llama(
        "mistral",
        "MistralForCausalLM",
        context=131072,
        kv_heads=8,
        keys=(Key("sliding_window", "window", 4096, None),),
        fixed={},
        window="key",
    ),
    _like_llama(
        "qwen2", "Qwen2ForCausalLM", context=32768, kv_heads=32, fixed={}, window="switch", qkv_bias=True
    ),
    _like_llama(
        "qwen3",
        "Qwen3ForCausalLM",
        context=32768,
        kv_heads=32,
        head_width=128,
        fixed={"attention_bias": False},
        window="switch",
        qk_norm=True,
    ),
    _GPT2,
    _BLOOM,
    _NEOX,
)
