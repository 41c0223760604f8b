"""The model of a run: what was said of it, or the checkpoint's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mega_schema.errors import ConfigError
from mega_schema.spec import GATED, Family, ModelSpec, gpt, llama, preset
from mega_train.config import Model, Run
from mega_train.config.refusals import Refusals
from mega_train.resolve.required import wanted


def model_spec(run: Run, family: Family, *, vocab: int | None, loaded: ModelSpec | None) -> ModelSpec:
    """The checkpoint's model where nothing is said of it, else what is said; both must be equal."""
    if run.model.family not in (None, family):
        raise ConfigError(
            "model.family",
            "is not that of the command",
            found=run.model.family,
            wanted=family,
            hint=f"mega-train {run.model.family}",
        )
    if replace(run.model, family=None) == Model() and loaded is not None:
        _check_family(family, loaded)
        return loaded
    spec = _said(run, family, loaded.vocab if loaded and run.model.vocab is None else vocab, loaded)
    if run.model.padded_vocab is not None:
        spec = replace(spec, vocab_multiple=_share_of_padded(run, spec.vocab))
    if loaded is not None:
        for name, value in loaded.to_dict().items():
            if name not in _OF_THE_START and getattr(spec, name) != value:
                raise ConfigError(
                    f"model.{name}",
                    "differs from the checkpoint's",
                    found=getattr(spec, name),
                    wanted=value,
                    hint="leave the model's flags out to take the checkpoint's model",
                )
    return spec


# what changes no result, or only where a run begins
_OF_THE_START = frozenset({"vocab_multiple", "init", "init_std"})


def _share_of_padded(run: Run, vocab: int) -> int:
    """The rows of the padded vocabulary on one rank of tp.

    Raises:
        ConfigError: the ranks cannot share the padded vocabulary, or it is smaller than the vocabulary.
    """
    flag, rows, tp = "--pad-vocab-size-to", run.model.padded_vocab or 0, run.parallel.tp
    if rows % (run.model.vocab_multiple or 1):
        multiple = f"a multiple of --make-vocab-size-divisible-by {run.model.vocab_multiple}"
        raise ConfigError(flag, "disagrees with another flag", found=rows, wanted=multiple)
    if rows < vocab:
        raise ConfigError(flag, "is less than the vocabulary", found=rows, wanted=f"{vocab} or more")
    if rows % tp:
        near = -(-rows // tp) * tp
        raise ConfigError(
            flag, "cannot be shared evenly", found=f"{rows} rows over tp={tp}", hint=f"{flag} {near}"
        )
    return rows // tp


def _said(run: Run, family: Family, vocab: int | None, loaded: ModelSpec | None) -> ModelSpec:
    """The model that the flags describe.

    Args:
        loaded: the checkpoint's, of which flags that name no shape say a part (--use-checkpoint-args).
    """
    m = run.model
    over = {
        "layers": m.layers,
        "hidden": m.hidden,
        "heads": m.heads,
        "kv_heads": m.kv_heads,
        "head_width": m.head_width,
        "ffn": m.ffn,
        "vocab": m.vocab,
        "context": m.context,
        "vocab_multiple": m.vocab_multiple,
        "norm": m.norm.lower() if m.norm else None,
        "norm_eps": m.norm_eps,
        "norm_1p": m.norm_1p or None,
        "embed_norm": m.embed_norm or None,
        "qk_norm": m.qk_norm or None,
        "post_norm_residual": m.post_norm_residual or None,
        "parallel_residual": m.parallel_residual or None,
        "activation": _activation(m, family),
        "positions": "learned" if m.positions == "learned_absolute" else m.positions,
        "rope_base": m.rope_base,
        "rope_share": m.rope_share,
        "rope_interleaved": m.rope_interleaved or None,
        "rope_interpolation": m.rope_interpolation,
        "rope_scaling": _rope_scaling(m),
        "window": _window(m.window),
        "init": "xavier_uniform" if m.xavier else None,
        "init_std": m.init_std,
        "tied": False if m.untied else None,
        "bias": False if m.no_bias else None,
        "qkv_bias": True if m.qkv_bias else False if m.no_bias else None,
    }
    given: dict[str, Any] = {name: value for name, value in over.items() if value is not None}
    if m.preset is not None:
        base = preset(m.preset)
        _check_family(family, base)
        return ModelSpec.from_dict({**base.to_dict(), **given})
    if loaded is not None and not given.keys() & {"layers", "hidden", "heads"}:
        _check_family(family, loaded)
        return ModelSpec.from_dict({**loaded.to_dict(), **given})
    given.setdefault("context", run.batch.length)
    given.setdefault("vocab", vocab)
    missing = Refusals()
    for name, flag in _NEEDED.items():
        missing.attempt(
            wanted, given.get(name), flag, "a number, or --preset", f"--preset gpt2-124m or {flag} N"
        )
    missing.raise_any()
    if given["hidden"] % given["heads"] and "head_width" not in given:
        raise ConfigError(
            "--num-attention-heads",
            "does not divide --hidden-size",
            found=f"{given['heads']} heads, hidden {given['hidden']}",
            wanted=f"a divisor of {given['hidden']}, or --kv-channels",
        )
    gated = given.get("activation", "swiglu" if family == "llama" else "") in GATED
    narrow = family == "llama" or (
        gated and (m.swiglu or not m.glu)
    )  # BigScience's gates leave it at 4 x hidden
    if "ffn" not in given and narrow:
        given["ffn"] = int(given["hidden"] * 4 * 2 / 3 / 64) * 64 or 64
    return (gpt if family == "gpt" else llama)(**given)


_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "layers": "--num-layers",
        "hidden": "--hidden-size",
        "heads": "--num-attention-heads",
        "context": "--max-position-embeddings",
        "vocab": "--vocab-size",
    }
)


def _activation(m: Model, family: Family) -> str | None:
    asked = m.activation
    for flag, given in (("--swiglu", "swiglu" if m.swiglu else None), ("--glu-activation", m.glu)):
        if given is not None and asked not in (None, given):
            other = "--activation" if m.activation else "--swiglu"
            raise ConfigError(other, f"disagrees with {flag}", found=asked, wanted=given)
        asked = given or asked  # type: ignore[assignment]
    # Megatron's kernel with the approximation is the one that adds a bias
    if asked is not None or not (m.unfused_gelu or m.no_bias) or family == "llama":
        return asked
    named = preset(m.preset).activation if m.preset else "gelu_tanh"
    return "gelu_erf" if named == "gelu_tanh" else None


def _rope_scaling(m: Model) -> float | None:
    if m.rope_scaling is not None and not m.rope_scaled:
        hint = "--use-rope-scaling, or leave it out"
        raise ConfigError("--rope-scaling-factor", "nothing is scaled", found=m.rope_scaling, hint=hint)
    return (8.0 if m.rope_scaling is None else m.rope_scaling) if m.rope_scaled else None


def _window(text: str | None) -> int | None:
    """Tokens that a token sees, of Megatron's (left, right): itself is not counted there."""
    if text is None:
        return None
    found = re.fullmatch(r"\(?\s*(\d+)\s*(?:,\s*0\s*)?\)?", text)
    if found is None:
        raise ConfigError(
            "--window-size",
            "not a window of tokens before",
            found=text,
            wanted="LEFT,0",
            hint="--window-size 4095,0",
        )
    return int(found[1]) + 1


def _check_family(family: Family, spec: ModelSpec) -> None:
    if spec.family != family:
        raise ConfigError(
            "command",
            "trains another family",
            found=family,
            wanted=spec.family,
            hint=f"mega-train {spec.family}",
        )
