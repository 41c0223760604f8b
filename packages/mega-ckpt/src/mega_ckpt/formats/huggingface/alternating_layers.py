"""Keys of a class whose layers attend within a window, but for every n-th, which attends to all tokens.

Both kinds of layers have rotary positions, each with its own base. transformers 4 reads
`global_attn_every_n_layers` and a key for each base, transformers 5 `layer_types` and `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mega_ckpt.formats.huggingface.class_tables import RopeKeys
from mega_schema.errors import FormatError
from mega_schema.spec import ModelSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"
_EVERY = "global_attn_every_n_layers"
_DEFAULT_EVERY, _DEFAULT_LOCAL_ATTENTION, _DEFAULT_LOCAL_BASE = 3, 128, 10000.0


def read_layers(rope: RopeKeys, config: Mapping[str, Any], layers: int, where: object) -> dict[str, object]:
    """Return the fields of windows and of rotary positions.

    Args:
        layers: number of layers.
        where: the file, to begin messages with.

    Raises:
        FormatError: the layers with a window are not all but every n-th, or positions are scaled.
    """
    layers = min(layers, 1 << 20)  # a wrong count is refused later, and must not exhaust the memory
    every = _read_every(config, layers, where)
    _check_unscaled(config.get("rope_scaling"), f"{where}: rope_scaling")
    base = _read_base(_FULL, rope.base, rope.default_base, config, where)
    assert rope.local_base is not None
    local_base = _read_base(_SLIDING, rope.local_base, _DEFAULT_LOCAL_BASE, config, where)
    neighbours = config.get("local_attention", _DEFAULT_LOCAL_ATTENTION)
    return {
        "rope_theta": float(base),
        "rope_theta_local": float(base if local_base is None else local_base),
        "global_attention_every": every,
        "sliding_window": None if every is None else neighbours // 2 + 1,
    }


def write_layers(rope: RopeKeys, spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of the windows and of rotary positions."""
    every = spec.global_attention_every
    window = spec.sliding_window
    assert rope.local_base is not None
    return {
        _EVERY: 1 if every is None else every,
        "local_attention": _DEFAULT_LOCAL_ATTENTION if window is None else 2 * (window - 1),
        "layer_types": [_SLIDING if spec.is_local(layer) else _FULL for layer in range(spec.layers)],
        rope.base: spec.rope_theta,
        rope.local_base: spec.rope_theta_local,
        "rope_parameters": {
            _FULL: {"rope_type": "default", "rope_theta": spec.rope_theta},
            _SLIDING: {"rope_type": "default", "rope_theta": spec.rope_theta_local},
        },
    }


def _read_every(config: Mapping[str, Any], layers: int, where: object) -> int | None:
    """Return the distance of two layers without a window; None if no layer has a window."""
    stored = config.get(_EVERY, _DEFAULT_EVERY)
    kinds = config.get("layer_types")
    if kinds is None:
        return None if stored == 1 else stored
    full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    if len(full) == len(kinds) == layers:
        return None
    second = full[1] if len(full) > 1 else layers
    is_known = set(kinds) <= {_FULL, _SLIDING} and len(kinds) == layers
    for every in (stored, second):
        if is_known and type(every) is int and every > 0 and full == [*range(0, layers, every)]:
            return every
    raise FormatError(
        f"{where}: layer_types",
        "is not supported",
        found=f"{_FULL} in {_list(full)} of {len(kinds)} layers",
        wanted=f"{_SLIDING} in all of {layers} layers but layer 0 and every n-th after it",
    )


def _list(layers: Sequence[int]) -> str:
    """Format the first numbers of layers."""
    return ", ".join(map(str, layers[:4])) + (", ..." if len(layers) > 4 else "") if layers else "none"


def _read_base(kind: str, key: str, missing: float, config: Mapping[str, Any], where: object) -> Any:
    values = (config.get("rope_parameters") or {}).get(kind)
    _check_unscaled(values, f"{where}: rope_parameters.{kind}")
    return (values or {}).get("rope_theta", config.get(key, missing))


def _check_unscaled(values: Mapping[str, Any] | None, where: object) -> None:
    kind = (values or {}).get("rope_type", (values or {}).get("type", "default"))
    if kind != "default":
        raise FormatError(
            where, "positions scaled in this way are not supported", found=kind, wanted="default"
        )
