"""Hugging Face's classes as tables: keys of config.json and the matching fields of `ModelSpec`.

A table is read in both directions. A field without a key and without an implied value must have its default:
otherwise the class does not support the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal

from mega_ckpt.formats.huggingface.class_tables import (
    NEEDED,
    HfConfigKey,
    HfModelClass,
    RopeKeys,
    even_width,
    four_times,
    same_activation,
    same_as_tied,
    same_heads,
)
from mega_schema.task_heads import TaskHead

_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu": "gelu_erf",
        "relu2": "squared_relu",
    }
)
_GELU: Mapping[str, str] = MappingProxyType(
    {theirs: ours for theirs, ours in _ACTIVATIONS.items() if ours.startswith("gelu")}
)
_GEGLU: Mapping[str, str] = MappingProxyType({"gelu": "geglu"})
_T5_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "relu": "relu",
        "gelu": "gelu_erf",
        "gelu_new": "gelu_tanh",
        "gated-relu": "reglu",
        "gated-silu": "swiglu",
        "gated-gelu_new": "geglu_tanh",
        "gated-gelu": "geglu_tanh",  # transformers replaces it by gelu_new
    }
)
_SILU: Mapping[str, str] = MappingProxyType({"swish": "swiglu", "silu": "swiglu"})
_INIT = HfConfigKey("initializer_range", "init_std", 0.02)

_GPT2 = HfModelClass(
    "gpt2",
    "GPT2LMHeadModel",
    "gpt",
    (
        HfConfigKey("vocab_size", "vocab"),
        HfConfigKey("n_positions", "max_seq_len", older=("max_position_embeddings",)),
        HfConfigKey("n_embd", "hidden", older=("hidden_size",)),
        HfConfigKey("n_layer", "layers", older=("num_hidden_layers",)),
        HfConfigKey("n_head", "heads", older=("num_attention_heads",)),
        HfConfigKey("n_inner", "ffn", four_times, four_times),
        HfConfigKey("activation_function", "activation", "gelu_tanh", values=_ACTIVATIONS),
        HfConfigKey("layer_norm_epsilon", "norm_eps", 1e-5),
        _INIT,
        HfConfigKey("tie_word_embeddings", "tied", True),
    ),
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    implied={"kv_heads": same_heads, "head_dim": even_width},
)

_BLOOM = HfModelClass(
    "bloom",
    "BloomForCausalLM",
    "gpt",
    (
        HfConfigKey("vocab_size", "vocab"),
        HfConfigKey("seq_length", "max_seq_len", 2048),
        HfConfigKey("hidden_size", "hidden", older=("n_embed",)),
        HfConfigKey("n_layer", "layers", older=("num_hidden_layers",)),
        HfConfigKey("n_head", "heads", older=("num_attention_heads",)),
        HfConfigKey("layer_norm_epsilon", "norm_eps", 1e-5),
        HfConfigKey("apply_residual_connection_post_layernorm", "post_norm_residual", False),
        _INIT,
        HfConfigKey("tie_word_embeddings", "tied", True),
    ),
    fixed={"alibi": True},
    implied={
        "kv_heads": same_heads,
        "head_dim": even_width,
        "ffn": four_times,
        "positions": "alibi",
        "embed_norm": True,
    },
)

_NEOX = HfModelClass(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt",
    (
        HfConfigKey("vocab_size", "vocab"),
        HfConfigKey("max_position_embeddings", "max_seq_len", 2048),
        HfConfigKey("hidden_size", "hidden"),
        HfConfigKey("num_hidden_layers", "layers"),
        HfConfigKey("num_attention_heads", "heads"),
        HfConfigKey("intermediate_size", "ffn"),
        HfConfigKey("hidden_act", "activation", "gelu_erf", values=_ACTIVATIONS),
        HfConfigKey("layer_norm_eps", "norm_eps", 1e-5),
        HfConfigKey("use_parallel_residual", "parallel_residual", True),
        _INIT,
        HfConfigKey("tie_word_embeddings", "tied", False),
    ),
    fixed={"attention_bias": True, "head_dim": None},
    implied={"kv_heads": same_heads, "head_dim": even_width, "positions": "rope"},
    rope=RopeKeys("rotary_emb_base", "rotary_pct", 0.25),
)


def _like_llama(
    model_type: str,
    architecture: str,
    *,
    max_seq_len: int,
    kv_heads: object = NEEDED,
    head_dim: object = even_width,
    keys: tuple[HfConfigKey, ...] = (),
    fixed: Mapping[str, object],
    window: Literal["key", "switch"] | None = None,
    **implied: object,
) -> HfModelClass:
    """Build a class with Llama's keys; `max_seq_len`, `kv_heads` and `head_dim` are its defaults."""
    return HfModelClass(
        model_type,
        architecture,
        "llama",
        (
            HfConfigKey("vocab_size", "vocab"),
            HfConfigKey("max_position_embeddings", "max_seq_len", max_seq_len),
            HfConfigKey("hidden_size", "hidden"),
            HfConfigKey("num_hidden_layers", "layers"),
            HfConfigKey("num_attention_heads", "heads"),
            HfConfigKey("num_key_value_heads", "kv_heads", kv_heads, same_heads),
            HfConfigKey("head_dim", "head_dim", head_dim, even_width),
            HfConfigKey("intermediate_size", "ffn"),
            HfConfigKey("hidden_act", "activation", "swiglu", values=_SILU),
            HfConfigKey("rms_norm_eps", "norm_eps", 1e-6),
            _INIT,
            HfConfigKey("tie_word_embeddings", "tied", False),
            *keys,
        ),
        fixed={"partial_rotary_factor": 1.0, **fixed},
        implied={"norm": "rmsnorm", "positions": "rope", "bias": False, "qkv_bias": False, **implied},
        rope=RopeKeys(),
        window=window,
    )


