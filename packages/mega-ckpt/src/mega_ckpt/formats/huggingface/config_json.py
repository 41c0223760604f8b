"""Convert Hugging Face's config.json to a `ModelSpec` and back, by the tables of `model_classes`.

Unsupported features are refused by name: a converter must not load weights with another meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mega_ckpt.formats.huggingface.alternating_layers import read_layers, write_layers
from mega_ckpt.formats.huggingface.class_tables import NEEDED, HfConfigKey, HfModelClass
from mega_ckpt.formats.huggingface.model_classes import CLASSES
from mega_ckpt.formats.huggingface.task_labels import label_keys, read_labels
from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec

# keys of every class with the only supported value; all classes obey `is_causal`, none has it as a default
_FIXED: Mapping[str, object] = MappingProxyType({"quantization_config": None, "is_causal": True})
_LLAMA3: Mapping[str, str] = MappingProxyType(
    {
        "rope_scaling": "factor",
        "rope_scaling_low": "low_freq_factor",
        "rope_scaling_high": "high_freq_factor",
    }
)
_DEFAULTS: Mapping[str, object] = MappingProxyType({f.name: f.default for f in dataclasses.fields(ModelSpec)})
# not every config.json has an initialization, and the family changes no result
_FREE = frozenset({"family", "vocab_multiple", "init", "init_std", "labels"})

# how to train a model with another value of a field that no class supports, or not with the others
_HINTS: Mapping[str, str] = MappingProxyType(
    {"head_transform": "train with --no-bias-gelu-fusion, or with --activation gelu_tanh"}
)


def to_spec(config: Mapping[str, Any], where: object) -> ModelSpec:
    """Build the model spec that a config.json describes.

    Args:
        where: the file, to begin messages with.

    Raises:
        FormatError: the architecture is unknown or not supported, or a key is missing or out of range.
    """
    kinds = dict.fromkeys(cls.model_type for cls in CLASSES)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        raise FormatError(
            f"{where}: model_type", "unknown architecture", found=kind, wanted=" | ".join(kinds)
        )
    try:
        return ModelSpec.from_dict(_fields(_class_of_config(kind, config, where), config, where))
    except ConfigError as error:
        raise FormatError(where, str(error)) from error
    except KeyError as error:
        raise FormatError(f"{where}: {error.args[0]}", "missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise FormatError(where, "is not the config of a model", found=error) from error


def _class_of_config(kind: str, config: Mapping[str, Any], where: object) -> HfModelClass:
    """Return the class of a model type; of several, which have other heads, the one that the config names."""
    candidates = {cls.architecture: cls for cls in CLASSES if cls.model_type == kind}
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in candidates:
        wanted = " | ".join(candidates)
        raise FormatError(f"{where}: architectures", "is not supported", found=name, wanted=wanted)
    return candidates[name]


def from_spec(spec: ModelSpec, where: object) -> dict[str, Any]:
    """Build the config.json of a model, without dtype and token ids.

    Args:
        where: the checkpoint, to begin messages with.

    Raises:
        ConfigError: no class supports every feature of the model.
    """
    hf_class = class_of(spec, where)
    config: dict[str, Any] = {"model_type": hf_class.model_type, "architectures": [hf_class.architecture]}
    for key in hf_class.keys:
        value = getattr(spec, key.ours)
        config[key.theirs] = value if key.values is None else _inverse(key.values)[value]
    if hf_class.decoder_layers is not None and spec.encoder_layers is not None:
        config[hf_class.decoder_layers] = spec.layers - spec.encoder_layers
    if hf_class.window == "alternating" and hf_class.rope is not None:
        return config | write_layers(hf_class.rope, spec)
    return config | _rope_keys(hf_class, spec) | _window_keys(hf_class, spec) | label_keys(spec)


def class_of(spec: ModelSpec, where: object) -> HfModelClass:
    """Return the first class of `transformers` that supports every feature of the model.

    Raises:
        ConfigError: there is none. The message names the first field that no class supports; or if every
            field has a class, but no class has all, the first that the nearest class does not support.
    """
    lacking = [(candidate, _mismatches(candidate, spec)) for candidate in CLASSES]
    for candidate, fields in lacking:
        if not fields:
            return candidate
    for name in _DEFAULTS:
        if all(name in fields for _, fields in lacking):
            raise ConfigError(
                f"{where}: model.{name}",
                "is not supported by any class of Hugging Face",
                found=getattr(spec, name),
                wanted=" | ".join(dict.fromkeys(str(fields[name]) for _, fields in lacking)),
                hint=_HINTS.get(name, ""),
            )
    nearest, fields = min(lacking, key=lambda pair: ("positions" in pair[1], len(pair[1])))
    name = next(iter(fields))
    raise ConfigError(
        f"{where}: model.{name}",
        f"is not supported by {nearest.architecture}",
        found=getattr(spec, name),
        wanted=fields[name],
        hint=_HINTS.get(name, ""),
    )


def _fields(hf_class: HfModelClass, config: Mapping[str, Any], where: object) -> dict[str, Any]:
    _require_values(config, {**_FIXED, **hf_class.fixed}, where)
    fields: dict[str, Any] = {"family": hf_class.family}
    for key in hf_class.keys:
        fields[key.ours] = _read_key(key, config, fields, where)
    if hf_class.decoder_layers is not None:
        encoder_layers, layers = fields["encoder_layers"], config.get(hf_class.decoder_layers)
        fields["layers"] = encoder_layers + (encoder_layers if layers is None else layers)
    for name, rule in hf_class.implied.items():
        fields[name] = _apply_rule(rule, fields, where)
    if hf_class.window == "alternating" and hf_class.rope is not None:
        return fields | read_layers(hf_class.rope, config, fields["layers"], where)
    if hf_class.rope is not None:
        fields |= _rope(hf_class, config, where)
    if hf_class.window is not None:
        fields["sliding_window"] = _window(hf_class, config, fields, where)
    if fields.get("task_head", "none") != "none":
        fields["labels"] = read_labels(config, fields["task_head"], where)
    return fields


def _read_key(
    key: HfConfigKey, config: Mapping[str, Any], fields: Mapping[str, object], where: object
) -> object:
    names = [name for name in (key.theirs, *key.older) if name in config]
    for older in names[1:]:  # transformers takes the last of them in the file
        if config[names[0]] is not None and config[older] != config[names[0]]:
            wanted = f"the {config[names[0]]} of {names[0]}"
            raise FormatError(
                f"{where}: {older}", "is another name of the same key", found=config[older], wanted=wanted
            )
    name = names[0] if names else None
    if name is None or config[name] is None:
        rule = key.missing if name is None else key.null
        if rule is NEEDED:
            raise FormatError(f"{where}: {name or key.theirs}", "missing" if name is None else "is null")
        return _apply_rule(rule, fields, where)
    if key.values is None:
        return config[name]
    if config[name] not in key.values:
        wanted = " | ".join(key.values)
        raise FormatError(f"{where}: {name}", "is not supported", found=config[name], wanted=wanted)
    return key.values[config[name]]


def _apply_rule(rule: object, fields: Mapping[str, object], where: object) -> object:
    if not callable(rule):
        return rule
    value = rule(fields)
    if value is None:
        sizes = f"{fields['heads']} heads, {fields['hidden']}"
        raise FormatError(where, "heads do not divide the hidden size", found=sizes)
    return value


def _rope(hf_class: HfModelClass, config: Mapping[str, Any], where: object) -> dict[str, object]:
    """Return the rotary fields; transformers 5 moved their keys into `rope_parameters`.

    `rope_scaling` has priority over `rope_parameters`, as in transformers.
    """
    assert hf_class.rope is not None
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = config.get(name) or {}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise FormatError(
            f"{where}: {name}",
            "positions scaled in this way are not supported",
            found=kind,
            wanted="default | linear | llama3",
        )
    base = values.get("rope_theta", config.get(hf_class.rope.base, 10000.0))
    fields: dict[str, object] = {"rope_theta": float(base)}
    if hf_class.rope.fraction is None:
        _require_values(values, {"partial_rotary_factor": 1.0}, f"{where}: {name}")
    else:
        fraction = config.get(hf_class.rope.fraction, hf_class.rope.missing)
        fields["rotary_fraction"] = float(values.get("partial_rotary_factor", fraction))
    if kind == "linear":
        fields["rope_interpolation"] = float(values["factor"])
    elif kind == "llama3":
        fields |= {field: float(values[key]) for field, key in _LLAMA3.items()}
        fields["rope_scaling_context"] = values["original_max_position_embeddings"]
    return fields


def _rope_keys(hf_class: HfModelClass, spec: ModelSpec) -> dict[str, Any]:
    if hf_class.rope is None:
        return {}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling != 1:
        rope |= {"rope_type": "llama3"} | {key: getattr(spec, field) for field, key in _LLAMA3.items()}
        rope["original_max_position_embeddings"] = spec.rope_scaling_context
    elif spec.rope_interpolation != 1:
        rope |= {"rope_type": "linear", "factor": spec.rope_interpolation}
    keys: dict[str, Any] = {hf_class.rope.base: spec.rope_theta}
    if hf_class.rope.fraction is not None:
        rope["partial_rotary_factor"] = keys[hf_class.rope.fraction] = spec.rotary_fraction
    # transformers 4 reads the base and the scaling, if any; transformers 5 the parameters
    scaling = {"rope_scaling": rope} if rope["rope_type"] != "default" else {}
    return keys | {"rope_parameters": rope} | scaling


def _window(
    hf_class: HfModelClass, config: Mapping[str, Any], fields: Mapping[str, Any], where: object
) -> int | None:
    """Return the sliding window, which must apply to every layer or to none."""
    layers = min(fields["layers"], 1 << 20)  # a wrong count is refused later, and must not exhaust the memory
    if hf_class.window == "key":
        window = fields["sliding_window"]
        first = 0
    else:
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
        first = layers if window is None else min(config.get("max_window_layers", 28), layers)
    kinds = config.get("layer_types")
    if kinds is None:
        slides = layers - first if window is not None else 0
        windowed = f"{slides} of {layers} layers"
        name = "max_window_layers"
    else:
        slides = sum(kind == "sliding_attention" for kind in kinds)
        layers = len(kinds)
        windowed = f"{slides} of {layers} layers"
        name = "layer_types"
    if slides not in (0, layers) or (slides and window is None):
        raise FormatError(
            f"{where}: {name}",
            "a window in some of the layers is not supported",
            found=windowed,
            wanted="all of them, or none",
        )
    return window if slides else None


def _window_keys(hf_class: HfModelClass, spec: ModelSpec) -> dict[str, Any]:
    if hf_class.window != "switch":
        return {}
    slides = spec.sliding_window is not None
    return {
        "use_sliding_window": slides,
        "sliding_window": spec.sliding_window,
        "max_window_layers": 0 if slides else spec.layers,
        "layer_types": ["sliding_attention" if slides else "full_attention"] * spec.layers,
    }


def _mismatches(hf_class: HfModelClass, spec: ModelSpec) -> dict[str, object]:
    """Return the fields in which the model differs from the class, with the values of the class."""
    keys = {key.ours: key for key in hf_class.keys}
    fields = spec.to_dict()
    lacking: dict[str, object] = {}
    for name, value in fields.items():
        if name in _FREE or (name == "sliding_window" and hf_class.window is not None):
            continue
        if name == "global_attention_every" and hf_class.window == "alternating":
            if value is None and spec.sliding_window is not None:
                lacking[name] = "a number of layers"
            continue
        if name == "layers" and hf_class.decoder_layers is not None:
            continue
        if name in keys:
            values = keys[name].values
            if values is not None and value not in values.values():
                lacking[name] = " | ".join(_inverse(values))
        elif name in hf_class.implied:
            rule = hf_class.implied[name]
            wanted = rule(fields) if callable(rule) else rule
            if value != wanted:
                lacking[name] = wanted
        elif not name.startswith(("rope_", "rotary_")):
            if value != _DEFAULTS[name]:
                lacking[name] = _DEFAULTS[name]
        elif wanted := _rope_mismatch(hf_class, spec, name):
            lacking[name] = wanted
    return lacking


def _rope_mismatch(hf_class: HfModelClass, spec: ModelSpec, name: str) -> str | None:
    """Return the value that a rotary field must have; None if it matches or does not apply."""
    if spec.positions != "rope":
        return None
    if hf_class.rope is None:
        return str(_DEFAULTS[name]) if getattr(spec, name) != _DEFAULTS[name] else None
    if name == "rope_interleaved" and spec.rope_interleaved:
        return "False"
    if name == "rotary_fraction" and hf_class.rope.fraction is None and spec.rotary_fraction != 1:
        return "1.0"
    if hf_class.rope.local_base is not None and name in ("rope_interpolation", "rope_scaling"):
        return str(_DEFAULTS[name]) if getattr(spec, name) != _DEFAULTS[name] else None
    if name == "rope_interpolation" and spec.rope_scaling != 1 and spec.rope_interpolation != 1:
        return "1, with positions that are scaled"
    return None


def _inverse(values: Mapping[str, str]) -> dict[str, str]:
    """Invert a table of values: Mega's to Hugging Face's."""
    return {value: key for key, value in values.items()}


def _require_values(config: Mapping[str, Any], wanted: Mapping[str, object], where: object) -> None:
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise FormatError(f"{where}: {key}", "is not supported", found=config[key], wanted=value)
