"""The model that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_schema.config import option
from mega_schema.spec import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model. With --load and none of these, the checkpoint says what it is."""

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
    norm: Literal["LayerNorm", "RMSNorm"] | None = option("--normalization", None, "which norm")
    norm_eps: float | None = option("--norm-epsilon", None, "epsilon of the norms; 1e-5 if not given")
    activation: Activation | None = option("--activation", None, "feed-forward activation")
    swiglu: bool = option("--swiglu", False, "gated SiLU feed-forward, as --activation swiglu")
    positions: Literal["learned_absolute", "rope", "none"] | None = option(
        "--position-embedding-type", None, "how a token's place enters"
    )
    rope_base: float | None = option("--rotary-base", None, "base of the rotary angles; 10000 if not given")
    untied: bool = option("--untie-embeddings-and-output-weights", False, "an output weight of its own")
    no_bias: bool = option("--disable-bias-linear", False, "linears without biases")
    init_std: float | None = option(
        "--init-method-std", None, "standard deviation of initial weights; 0.02 if not given"
    )