def _bert(
    model_type: str,
    architecture: str,
    *,
    post_norm: bool,
    pooler: bool,
    binary_head: bool = False,
    head: bool = False,
    task_head: TaskHead = "none",
) -> HfModelClass:
    """Build a class with BERT's keys and some of its heads; `head` is that of the masked tokens."""
    return HfModelClass(
        model_type,
        architecture,
        "bert",
        (
            HfConfigKey("vocab_size", "vocab"),
            HfConfigKey("max_position_embeddings", "max_seq_len", 512),
            HfConfigKey("hidden_size", "hidden"),
            HfConfigKey("num_hidden_layers", "layers"),
            HfConfigKey("num_attention_heads", "heads"),
            HfConfigKey("intermediate_size", "ffn"),
            HfConfigKey("hidden_act", "activation", "gelu_erf", values=_GELU),
            HfConfigKey("layer_norm_eps", "norm_eps", 1e-12),
            HfConfigKey("type_vocab_size", "token_types", 2),
            _INIT,
        ),
        fixed={
            "tie_word_embeddings": True,
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "add_cross_attention": False,
        },
        implied={
            "kv_heads": same_heads,
            "head_dim": even_width,
            "causal": False,
            "post_norm_residual": post_norm,
            "pooler": pooler,
            "binary_head": binary_head,
            "head_transform": same_activation if head else "none",
            "head_bias": head,
            "task_head": task_head,
        },
    )


def _modern_bert(architecture: str, *, head: bool) -> HfModelClass:
    """Build a class with ModernBERT's keys; `head` is that of the masked tokens."""
    head_keys = (
        HfConfigKey("classifier_activation", "head_transform", "gelu_erf", values=_GELU),
        HfConfigKey("decoder_bias", "head_bias", True),
    )
    return HfModelClass(
        "modernbert",
        architecture,
        "bert",
        (
            HfConfigKey("vocab_size", "vocab"),
            HfConfigKey("max_position_embeddings", "max_seq_len", 8192),
            HfConfigKey("hidden_size", "hidden"),
            HfConfigKey("num_hidden_layers", "layers"),
            HfConfigKey("num_attention_heads", "heads"),
            HfConfigKey("intermediate_size", "ffn"),
            HfConfigKey("hidden_activation", "activation", "geglu", values=_GEGLU),
            HfConfigKey("norm_eps", "norm_eps", 1e-5),
            HfConfigKey("norm_bias", "norm_bias", False),
            _INIT,
            *(head_keys if head else ()),
        ),
        fixed={
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "classifier_bias": False,
        },
        implied={
            "kv_heads": same_heads,
            "head_dim": even_width,
            "causal": False,
            "positions": "rope",
            "embed_norm": True,
            "first_attention_norm": False,
            "bias": False,
            "qkv_bias": False,
            **({} if head else {"head_transform": "none", "head_bias": False}),
        },
        rope=RopeKeys("global_rope_theta", default_base=160000.0, local_base="local_rope_theta"),
        window="alternating",
    )


