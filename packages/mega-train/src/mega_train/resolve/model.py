"""The model of a run: what was said of it, or the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mega_schema.errors import ConfigError
from mega_schema.spec import Family, ModelSpec, gpt, llama, preset
from mega_train.config import Model, Run
from mega_train.resolve.given import wanted


def model_spec(run: Run, family: Family, *, vocab: int | None, loaded: ModelSpec | None) -> ModelSpec:
    """The checkpoint's model where nothing is said of it, else what is said; both must be equal."""
    if run.model == Model() and loaded is not None:
        _check_family(family, loaded)
        return loaded
    spec = _said(run, family, loaded.vocab if loaded and run.model.vocab is None else vocab)
    if loaded is not None:
        for name, value in loaded.to_dict().items():
            if name not in ("vocab_multiple", "init_std") and getattr(spec, name) != value:
                raise ConfigError(
                    f"model.{name}",
                    "differs from the checkpoint's",
                    found=getattr(spec, name),
                    wanted=value,
                    hint="leave the model's flags out to take the checkpoint's model",
                )
    return spec


def _said(run: Run, family: Family, vocab: int | None) -> ModelSpec:
    m = run.model
    if m.swiglu and m.activation not in (None, "swiglu"):
        raise ConfigError("--activation", "disagrees with --swiglu", found=m.activation, wanted="swiglu")
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
        "activation": "swiglu" if m.swiglu else m.activation,
        "positions": "learned" if m.positions == "learned_absolute" else m.positions,
        "rope_base": m.rope_base,
        "init_std": m.init_std,
        "tied": False if m.untied else None,
        "bias": False if m.no_bias else None,
        "qkv_bias": False if m.no_bias else None,
    }
    given: dict[str, Any] = {name: value for name, value in over.items() if value is not None}
    if m.preset is not None:
        base = preset(m.preset)
        _check_family(family, base)
        return ModelSpec.from_dict({**base.to_dict(), **given})
    given.setdefault("context", run.batch.length)
    given.setdefault("vocab", vocab)
    for name, flag in _NEEDED.items():
        wanted(given.get(name), flag, "a number, or --preset", f"--preset gpt2-124m or {flag} N")
    if given["hidden"] % given["heads"] and "head_width" not in given:
        raise ConfigError(
            "--num-attention-heads",
            "does not divide --hidden-size",
            found=f"{given['heads']} heads, hidden {given['hidden']}",
            wanted=f"a divisor of {given['hidden']}, or --kv-channels",
        )
    if "ffn" not in given and given.get("activation", "swiglu" if family == "llama" else "") == "swiglu":
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


def _check_family(family: Family, spec: ModelSpec) -> None:
    if spec.family != family:
        raise ConfigError(
            "command",
            "trains another family",
            found=family,
            wanted=spec.family,
            hint=f"mega-train {spec.family}",
        )
