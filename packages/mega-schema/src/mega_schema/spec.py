"""`ModelSpec`: the definition of a model, independent of training, layout and hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from mega_schema.errors import ConfigError
from mega_schema.field_kinds import check_kind, check_rope
from mega_schema.spec_rules import check_direction, check_relative_positions
from mega_schema.task_heads import TaskHead, check_task_head

Family = Literal["gpt", "llama", "bert", "t5"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal[
    "gelu_tanh", "gelu_erf", "relu", "squared_relu", "swiglu", "geglu", "geglu_tanh", "reglu", "liglu"
]
Positions = Literal["learned", "rope", "alibi", "sinusoidal", "relative", "none"]
HeadTransform = Literal["none", "gelu_tanh", "gelu_erf"]
GATED: frozenset[Activation] = frozenset({"swiglu", "geglu", "geglu_tanh", "reglu", "liglu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformer: a decoder, an encoder that attends in both directions, or an encoder and a decoder.

    Attributes:
        family: the set of defaults that the other fields were completed with; bert is that of encoders, t5
            that of an encoder with a decoder. It changes no result.
        layers, hidden, heads: depth, width of the residual stream, query heads.
        encoder_layers: number of the first layers that are an encoder. The layers after them are a decoder,
            which also attends to the encoder's output (arXiv:1910.10683). None: all layers are one stack.
        kv_heads: key and value heads; fewer than `heads` is grouped-query attention (arXiv:2305.13245).
        head_dim: components of one head.
        ffn: width inside the feed-forward; of each of its two halves if it is gated.
        vocab: the true vocabulary, without padding.
        max_seq_len: longest sequence, in tokens.
        norm_bias: layer norms have a bias; only an encoder may have none.
        norm_1p: a norm multiplies by 1 + its weight, which is initially zero (Megatron's
            --apply-layernorm-1p).
        activation: the gated ones compute act(gate) · up (arXiv:2002.05202); "liglu" has no act.
        positions: position encoding; "rope" is arXiv:2104.09864, "alibi" arXiv:2108.12409, "sinusoidal"
            fairseq's, "relative" T5's (arXiv:1910.10683 §2.1).
        relative_buckets, relative_max_distance: rows of the table of "relative" positions, and the distance
            in tokens from which all share the last row.
        relative_per_layer: each layer has a table of its own, as in UMT5; otherwise the encoder has one and
            the decoder has one.
        rope_theta, rotary_fraction: base of the frequencies, and the fraction of a head's components that are
            rotated.
        rope_interleaved: rotary pairs are (2i, 2i + 1), not (i, i + half of the rotated components).
        rope_interpolation: positions are divided by this (arXiv:2306.15595).
        rope_scaling: Llama 3.1's factor: frequencies with fewer than `rope_scaling_low` rotations in
            `rope_scaling_context` tokens are divided by it, those with more than `rope_scaling_high` are not,
            those between are interpolated.
        tied: the output weight is the embedding.
        scale_output: the states are divided by sqrt(hidden) before the output matrix (T5 1.0).
        scale_attention: attention scores are divided by sqrt(head_dim); T5's are not.
        bias, qkv_bias: linear layers have biases; the QKV projection has one.
        post_norm_residual: the residual branch carries the normed input (Megatron's
            --apply-residual-connection-post-layernorm).
        parallel_residual: the feed-forward reads the layer's input, as attention does, and both outputs are
            added to it (GPT-J, GPT-NeoX: arXiv:2204.06745 §2.1).
        scale_embedding: embeddings are multiplied by sqrt(hidden) (fairseq).
        embed_norm: token embeddings are normed before positions are added (BLOOM).
        qk_norm: every query and key head is normed before rotary positions (arXiv:2302.05442).
        sliding_window: keys that a token sees, itself included; None: all before it (arXiv:2310.06825). In an
            encoder it sees as many on the other side.
        causal: a token sees no later token; in a model with `encoder_layers`, of the decoder's tokens.
            Fields from here to `rope_theta_local` are for encoders, where this is false (arXiv:1810.04805).
        token_types: kinds of token, each with an embedding that is added; None: there are no kinds.
        pooler, binary_head: a layer with tanh over the first token of a row, and two logits of its output
            (next sentence, or the order of sentences).
        head_transform: a layer with this activation and a norm before the output matrix.
        first_attention_norm: the first layer has a norm before its attention, as the others have.
        global_attention_every: the first layer, and each that follows after this many, attends without a
            window, the others with `sliding_window` and `rope_theta_local` (arXiv:2412.13663); None: all
            layers are alike.
        rope_theta_local: base of the rotary frequencies in the layers with a window.
        head_bias: the output matrix has a bias; only in models with an encoder.
        task_head, labels: head of a task in place of the output matrix, and the names of its classes.
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
    encoder_layers: int | None = None
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    norm_bias: bool = True
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
    relative_buckets: int = 32
    relative_max_distance: int = 128
    relative_per_layer: bool = False
    tied: bool = True
    scale_output: bool = False
    scale_attention: bool = True
    bias: bool = True
    qkv_bias: bool = True
    post_norm_residual: bool = False
    parallel_residual: bool = False
    scale_embedding: bool = False
    embed_norm: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    causal: bool = True
    token_types: int | None = None
    pooler: bool = False
    binary_head: bool = False
    head_transform: HeadTransform = "none"
    first_attention_norm: bool = True
    global_attention_every: int | None = None
    rope_theta_local: float = 10000.0
    head_bias: bool = False
    task_head: TaskHead = "none"
    labels: tuple[str, ...] = ()
    init: Literal["normal", "xavier_uniform"] = "normal"
    init_std: float = 0.02
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(self.labels))  # a list in a file
        for name, kind in get_type_hints(type(self)).items():
            check_kind(f"model.{name}", kind, getattr(self, name))
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
        check_direction(self)
        check_relative_positions(self)
        check_task_head(self)
        check_rope(self)

    @property
    def is_decoder_only(self) -> bool:
        """Whether all layers are a decoder that predicts the next token."""
        return self.causal and self.encoder_layers is None

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
    def scaled_depth(self) -> int:
        """Layers by which initial values of output projections are scaled down; T5's are the encoder's."""
        return self.encoder_layers or self.layers

    def has_cross_attention(self, layer: int) -> bool:
        """Return whether the layer of this number attends to the encoder's output."""
        return self.encoder_layers is not None and layer >= self.encoder_layers

    def is_local(self, layer: int) -> bool:
        """Return whether the layer of this number attends within `sliding_window`."""
        every = self.global_attention_every
        return self.sliding_window is not None and (every is None or layer % every != 0)

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
        "bert": MappingProxyType(
            {
                "causal": False,
                "token_types": 2,
                "pooler": True,
                "binary_head": True,
                "head_transform": "gelu_erf",
                "head_bias": True,
            }
        ),
        "t5": MappingProxyType({"head_bias": True}),
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


def bert(
    *, layers: int, hidden: int, heads: int, vocab: int, max_seq_len: int, **fields: object
) -> ModelSpec:
    """Build a spec from five sizes and the defaults of Megatron's BERT.

    `post_norm_residual` makes it the original one (arXiv:1810.04805), whose norms follow the sums.
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "max_seq_len": max_seq_len}
    return _with_defaults("bert", {**sizes, "ffn": 4 * hidden}, fields)


def t5(
    *,
    encoder_layers: int,
    decoder_layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    max_seq_len: int,
    **fields: object,
) -> ModelSpec:
    """Build a spec from six sizes and the defaults of Megatron's T5 (learned positions, biases, tied)."""
    layers = encoder_layers + decoder_layers
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "max_seq_len": max_seq_len}
    return _with_defaults("t5", {**sizes, "encoder_layers": encoder_layers, "ffn": 4 * hidden}, fields)


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
