"""Published models by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec, bert, gpt, llama, t5

_GPT2: Mapping[str, int] = MappingProxyType({"vocab": 50257, "max_seq_len": 1024})
_LARGE: Mapping[str, int] = MappingProxyType({"vocab": 51200, "max_seq_len": 2048})
_LLAMA2: Mapping[str, int] = MappingProxyType({"vocab": 32000, "max_seq_len": 4096})
_LLAMA31: Mapping[str, Any] = MappingProxyType(
    {"vocab": 128256, "max_seq_len": 131072, "rope_theta": 500000.0}
)
_BERT: Mapping[str, int] = MappingProxyType({"vocab": 30522, "max_seq_len": 512})
# the original BERT: norms follow the sums, and both activations are GELU by erf
_ORIGINAL_BERT: Mapping[str, Any] = MappingProxyType(
    {**_BERT, "post_norm_residual": True, "activation": "gelu_erf", "norm_eps": 1e-12}
)
_MODERN_BERT: Mapping[str, Any] = MappingProxyType(
    {
        "vocab": 50368,
        "max_seq_len": 8192,
        "activation": "geglu",
        "positions": "rope",
        "rope_theta": 160000.0,
        "rope_theta_local": 10000.0,
        "sliding_window": 65,  # 128 neighbours, half of them on each side
        "global_attention_every": 3,
        "embed_norm": True,
        "first_attention_norm": False,
        "norm_bias": False,
        "bias": False,
        "qkv_bias": False,
        "token_types": None,
        "pooler": False,
        "binary_head": False,
    }
)
_RELATIVE_T5: Mapping[str, Any] = MappingProxyType(
    {
        "vocab": 32128,
        "max_seq_len": 512,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "positions": "relative",
        "scale_attention": False,
        "bias": False,
        "qkv_bias": False,
        "head_bias": False,
    }
)
_T5: Mapping[str, Any] = MappingProxyType({**_RELATIVE_T5, "activation": "relu", "scale_output": True})
_T5_11: Mapping[str, Any] = MappingProxyType({**_RELATIVE_T5, "activation": "geglu_tanh", "tied": False})
_UMT5: Mapping[str, Any] = MappingProxyType({**_T5_11, "vocab": 256384, "relative_per_layer": True})
# layers of each side, hidden, heads, ffn
_T5_11_SIZES: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(
    {
        "small": (8, 512, 6, 1024),
        "base": (12, 768, 12, 2048),
        "large": (24, 1024, 16, 2816),
        "xl": (24, 2048, 32, 5120),
        "xxl": (24, 4096, 64, 10240),
    }
)
_QWEN: Mapping[str, Any] = MappingProxyType({"rope_theta": 1000000.0, "norm_eps": 1e-6})


def _t5(layers: int, hidden: int, heads: int, ffn: int, head_dim: int = 64, **fields: Any) -> ModelSpec:
    """Build a T5 of equally deep sides, whose heads need not share the hidden size."""
    sides = {"encoder_layers": layers, "decoder_layers": layers}
    return t5(**sides, hidden=hidden, heads=heads, ffn=ffn, head_dim=head_dim, **fields)


PRESETS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "gpt2-124m": gpt(layers=12, hidden=768, heads=12, **_GPT2),
        "gpt2-355m": gpt(layers=24, hidden=1024, heads=16, **_GPT2),
        "gpt2-774m": gpt(layers=36, hidden=1280, heads=20, **_GPT2),
        "gpt2-1.5b": gpt(layers=48, hidden=1600, heads=25, **_GPT2),
        "megatron-345m": gpt(layers=24, hidden=1024, heads=16, **_GPT2),
        "megatron-1.3b": gpt(layers=24, hidden=2048, heads=16, vocab=50257, max_seq_len=2048),
        "megatron-8.3b": gpt(layers=72, hidden=3072, heads=24, **_GPT2),  # arXiv:1909.08053 table 2
        "megatron-175b": gpt(layers=96, hidden=12288, heads=96, **_LARGE),
        "megatron-530b": gpt(layers=105, hidden=20480, heads=128, **_LARGE),
        "megatron-1t": gpt(layers=128, hidden=25600, heads=160, **_LARGE),
        # fairseq's: ffn is 6 x hidden, positions are computed, embeddings are scaled
        "megatron-11b": gpt(
            layers=72,
            hidden=3072,
            heads=32,
            ffn=18432,
            vocab=51200,
            max_seq_len=1024,
            activation="gelu_erf",
            positions="sinusoidal",
            scale_embedding=True,
        ),
        "llama2-7b": llama(layers=32, hidden=4096, heads=32, ffn=11008, **_LLAMA2),
        "llama2-13b": llama(layers=40, hidden=5120, heads=40, ffn=13824, **_LLAMA2),
        "llama2-70b": llama(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, **_LLAMA2),
        "llama3-8b": llama(
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocab=128256,
            max_seq_len=8192,
            rope_theta=500000.0,
        ),
        "llama3.1-8b": llama(
            layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, rope_scaling=8.0, **_LLAMA31
        ),
        "llama3.1-70b": llama(
            layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, rope_scaling=8.0, **_LLAMA31
        ),
        "llama3.1-405b": llama(
            layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, rope_scaling=8.0, **_LLAMA31
        ),
        "llama3.2-1b": llama(
            layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, rope_scaling=32.0, tied=True, **_LLAMA31
        ),
        "mistral-7b": llama(  # v0.1: later releases have no window
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocab=32000,
            max_seq_len=32768,
            sliding_window=4096,
        ),
        "qwen2.5-7b": llama(
            layers=28,
            hidden=3584,
            heads=28,
            kv_heads=4,
            ffn=18944,
            vocab=152064,
            max_seq_len=131072,
            qkv_bias=True,
            **_QWEN,
        ),
        "qwen3-8b": llama(
            layers=36,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=12288,
            vocab=151936,
            max_seq_len=40960,
            qk_norm=True,
            **_QWEN,
        ),
        "bloom-7b1": gpt(
            layers=30,
            hidden=4096,
            heads=32,
            vocab=250880,
            max_seq_len=2048,
            positions="alibi",
            embed_norm=True,
        ),
        "bert-base-uncased": bert(layers=12, hidden=768, heads=12, **_ORIGINAL_BERT),
        "bert-large-uncased": bert(layers=24, hidden=1024, heads=16, **_ORIGINAL_BERT),
        "megatron-bert-345m": bert(layers=24, hidden=1024, heads=16, **_BERT),
        "megatron-bert-1.3b": bert(layers=24, hidden=2048, heads=32, **_BERT),
        "megatron-bert-3.9b": bert(layers=48, hidden=2560, heads=40, **_BERT),  # arXiv:1909.08053 table 4
        "modernbert-base": bert(layers=22, hidden=768, heads=12, ffn=1152, **_MODERN_BERT),
        "modernbert-large": bert(layers=28, hidden=1024, heads=16, ffn=2624, **_MODERN_BERT),
        # arXiv:1910.10683 §3.7
        "t5-small": _t5(6, 512, 8, 2048, **_T5),
        "t5-base": _t5(12, 768, 12, 3072, **_T5),
        "t5-large": _t5(24, 1024, 16, 4096, **_T5),
        "t5-3b": _t5(24, 1024, 32, 16384, 128, **_T5),
        "t5-11b": _t5(24, 1024, 128, 65536, 128, **_T5),
        **{f"t5-v1_1-{name}": _t5(*sizes, **_T5_11) for name, sizes in _T5_11_SIZES.items()},
        **{f"flan-t5-{name}": _t5(*sizes, **_T5_11) for name, sizes in _T5_11_SIZES.items()},
        # arXiv:2304.09151
        **{f"umt5-{name}": _t5(*_T5_11_SIZES[name], **_UMT5) for name in ("small", "base", "xl", "xxl")},
    }
)


def preset(name: str) -> ModelSpec:
    """Return the model of this name.

    Raises:
        ConfigError: no model has that name.
    """
    if name not in PRESETS:
        similar = get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {similar[0]}?" if similar else ""
        raise ConfigError("--preset", "unknown model", found=name, wanted=" | ".join(PRESETS), hint=hint)
    return PRESETS[name]
