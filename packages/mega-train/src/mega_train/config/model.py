"""Options of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_schema.app.config import option
from mega_schema.spec import Activation, Family


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Options of the model. With --load and none of them given, the model is the checkpoint's."""

    family: Family | None = option(
        "--family", None, "family of the model; the commands gpt, llama, bert and t5 set it"
    )
    preset: str | None = option("--preset", None, "a named model, such as llama3-8b")
    layers: int | None = option("--num-layers", None, "number of transformer layers")
    decoder_layers: int | None = option(
        "--decoder-num-layers", None, "layers of T5's decoder; --num-layers, the encoder's, if not given"
    )
    hidden: int | None = option("--hidden-size", None, "width of the residual stream")
    heads: int | None = option("--num-attention-heads", None, "number of query heads")
    kv_heads: int | None = option(
        "--num-query-groups", None, "number of key and value heads; that of query heads if not given"
    )
    head_dim: int | None = option("--kv-channels", None, "width of a head; hidden / heads if not given")
    ffn: int | None = option(
        "--ffn-hidden-size",
        None,
        "feed-forward width; 4 x hidden, or 8/3 x hidden to a multiple of 64 with SwiGLU",
    )
    max_seq_len: int | None = option(
        "--max-position-embeddings", None, "longest sequence in tokens; --seq-length if not given"
    )
    vocab: int | None = option(
        "--vocab-size", None, "vocabulary size without padding; that of the data's tokenizer if not given"
    )
    vocab_multiple: int | None = option(
        "--make-vocab-size-divisible-by",
        None,
        "pad each rank's part of the vocabulary in memory to a multiple of this; 128 if not given",
    )
    padded_vocab: int | None = option(
        "--pad-vocab-size-to", None, "pad the vocabulary in memory to this many rows (BigScience's)"
    )
    norm: Literal["LayerNorm", "RMSNorm"] | None = option("--normalization", None, "kind of norm")
    norm_eps: float | None = option("--norm-epsilon", None, "epsilon of the norms; 1e-5 if not given")
    norm_1p: bool = option(
        "--apply-layernorm-1p", False, "norms multiply by 1 + weight, and weights start at 0"
    )
    embed_norm: bool = option("--embed-layernorm", False, "apply a norm to the token embedding (BLOOM)")
    qk_norm: bool = option("--qk-layernorm", False, "apply a norm to each head of queries and keys")
    post_norm_residual: bool = option(
        "--apply-residual-connection-post-layernorm", False, "add each branch to the output of its norm"
    )
    parallel_residual: bool = option(
        "--parallel-residual", False, "attention and feed-forward both read the layer's input (GPT-NeoX)"
    )
    activation: Activation | None = option(
        "--activation", None, "feed-forward activation; of BERT a GELU is also that of the head"
    )
    swiglu: bool = option("--swiglu", False, "gated SiLU feed-forward, same as --activation swiglu")
    glu: Literal["geglu", "liglu", "reglu", "swiglu"] | None = option(
        "--glu-activation", None, "gated feed-forward by BigScience's name, same as --activation"
    )
    bias_gelu_fusion: bool = option(
        "--no-bias-gelu-fusion", True, "compute GELU by erf, as Megatron's unfused kernel does"
    )
    positions: Literal["learned_absolute", "rope", "alibi", "relative", "none"] | None = option(
        "--position-embedding-type", None, "kind of position embedding; relative is T5's, and for T5 only"
    )
    relative_buckets: int | None = option(
        "--relative-attention-num-buckets", None, "rows of the table of relative positions; 32 if not given"
    )
    relative_max_distance: int | None = option(
        "--relative-attention-max-distance",
        None,
        "distance in tokens from which relative positions share one row; 128 if not given",
    )
    rope_theta: float | None = option("--rotary-base", None, "base of the rotary angles; 10000 if not given")
    rotary_fraction: float | None = option(
        "--rotary-percent", None, "fraction of each head that is rotated; 1.0 if not given"
    )
    rope_interleaved: bool = option(
        "--rotary-interleaved",
        False,
        "rotate adjacent components as pairs, instead of those half a head apart",
    )
    rope_interpolation: float | None = option(
        "--rotary-seq-len-interpolation-factor", None, "divide positions by this factor"
    )
    rope_scaled: bool = option("--use-rope-scaling", False, "use Llama 3.1's scaling of rotary positions")
    rope_scaling: float | None = option(
        "--rope-scaling-factor", None, "factor of --use-rope-scaling; 8 if not given"
    )
    sliding_window: str | None = option(
        "--window-size",
        None,
        "LEFT,0: attend to the token and this many before it; BERT's N,N: and after it; to all if not given",
    )
    global_attention_every: int | None = option(
        "--global-attention-every-n-layers",
        None,
        "BERT: the first layer and each this many after it attend to all tokens, the others by --window-size",
    )
    rope_theta_local: float | None = option(
        "--local-rotary-base",
        None,
        "base of the rotary angles of the layers with a window; 10000 if not given",
    )
    untied: bool = option(
        "--untie-embeddings-and-output-weights", False, "separate embedding and output weights"
    )
    no_bias: bool = option(
        "--disable-bias-linear",
        False,
        "no biases in linear layers; without --activation GELU is then computed by erf, as in Megatron",
    )
    qkv_bias: bool = option(
        "--add-qkv-bias", False, "add a bias to queries, keys and values, also with --disable-bias-linear"
    )
    init_std: float | None = option(
        "--init-method-std", None, "standard deviation of initial weights; 0.02 if not given"
    )
    xavier: bool = option(
        "--init-method-xavier-uniform", False, "initialise matrices by the Xavier uniform distribution"
    )
