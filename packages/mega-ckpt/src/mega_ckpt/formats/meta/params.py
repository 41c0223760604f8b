"""Convert Meta's params.json of a Llama to a `ModelSpec` and back.

params.json is incomplete. The feed-forward width and the vocabulary size come from the tensors, and the
longest sequence from the release, which the other parameters identify.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mega_schema.errors import ConfigError, FormatError
from mega_schema.sharding import Shape
from mega_schema.spec import ModelSpec, llama

# Llama 3.2 is the only release with a tied head, and the only one whose angles are scaled by more than 8
_SCALING: Mapping[bool, float] = MappingProxyType({True: 32.0, False: 8.0})
_PARAMS = frozenset(
    {
        *("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size"),
        *("multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope"),
        *("sliding_window", "max_seq_len", "max_batch_size"),  # Mistral's, and of an export
    }
)
_LLAMA_FIELDS: Mapping[str, object] = MappingProxyType(
    {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "bias": False,
        "embed_norm": False,
        "post_norm_residual": False,
        "parallel_residual": False,
        "scale_embedding": False,
        "qkv_bias": False,
        "qk_norm": False,
        "norm_1p": False,
        "sliding_window": None,
        "rotary_fraction": 1.0,
        "rope_interleaved": False,
        "rope_interpolation": 1.0,
        "rope_scaling_low": 1.0,
        "rope_scaling_high": 4.0,
        "rope_scaling_context": 8192,
    }
)


def to_spec(
    params: Mapping[str, Any], where: object, shapes: Mapping[str, Shape], parts: int, *, tied: bool
) -> tuple[ModelSpec, bool]:
    """Return the model spec, and whether the embedding is split by rows.

    Args:
        where: the file, to begin messages with.
        shapes: of the tensors of the first part.
        tied: the head is the embedding.

    Raises:
        FormatError: a parameter is missing, unknown or out of range, or the tensors do not match.
    """
    for name in params:
        if name not in _PARAMS:
            raise FormatError(
                f"{where}: {name}", "is not a known parameter", wanted=" | ".join(sorted(_PARAMS))
            )
    hidden, heads, layers = (_count(params, where, name) for name in ("dim", "n_heads", "n_layers"))
    if layers > len(shapes):  # otherwise the list of a wrong layer count could exhaust the memory
        raise FormatError(
            f"{where}: n_layers", "more than the files have", found=layers, wanted=f"at most {len(shapes)}"
        )
    if hidden % heads and "head_dim" not in params:
        raise FormatError(
            f"{where}: n_heads", "does not divide dim", found=heads, wanted=f"a divisor of {hidden}"
        )
    width = _count(params, where, "head_dim", hidden // heads)
    queries = _shape(where, shapes, "layers.0.attention.wq.weight")[0]
    if queries * parts != heads * width:
        wanted = heads * width // queries if queries else 1
        hint = "consolidated.00.pth and on, all in one folder"
        raise FormatError(where, "parts of the model", found=parts, wanted=wanted, hint=hint)
    words, columns = _shape(where, shapes, "tok_embeddings.weight")
    by_rows = columns == hidden
    vocab = words * parts if by_rows else words
    recorded_vocab = params.get("vocab_size", -1)
    if recorded_vocab not in (-1, vocab):
        raise FormatError(
            f"{where}: vocab_size", "is not the embedding's", found=recorded_vocab, wanted=f"-1 or {vocab}"
        )
    scaled = params.get("use_scaled_rope") is True
    base = params.get("rope_theta", 10000.0)
    eps = params.get("norm_eps", 1e-5)
    try:
        spec = llama(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=_count(params, where, "n_kv_heads", heads),
            head_dim=width,
            ffn=_shape(where, shapes, "layers.0.feed_forward.w1.weight")[0] * parts,
            vocab=vocab,
            max_seq_len=_count(params, where, "max_seq_len", _max_seq_len_of_release(scaled, base, eps)),
            norm_eps=eps,
            rope_theta=float(base) if type(base) is int else base,
            rope_scaling=_SCALING[tied] if scaled else 1.0,
            sliding_window=params.get("sliding_window"),
            tied=tied,
        )
    except ConfigError as error:
        raise FormatError(where, str(error)) from None
    return spec, by_rows


def from_spec(spec: ModelSpec, where: object) -> dict[str, Any]:
    """Build the params.json of a Llama, or of a GPT with a Llama's features.

    Args:
        where: the checkpoint, to begin messages with.

    Raises:
        ConfigError: Meta's program does not support the model.
    """
    wanted = {"head_dim": spec.hidden // spec.heads, **_LLAMA_FIELDS}
    if spec.rope_scaling != 1:
        wanted["rope_scaling"] = _SCALING[spec.tied]
    for name, value in wanted.items():
        if getattr(spec, name) != value:
            found = getattr(spec, name)
            raise ConfigError(
                f"{where}: model.{name}", "is not supported by Meta's Llama", found=found, wanted=value
            )
    base = int(2 * 4 * spec.hidden / 3)  # as in Meta's program, before the multiplier and rounding
    return {
        "dim": spec.hidden,
        "n_layers": spec.layers,
        "n_heads": spec.heads,
        "n_kv_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
        "multiple_of": 1,
        "ffn_dim_multiplier": (spec.ffn + 0.5) / base,
        "norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "use_scaled_rope": spec.rope_scaling != 1,
    }


def _max_seq_len_of_release(scaled: bool, base: object, eps: object) -> int:
    """Return the longest sequence, in tokens, of the release: 3.1 and later, Code Llama, 3, 1 or 2."""
    if scaled:
        return 131072
    if base == 1e6:
        return 16384
    if base == 5e5:
        return 8192
    return 2048 if eps == 1e-6 else 4096


def _count(params: Mapping[str, Any], where: object, name: str, absent: int | None = None) -> int:
    value = params.get(name)
    value = absent if value is None else value
    if type(value) is not int or value < 1:
        raise FormatError(f"{where}: {name}", "not a count", found=value, wanted="an integer above 0")
    return value


def _shape(where: object, shapes: Mapping[str, Shape], name: str) -> Shape:
    if name not in shapes:
        raise FormatError(where, "has no tensor", wanted=name)
    if len(shapes[name]) != 2:
        raise FormatError(f"{where}: {name}", "shape", found=shapes[name], wanted="two dimensions")
    return shapes[name]
