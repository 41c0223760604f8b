"""Convert the arguments in a Megatron checkpoint to a `ModelSpec` and back.

A table maps arguments to fields of `ModelSpec`. A field that depends on several arguments has a function in
each direction; an unsupported argument that changes the model is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mega_schema.errors import ConfigError, FormatError
from mega_schema.sharding import Shape
from mega_schema.spec import GATED, Activation, ModelSpec, Positions

Args = Mapping[str, Any]
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class _Arg:
    """One argument and the field with the same meaning.

    Attributes:
        names: names of the argument in all releases, newest first; all are written.
        absent: the value if the argument is missing, or None.
    """

    ours: str
    names: tuple[str, ...]
    kind: type[int] | type[float] | type[bool]
    absent: Any = _REQUIRED


_TABLE = (
    _Arg("layers", ("num_layers", "encoder_num_layers"), int),
    _Arg("hidden", ("hidden_size",), int),
    _Arg("heads", ("num_attention_heads",), int),
    _Arg("max_seq_len", ("max_position_embeddings",), int),
    _Arg("norm_eps", ("norm_epsilon", "layernorm_epsilon"), float, 1e-5),
    _Arg("norm_1p", ("layernorm_zero_centered_gamma", "apply_layernorm_1p"), bool, False),
    _Arg("rope_theta", ("rotary_base",), float, 10000.0),
    _Arg("rotary_fraction", ("rotary_percent",), float, 1.0),
    _Arg("rope_interleaved", ("rotary_interleaved",), bool, False),
    _Arg("rope_interpolation", ("rotary_seq_len_interpolation_factor",), float, 1.0),
    _Arg("bias", ("add_bias_linear",), bool, True),
    _Arg("post_norm_residual", ("apply_residual_connection_post_layernorm",), bool, False),
    _Arg("embed_norm", ("embed_layernorm",), bool, False),
    _Arg("qk_norm", ("qk_layernorm",), bool, False),
    _Arg("init_std", ("init_method_std",), float, 0.02),
    _Arg("vocab_multiple", ("make_vocab_size_divisible_by",), int, 128),
)
_NORMS: Mapping[str, str] = MappingProxyType({"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"})
_POSITIONS: Mapping[str, Positions] = MappingProxyType(
    {
        "learned_absolute": "learned",
        "rope": "rope",
        "none": "none",
        "absolute": "learned",  # the last three are BigScience's
        "rotary": "rope",
        "alibi": "alibi",
    }
)
# unsupported arguments, if they are set
_REFUSED = (
    *("num_experts", "retro_add_retriever", "glu_activation", "quick_geglu", "multi_latent_attention"),
    *("mtp_num_layers", "hybrid_attention_ratio", "hybrid_mlp_ratio", "hybrid_override_pattern"),
    *("is_hybrid_model", "heterogeneous_layers_config_path", "no_rope_freq", "window_attn_skip_freq"),
    *("attention_output_gate", "qk_l2_norm", "activation_func_clamp_value", "glu_linear_offset"),
    *("linear_attention_freq", "experimental_attention_variant", "prefix_lm"),
    *("softmax_scale", "softmax_type", "hybrid_layer_pattern"),
)
# arguments that the core class ignores
_OF_LEGACY = frozenset({"apply_residual_connection_post_layernorm", "openai_gelu", "onnx_safe"})
_LLAMA: Mapping[str, object] = MappingProxyType(
    {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False}
)


def true_vocab(args: Args) -> int | None:
    """Return the true vocabulary size if the arguments contain it; NullTokenizer has one more id."""
    size = args.get("true_vocab_size")
    extra = 0
    if size is None and args.get("tokenizer_type") == "NullTokenizer":
        size = args.get("vocab_size")
        extra = 1
    return size + extra if type(size) is int and size > 0 else None


def to_spec(args: Args, vocab: int, where: object, *, core: bool) -> ModelSpec:
    """Build the model spec.

    Args:
        vocab: the true vocabulary.
        core: the checkpoint is of the core class, which ignores some arguments.
        where: the file, to begin messages with.

    Raises:
        FormatError: an argument is missing, or the model is not supported.
    """
    read = {name: value for name, value in args.items() if not (core and name in _OF_LEGACY)}
    try:
        return _spec(read, vocab, where)
    except (ConfigError, ArithmeticError, TypeError, ValueError) as error:
        raise FormatError(
            f"{where}: args", "do not describe a supported model", found=f"({error})"
        ) from error


def _spec(args: Args, vocab: int, where: object) -> ModelSpec:
    for name in _REFUSED:
        if args.get(name) and args[name] != "vanilla":  # the only supported softmax
            raise FormatError(f"{where}: args.{name}", "is not supported", found=args[name], wanted="unset")
    if _enum_name(args.get("model_type")) not in ("", "encoder_or_decoder", "encoder_and_decoder"):
        found = _enum_name(args["model_type"])
        raise FormatError(
            f"{where}: args.model_type", "is not a GPT", found=found, wanted="encoder_or_decoder"
        )
    values: dict[str, Any] = {arg.ours: _value(arg, args, where) for arg in _TABLE}
    values |= {
        "vocab": vocab,
        "norm": _lookup_enum(_NORMS, args.get("normalization", "LayerNorm"), f"{where}: args.normalization"),
        "activation": _activation(args),
        "positions": _positions(args, where),
        "tied": not args.get("untie_embeddings_and_output_weights"),
        "qkv_bias": values["bias"] or bool(args.get("add_qkv_bias")),
        "init": "xavier_uniform" if args.get("init_method_xavier_uniform") else "normal",
        "ffn": args.get("ffn_hidden_size") or 4 * values["hidden"],
        "head_dim": args.get("kv_channels") or values["hidden"] // max(1, values["heads"]),
        "kv_heads": args.get("num_query_groups") if args.get("group_query_attention") else values["heads"],
        "sliding_window": _window(args, where),
    }
    if args.get("use_rope_scaling"):  # as Llama 3.1
        values["rope_scaling"] = float(args.get("rope_scaling_factor") or 8.0)
    llama = all(values[name] == only for name, only in _LLAMA.items())
    llama = llama and not values["post_norm_residual"] and not values["embed_norm"]
    return ModelSpec(family="llama" if llama else "gpt", **values)


def bert_spec(
    spec: ModelSpec, args: Args, shape_of: Callable[[str], Shape | None], *, core: bool
) -> ModelSpec:
    """Complete the spec of a BERT, whose arguments are those of a GPT, with the parts in the files.

    Args:
        shape_of: the shape of a parameter in the files; None if they have no such parameter.
    """
    tanh = bool(args.get("openai_gelu")) and not core  # otherwise its head has GELU by erf
    token_types = shape_of("token_type.weight")
    has_transform = shape_of("head.dense.weight") is not None
    return replace(
        spec,
        family="bert",
        causal=False,
        qk_norm=spec.qk_norm and not core,  # core's BERT ignores it
        token_types=token_types[0] if token_types else None,
        pooler=shape_of("pooler.weight") is not None,
        binary_head=shape_of("binary_head.weight") is not None,
        head_bias=shape_of("head.bias") is not None,
        head_transform="none" if not has_transform else "gelu_tanh" if tanh else "gelu_erf",
    )


def check_core_bert(spec: ModelSpec, where: object) -> None:
    """Refuse a BERT of the core class with options of which it is not known what the class computes.

    Raises:
        FormatError: the model has one.
    """
    for name, value in _unsupported_options(spec, core=True):
        raise FormatError(
            f"{where}: model.{name}",
            "is not supported for a BERT of the core class",
            found=getattr(spec, name),
            wanted=value,
        )


def from_spec(spec: ModelSpec, where: object, *, core: bool) -> dict[str, Any]:
    """Build the arguments that `to_spec` reads, under the names of every release.

    Args:
        core: for the core class, which supports features that the legacy class does not.
        where: the source, to begin messages with.

    Raises:
        ConfigError: Megatron does not support the model.
    """
    _check_supported(spec, where, core=core)
    plain = {name: getattr(spec, arg.ours) for arg in _TABLE for name in arg.names}
    theirs = {ours: name for name, ours in [*_NORMS.items()][::-1]}
    position = {ours: name for name, ours in [*_POSITIONS.items()][::-1]}[spec.positions]
    if spec.encoder_layers is not None:
        encoder, decoder = spec.encoder_layers, spec.layers - spec.encoder_layers
        plain |= {"num_layers": encoder, "encoder_num_layers": encoder, "decoder_num_layers": decoder}
    return plain | {
        "rotary_base": int(spec.rope_theta),
        "rotary_seq_len_interpolation_factor": (
            None if spec.rope_interpolation == 1 else int(spec.rope_interpolation)
        ),
        "normalization": theirs[spec.norm],
        "position_embedding_type": position,
        "add_position_embedding": spec.positions == "learned",
        "use_rotary_position_embeddings": spec.positions == "rope",
        "swiglu": spec.activation == "swiglu",
        "squared_relu": spec.activation == "squared_relu",
        "openai_gelu": _has_openai_gelu(spec) and not core,
        "bert_binary_head": spec.causal or spec.binary_head,
        "bias_gelu_fusion": spec.activation == "gelu_tanh" and spec.bias,
        "onnx_safe": None,
        "untie_embeddings_and_output_weights": not spec.tied,
        "add_qkv_bias": spec.qkv_bias and not spec.bias,
        "init_method_xavier_uniform": spec.init == "xavier_uniform",
        "ffn_hidden_size": spec.ffn,
        "kv_channels": spec.head_dim,
        "group_query_attention": spec.kv_heads != spec.heads,
        "num_query_groups": spec.kv_heads,
        "window_size": None if spec.sliding_window is None else (spec.sliding_window - 1, 0),
        "use_rope_scaling": spec.rope_scaling != 1,
        "rope_scaling_factor": spec.rope_scaling if spec.rope_scaling != 1 else 8.0,
    }


def _has_openai_gelu(spec: ModelSpec) -> bool:
    """Whether the model needs the argument of the tanh form: without a bias, or in the head of an encoder."""
    return spec.activation == "gelu_tanh" and (not spec.bias or spec.head_transform == "gelu_tanh")


def _check_supported(spec: ModelSpec, where: object, *, core: bool) -> None:
    """Refuse a model that Megatron's arguments cannot express."""
    other_format = "megatron" if core else "megatron-core"
    hint = "" if any(_unsupported_options(spec, not core)) else f"--to {other_format} may have it"
    for name, value in _unsupported_options(spec, core):
        raise ConfigError(
            f"{where}: model.{name}",
            "is not supported by Megatron",
            found=getattr(spec, name),
            wanted=value,
            hint=hint,
        )


