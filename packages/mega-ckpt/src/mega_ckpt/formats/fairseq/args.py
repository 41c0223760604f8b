"""Convert the arguments in a fairseq language model checkpoint to a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mega_ckpt.torch_files.pickle_reader import Record
from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec, gpt

_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"gelu": "gelu_erf", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh"}
)
# arguments that change the model, with the only supported value, also their default
_ONLY: Mapping[str, object] = MappingProxyType(
    {
        "decoder_normalize_before": True,
        "share_decoder_input_output_embed": True,
        "decoder_learned_pos": False,
        "no_token_positional_embeddings": False,
        "no_decoder_final_norm": False,
        "layernorm_embedding": False,
        "character_embeddings": False,
        "adaptive_input": False,
        "adaptive_softmax_cutoff": None,
        "scale_fc": False,
        "scale_attn": False,
        "scale_heads": False,
        "scale_resids": False,
        "base_layers": 0,
    }
)


def model_args(tree: Mapping[Any, Any], where: object) -> Mapping[str, Any]:
    """Return the arguments of the model: `args`, or `cfg.model` from 2020 on.

    Args:
        tree: everything in the file.
        where: the file, to begin messages with.

    Raises:
        FormatError: the file has no arguments.
    """
    args = _plain(tree.get("args"))
    if not isinstance(args, Mapping):
        config = _plain(tree.get("cfg"))
        args = _plain(config.get("model")) if isinstance(config, Mapping) else None
    if not isinstance(args, Mapping):
        raise FormatError(where, "has no arguments", wanted="args or cfg, as fairseq saves them")
    return {str(name): _plain(value) for name, value in args.items()}


def to_spec(args: Mapping[str, Any], vocab: int, where: object) -> ModelSpec:
    """Build the model spec.

    Args:
        vocab: rows of the embedding, all parts together.

    Raises:
        FormatError: an argument is missing, out of range or not supported.
    """
    for name, value in _ONLY.items():
        if args.get(name, value) != value:
            raise FormatError(f"{where}: {name}", "is not supported", found=args[name], wanted=value)
    activation = args.get("activation_fn", "relu")
    if activation not in _ACTIVATIONS:
        raise FormatError(
            f"{where}: activation_fn", "is not supported", found=activation, wanted=" | ".join(_ACTIVATIONS)
        )
    hidden = _count(args, "decoder_embed_dim", where)
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if args.get(name, hidden) != hidden:
            raise FormatError(f"{where}: {name}", "is not supported", found=args[name], wanted=hidden)
    try:
        return gpt(
            layers=_count(args, "decoder_layers", where),
            hidden=hidden,
            heads=_count(args, "decoder_attention_heads", where),
            ffn=_count(args, "decoder_ffn_embed_dim", where),
            vocab=vocab,
            max_seq_len=_count(args, "tokens_per_sample", where),
            activation=_ACTIVATIONS[activation],
            positions="sinusoidal",
            scale_embedding=not args.get("no_scale_embedding", False),
        )
    except ConfigError as error:
        raise FormatError(where, str(error)) from None


def _count(args: Mapping[str, Any], name: str, where: object) -> int:
    value = args.get(name)
    if type(value) is not int or value < 1:
        raise FormatError(f"{where}: {name}", "not a count", found=value, wanted="an integer above 0")
    return value


def _plain(value: Any) -> Any:
    """Unwrap a namespace to its fields, and a node of OmegaConf to its value."""
    while isinstance(value, Record):
        fields = value.fields
        value = fields.get("_content", fields.get("_val", fields))
    return value
