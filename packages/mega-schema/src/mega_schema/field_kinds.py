"""Check the values of a model's fields by themselves."""

from __future__ import annotations

import sys
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from mega_schema.spec import ModelSpec

_LARGEST = sys.float_info.max  # an integer of JSON may be larger, and is no float then


def check_kind(key: str, kind: Any, value: Any) -> None:
    """Check the value of a field against its annotation.

    Args:
        kind: a Literal, int, float or bool; with None, None or a count.

    Raises:
        ConfigError: it is of another kind, or out of range.
    """
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(key, "unknown", found=value, wanted=" | ".join(get_args(kind)))
    elif kind is int or (NoneType in get_args(kind) and value is not None):
        if type(value) is not int or value < 1:
            raise ConfigError(key, "not a count", found=value, wanted="an integer above 0")
    elif kind is bool and type(value) is not bool:
        raise ConfigError(key, "not a boolean", found=value, wanted="true | false")
    elif kind is float and not (
        isinstance(value, int | float) and type(value) is not bool and 0 <= value <= _LARGEST
    ):
        raise ConfigError(key, "not a number", found=value, wanted="0 or more")


def check_rope(spec: ModelSpec) -> None:
    """Check the numbers of rotary positions.

    Raises:
        ConfigError: one is out of range.
    """
    for name in ("rope_theta", "rope_theta_local", "rope_interpolation", "rope_scaling"):
        if not getattr(spec, name):
            raise ConfigError(f"model.{name}", "not above 0", found=0, wanted="1 or more")
    if spec.rope_scaling_low >= spec.rope_scaling_high:
        raise ConfigError(
            "model.rope_scaling_low",
            "is not below model.rope_scaling_high",
            found=spec.rope_scaling_low,
            wanted=f"less than {spec.rope_scaling_high:g}",
        )