def _unsupported_options(spec: ModelSpec, core: bool) -> Iterator[tuple[str, object]]:
    if spec.positions in ("alibi", "sinusoidal"):
        yield "positions", "learned | rope | none"
    if spec.activation in (GATED | {"relu"}) - {"swiglu"}:
        yield "activation", "gelu_tanh | gelu_erf | squared_relu | swiglu"
    if core and spec.activation == "gelu_tanh" and not spec.bias:
        yield "activation", "gelu_erf | squared_relu | swiglu, without biases"
    if spec.bias and not spec.qkv_bias:
        yield "qkv_bias", True
    if not spec.causal:
        yield from _unsupported_encoder_options(spec, core)
    for name in ("rope_theta", "rope_interpolation"):
        if getattr(spec, name) % 1:
            yield name, "an integer"
    required: dict[str, object] = {
        "scale_embedding": False,
        "embed_norm": False,
        "parallel_residual": False,
    }
    if spec.rope_scaling != 1:
        required |= {"rope_scaling_low": 1.0, "rope_scaling_high": 4.0, "rope_scaling_context": 8192}
    if spec.encoder_layers is not None:
        required |= {"kv_heads": spec.heads, "head_bias": True, "tied": True, "positions": "learned"}
        required |= {"scale_output": False, "scale_attention": True}
    if core:
        required |= {"post_norm_residual": False, "encoder_layers": None}
    else:
        required |= {"qk_norm": False, "sliding_window": None, "rope_scaling": 1.0, "rope_theta": 10000.0}
    for name, value in required.items():
        if getattr(spec, name) != value:
            yield name, value