def _t5(model_type: str, architecture: str, *, per_layer: bool) -> HfModelClass:
    """Build a class with T5's keys; `per_layer`: each layer has a table of relative positions."""
    activation = "geglu_tanh" if per_layer else "relu"
    return HfModelClass(
        model_type,
        architecture,
        "t5",
        (
            HfConfigKey("vocab_size", "vocab"),
            HfConfigKey("n_positions", "max_seq_len", 512),
            HfConfigKey("d_model", "hidden"),
            HfConfigKey("num_layers", "encoder_layers"),
            HfConfigKey("num_heads", "heads"),
            HfConfigKey("d_kv", "head_dim", 64),
            HfConfigKey("d_ff", "ffn"),
            HfConfigKey("feed_forward_proj", "activation", activation, values=_T5_ACTIVATIONS),
            HfConfigKey("layer_norm_epsilon", "norm_eps", 1e-6),
            HfConfigKey("relative_attention_num_buckets", "relative_buckets", 32),
            HfConfigKey("relative_attention_max_distance", "relative_max_distance", 128),
            HfConfigKey("tie_word_embeddings", "tied", True),
        ),
        fixed={"is_encoder_decoder": True, "is_decoder": False},
        implied={
            "kv_heads": same_heads,
            "norm": "rmsnorm",
            "positions": "relative",
            "relative_per_layer": per_layer,
            "scale_output": same_as_tied,
            "scale_attention": False,
            "bias": False,
            "qkv_bias": False,
            "head_bias": False,
        },
        decoder_layers="num_decoder_layers",
    )


def _all_berts(model_type: str, prefix: str, *, post_norm: bool) -> tuple[HfModelClass, ...]:
    build = partial(_bert, model_type, post_norm=post_norm)
    return (
        build(f"{prefix}ForPreTraining", pooler=True, binary_head=True, head=True),
        build(f"{prefix}ForMaskedLM", pooler=False, head=True),
        build(f"{prefix}Model", pooler=True),
        build(f"{prefix}ForSequenceClassification", pooler=True, task_head="classification"),
        build(f"{prefix}ForQuestionAnswering", pooler=False, task_head="span"),
        build(f"{prefix}ForTokenClassification", pooler=False, task_head="token_classification"),
    )


CLASSES: tuple[HfModelClass, ...] = (
    _like_llama(
        "llama",
        "LlamaForCausalLM",
        max_seq_len=2048,
        kv_heads=same_heads,
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    _like_llama(
        "mistral",
        "MistralForCausalLM",
        max_seq_len=131072,
        kv_heads=8,
        keys=(HfConfigKey("sliding_window", "sliding_window", 4096, None),),
        fixed={},
        window="key",
    ),
    _like_llama(
        "qwen2", "Qwen2ForCausalLM", max_seq_len=32768, kv_heads=32, fixed={}, window="switch", qkv_bias=True
    ),
    _like_llama(
        "qwen3",
        "Qwen3ForCausalLM",
        max_seq_len=32768,
        kv_heads=32,
        head_dim=128,
        fixed={"attention_bias": False},
        window="switch",
        qk_norm=True,
    ),
    _GPT2,
    _BLOOM,
    _NEOX,
    *_all_berts("bert", "Bert", post_norm=True),
    *_all_berts("megatron-bert", "MegatronBert", post_norm=False),
    _modern_bert("ModernBertForMaskedLM", head=True),
    _modern_bert("ModernBertModel", head=False),
    _t5("t5", "T5ForConditionalGeneration", per_layer=False),
    _t5("umt5", "UMT5ForConditionalGeneration", per_layer=True),
)
