"""`ModelSpec`: the definition of a model, independent of training, layout and hardware; and the presets."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mega_schema.errors import ConfigError

Family = Literal["gpt", "llama"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu_tanh", "gelu_erf", "squared_relu", "swiglu", "geglu", "reglu", "liglu"]
Positions = Literal["learned", "rope", "alibi", "sinusoidal", "none"]
_LARGEST = sys.float_info.max  # an integer of JSON may be larger, and is no float then
GATED: frozenset[Activation] = frozenset({"swiglu", "geglu", "reglu", "liglu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        family: the set of defaults that the other fields were completed with. It changes no result.
        layers, hidden, heads: depth, width of the residual stream, query heads.
        kv_heads: key and value heads; fewer than `heads` is grouped-query attention (arXiv:2305.13245).
        head_dim: components of one head.
        ffn: width inside the feed-forward; of each of its two halves if it is gated.
        vocab: the true vocabulary, without padding.
        max_seq_len: longest sequence, in tokens.
        norm_1p: a norm multiplies by 1 + its weight, which is initially zero (Megatron's
            --apply-layernorm-1p).
        activation: the gated ones compute act(gate) · up (arXiv:2002.05202); "liglu" has no act.
        positions: position encoding; "rope" is arXiv:2104.09864, "alibi" arXiv:2108.12409, "sinusoidal"
            fairseq's.
        rope_theta, rotary_fraction: base of the frequencies, and the fraction of a head's components that are
            rotated.
        rope_interleaved: rotary pairs are (2i, 2i + 1), not (i, i + half of the rotated components).
        rope_interpolation: positions are divided by this (arXiv:2306.15595).
        rope_scaling: Llama 3.1's factor: frequencies with fewer than `rope_scaling_low` rotations in
            `rope_scaling_context` tokens are divided by it, those with more than `rope_scaling_high` are not,
            those between are interpolated.
        tied: the output weight is the embedding.
        bias, qkv_bias: linear layers have biases; the QKV projection has one.
        post_norm_residual: the residual branch carries the normed input (Megatron's
            --apply-residual-connection-post-layernorm).
        parallel_residual: the feed-forward reads the layer's input, as attention does, and both outputs are
            added to it (GPT-J, GPT-NeoX: arXiv:2204.06745 §2.1).
        scale_embedding: embeddings are multiplied by sqrt(hidden) (fairseq).
        embed_norm: token embeddings are normed before positions are added (BLOOM).
        qk_norm: every query and key head is normed before rotary positions (arXiv:2302.05442).
        sliding_window: keys that a token sees, itself included; None: all before it (arXiv:2310.06825).
        init, init_std: initial values of matrices: normal with this standard deviation, divided by sqrt(2
            layers) for output projections; or Xavier uniform (Glorot and Bengio 2010).
        vocab_multiple: a rank's shard of the vocabulary is padded to a multiple of this in memory (Megatron's
            --make-vocab-size-divisible-by). It changes no result and is not on disk.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq_len: int
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    norm_1p: bool = False
    activation: Activation = "gelu_tanh"
    positions: Positions = "learned"
    rope_theta: float = 10000.0
    rotary_fraction: float = 1.0
    rope_interleaved: bool = False
    rope_interpolation: float = 1.0
    rope_scaling: float = 1.0
    rope_scaling_low: float = 1.0
    rope_scaling_high: float = 4.0
    rope_scaling_context: int = 8192
    tied: bool = True
    bias: bool = True
    qkv_bias: bool = True
    post_norm_residual: bool = False
    parallel_residual: bool = False
    scale_embedding: bool = False
    embed_norm: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    init: Literal["normal", "xavier_uniform"] = "normal"
    init_std: float = 0.02
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            _check_kind(f"model.{name}", kind, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ConfigError(
                "model.kv_heads",
                "query heads must share key heads evenly",
                found=f"kv_heads={self.kv_heads}, heads={self.heads}",
                wanted=f"a divisor of {self.heads}",
            )
        if self.positions == "sinusoidal" and (self.hidden % 2 or self.hidden < 4):
            raise ConfigError(
                "model.hidden",
                "sinusoidal positions are pairs of components",
                found=self.hidden,
                wanted="an even number, 4 or more",
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ConfigError(
                "model.rotary_fraction",
                "rotary components come in pairs",
                found=f"{self.rotary_dim} of {self.head_dim}",
                wanted=f"an even number, at most {self.head_dim}",
            )
        if self.parallel_residual and self.post_norm_residual:
            raise ConfigError(
                "model.parallel_residual",
                "excludes model.post_norm_residual",
                found="both",
                wanted="one of the two",
            )
        for name in ("rope_theta", "rope_interpolation", "rope_scaling"):
            if not getattr(self, name):
                raise ConfigError(f"model.{name}", "not above 0", found=0, wanted="1 or more")
        if self.rope_scaling_low >= self.rope_scaling_high:
            raise ConfigError(
                "model.rope_scaling_low",
                "is not below model.rope_scaling_high",
                found=self.rope_scaling_low,
                wanted=f"less than {self.rope_scaling_high:g}",
            )

    @property
    def q_rows(self) -> int:
        """Rows of the query projection, all heads together."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward has a gate beside the up projection."""
        return self.activation in GATED

    @property
    def rotary_dim(self) -> int:
        """Components of a head that rotary positions rotate."""
        return int(self.head_dim * self.rotary_fraction) if self.positions == "rope" else 0

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object], where: object = "model") -> ModelSpec:
        """Build the spec from a mapping of its fields.

        Raises:
            ConfigError: a key is unknown or missing, or a value is out of range.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in values:
            if key not in fields:
                similar = get_close_matches(key, fields, 1)
                raise ConfigError(
                    f"{where}.{key}", "unknown key", hint=f"did you mean {similar[0]}?" if similar else ""
                )
        for name, field in fields.items():
            if name not in values and field.default is dataclasses.MISSING:
                raise ConfigError(f"{where}.{name}", "missing", wanted=str(field.type))
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks what the mapping cannot promise


def _check_kind(key: str, kind: Any, value: Any) -> None:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(key, "unknown", found=value, wanted=" | ".join(get_args(kind)))
    elif kind is int or (NoneType in get_args(kind) and value is not None):
        if type(value) is not int or value < 1:
            raise ConfigError(key, "not a count", found=value, wanted="an integer above 0")
    elif kind is bool and type(value) is not bool:
        raise ConfigError(key, "not a boolean", found=value, wanted="true | false")
    elif kind is float and not (
        isinstance(value, int | float) and type(value) is not bool and 0 <= value <= _LARGEST
    ):
        raise ConfigError(key, "not a number", found=value, wanted="0 or more")


FAMILY_DEFAULTS: Mapping[Family, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt": MappingProxyType({}),
        "llama": MappingProxyType(
            {
                "norm": "rmsnorm",
                "activation": "swiglu",
                "positions": "rope",
                "tied": False,
                "bias": False,
                "qkv_bias": False,
            }
        ),
    }
)
"""The fields of each family whose defaults differ from those of `ModelSpec`."""


def gpt(*, layers: int, hidden: int, heads: int, vocab: int, max_seq_len: int, **fields: object) -> ModelSpec:
    """Build a spec from five sizes and the defaults of a GPT-2 style model."""
    return _with_defaults(
        "gpt",
        {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "ffn": 4 * hidden,
            "vocab": vocab,
            "max_seq_len": max_seq_len,
        },
        fields,
    )


def llama(
    *, layers: int, hidden: int, heads: int, ffn: int, vocab: int, max_seq_len: int, **fields: object
) -> ModelSpec:
    """Build a spec from six sizes and the defaults of a Llama style model."""
    return _with_defaults(
        "llama",
        {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "ffn": ffn,
            "vocab": vocab,
            "max_seq_len": max_seq_len,
        },
        fields,
    )


def _with_defaults(family: Family, sizes: Mapping[str, int], fields: Mapping[str, object]) -> ModelSpec:
    """Complete the sizes with the family's defaults; `fields` have priority over both."""
    heads = sizes["heads"]
    derived: dict[str, object] = {
        "family": family,
        "kv_heads": heads,
        "head_dim": fields.get("head_dim") or _head_dim(sizes["hidden"], heads),
        **FAMILY_DEFAULTS[family],
        **sizes,
    }
    return ModelSpec.from_dict({**derived, **fields})


def _head_dim(hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise ConfigError("model.heads", "do not divide model.hidden", found=f"{heads} heads, {hidden}")
    return hidden // heads


_GPT2: Mapping[str, int] = MappingProxyType({"vocab": 50257, "max_seq_len": 1024})
_LARGE: Mapping[str, int] = MappingProxyType({"vocab": 51200, "max_seq_len": 2048})
_LLAMA2: Mapping[str, int] = MappingProxyType({"vocab": 32000, "max_seq_len": 4096})
_LLAMA31: Mapping[str, Any] = MappingProxyType(
    {"vocab": 128256, "max_seq_len": 131072, "rope_theta": 500000.0}
)
_QWEN: Mapping[str, Any] = MappingProxyType({"rope_theta": 1000000.0, "norm_eps": 1e-6})

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