def _unsupported_encoder_options(spec: ModelSpec, core: bool) -> Iterator[tuple[str, object]]:
    """Yield what Megatron's BERT has no choice of.

    It has all its heads or all but those of two sentences, biases, and layers that are alike.
    """
    required: dict[str, object] = {
        "task_head": "none",
        "tied": True,
        "bias": True,
        "head_bias": True,
        "pooler": spec.binary_head,
    }
    required |= {"norm_bias": True, "first_attention_norm": True, "global_attention_every": None}
    if core:
        required |= {"positions": "learned", "norm": "layernorm", "qk_norm": False, "sliding_window": None}
    for name, value in required.items():
        if getattr(spec, name) != value:
            yield name, value
    tanh = not core and spec.head_transform == spec.activation == "gelu_tanh"
    if spec.head_transform != "gelu_erf" and not tanh:
        yield "head_transform", "gelu_erf"


def _value(arg: _Arg, args: Args, where: object) -> Any:
    value = next((args[name] for name in arg.names if args.get(name) is not None), arg.absent)
    where_key = f"{where}: args.{arg.names[0]}"
    if value is _REQUIRED:
        raise FormatError(where_key, "missing")
    if arg.kind is float and type(value) is int:
        return float(value)
    if type(value) is not arg.kind:
        raise FormatError(where_key, "is of another kind", found=repr(value), wanted=arg.kind.__name__)
    return value


