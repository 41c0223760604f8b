"""The model that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_schema.app.config import option
from mega_schema.spec import Activation, Family


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model. With --load and none of these, the checkpoint says what it is."""

    family: Family | None = option(
        "--family", None, "family of the model; mega-train gpt and mega-train llama say it themselves"
    )
    preset: str | None = option("--preset", None, "a named model, such as gpt2-124m or llama3-8b")
    layers: int | None = option("--num-layers", None, "transformer layers")
    hidden: int | None = option("--hidden-size", None, "width of the residual stream")
    heads: int | None = option("--num-attention-heads", None, "query heads")
    kv_heads: int | None = option(
        "--num-query-groups", None, "key and value heads; as many as query heads if not given"
    )
    head_width: int | None = option(
        "--kv-channels", None, "components of a head; hidden / heads if not given"
    )
    ffn: int | None = option(
        "--ffn-hidden-size",
        None,
        "feed-forward width; 4 x hidden, or 8/3 x hidden to a multiple of 64 with SwiGLU",
    )
    context: int | None = option(
        "--max-position-embeddings", None, "longest sequence in tokens; --seq-length if not given"
    )
    vocab: int | None = option(
        "--vocab-size", None, "vocabulary without padding; that of the data's tokenizer if not given"
    )
    vocab_multiple: int | None = option(
        "--make-vocab-size-divisible-by",
        None,
        "pad a rank's share of the vocabulary in memory to a multiple of this; 128 if not given",
    )
    padded_vocab: int | None = option(
        "--pad-vocab-size-to", None, "pad the vocabulary in memory to this many rows (BigScience's)"
    )
    norm: Literal["LayerNorm", "RMSNorm"] | None = option("--normalization", None, "which norm")
    norm_eps: float | None = option("--norm-epsilon", None, "epsilon of the norms; 1e-5 if not given")
    norm_1p: bool = option(
        "--apply-layernorm-1p", False, "norms multiply by 1 + their weight, which begins at 0"
    )
    embed_norm: bool = option("--embed-layernorm", False, "norm the embedding of a token (BLOOM)")
    qk_norm: bool = option("--qk-layernorm", False, "norm every head of queries and keys")
    post_norm_residual: bool = option(
        "--apply-residual-connection-post-layernorm", False, "branches are added to the normed stream"
    )
    parallel_residual: bool = option(
        "--parallel-residual", False, "the feed-forward reads what enters the layer, as attention (GPT-NeoX)"
    )
    activation: Activation | None = option("--activation", None, "feed-forward activation")
    swiglu: bool = option("--swiglu", False, "gated SiLU feed-forward, as --activation swiglu")
    glu: Literal["geglu", "liglu", "reglu", "swiglu"] | None = option(
        "--glu-activation", None, "gated feed-forward of BigScience's names, as --activation"
    )
    unfused_gelu: bool = option(
        "--no-bias-gelu-fusion", False, "GELU by erf, as Megatron's unfused kernel computes it"
    )
    positions: Literal["learned_absolute", "rope", "alibi", "none"] | None = option(
        "--position-embedding-type", None, "how a token's place enters"
    )
    rope_base: float | None = option("--rotary-base", None, "base of the rotary angles; 10000 if not given")
    rope_share: float | None = option(
        "--rotary-percent", None, "share of a head's components that turn; 1.0 if not given"
    )
    rope_interleaved: bool = option(
        "--rotary-interleaved", False, "neighbouring components turn as a pair, not those half a head apart"
    )
    rope_interpolation: float | None = option(
        "--rotary-seq-len-interpolation-factor", None, "divide places by this"
    )
    rope_scaled: bool = option("--use-rope-scaling", False, "Llama 3.1's longer rotary positions")
    rope_scaling: float | None = option(
        "--rope-scaling-factor", None, "how much longer --use-rope-scaling makes them; 8 if not given"
    )
    window: str | None = option(
        "--window-size", None, "LEFT,0: a token sees itself and this many before it; all if not given"
    )
    untied: bool = option("--untie-embeddings-and-output-weights", False, "an output weight of its own")
    no_bias: bool = option(
        "--disable-bias-linear",
        False,
        "linears without biases; GELU is then by erf where --activation does not say, as in Megatron",
    )
    qkv_bias: bool = option(
        "--add-qkv-bias", False, "of queries, keys and values alone, with --disable-bias-linear too"
    )
    init_std: float | None = option(
        "--init-method-std", None, "standard deviation of initial weights; 0.02 if not given"
    )
    xavier: bool = option(
        "--init-method-xavier-uniform", False, "initial matrices uniform by the sum of their sides"
    )