def _enum_name(value: Any) -> str:
    """Return the name of an enum's member, or the text itself."""
    return "" if value is None else str(getattr(value, "name", value))


def _lookup_enum(known: Mapping[str, Any], value: Any, where: str) -> Any:
    if _enum_name(value) not in known:
        raise FormatError(where, "is not supported", found=_enum_name(value), wanted=" | ".join(known))
    return known[_enum_name(value)]


def _activation(args: Args) -> Activation:
    """Return the activation; the fused bias and GELU kernel uses the tanh approximation."""
    if args.get("swiglu"):
        return "swiglu"
    if args.get("openai_gelu"):
        return "gelu_tanh"
    if args.get("onnx_safe"):
        return "gelu_erf"
    if args.get("squared_relu"):
        return "squared_relu"
    fused = args.get("bias_gelu_fusion", True) and args.get("add_bias_linear", True)
    return "gelu_tanh" if fused else "gelu_erf"


def _positions(args: Args, where: object) -> Positions:
    prefix = f"{where}: args."
    rotary = bool(args.get("use_rotary_position_embeddings"))
    if args.get("position_embedding_type") is not None:
        kind = _lookup_enum(_POSITIONS, args["position_embedding_type"], prefix + "position_embedding_type")
        return "rope" if rotary else kind  # the older flag has priority, as in Megatron
    if rotary and args.get("add_position_embedding", False):
        raise FormatError(
            prefix + "use_rotary_position_embeddings", "together with learned positions", found=True
        )
    if rotary:
        return "rope"
    return "learned" if args.get("add_position_embedding", True) else "none"


def _window(args: Args, where: object) -> int | None:
    """Return the sliding window, which in Megatron does not count the token itself."""
    window = args.get("window_size")
    if window is None or tuple(window) == (-1, -1):
        return None
    before, after = window
    if type(before) is not int or before < 0 or after > 0:
        raise FormatError(f"{where}: args.window_size", "is not of one side", found=window, wanted="(N, 0)")
    return before + 1
