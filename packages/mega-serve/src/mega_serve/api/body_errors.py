"""Errors of pydantic in the words of all other messages: the field, the value found, the value wanted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pydantic_core import ErrorDetails

_WANTED_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "a string",
        "list_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
        "model_attributes_type": "an object",
    }
)
_RANGES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("above", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("below", "lt"),
    }
)
_SIZES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "too_short": ("at least", "min_length"),
        "too_long": ("at most", "max_length"),
        "string_too_short": ("at least", "min_length"),
        "string_too_long": ("at most", "max_length"),
    }
)
_MAX_SHOWN_CHARS: Final = 40
# what they hold is the user's text
_TEXT_FIELDS: Final = frozenset({"prompt", "prompts", "input", "messages", "instructions", "suffix"})


def describe_error(
    detail: ErrorDetails, path: Sequence[int | str], branch_errors: Iterable[ErrorDetails]
) -> str:
    """Return what is wrong with a field, without its name. No text that a model would read is quoted.

    Args:
        path: of the field, without branches of unions.
        branch_errors: the errors of the same field in the other branches of its union.
    """
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind in _WANTED_TYPES:
        wanted = dict.fromkeys(
            _WANTED_TYPES[error["type"]]
            for error in (detail, *branch_errors)
            if error["type"] in _WANTED_TYPES
        )
        return f"wrong type: found {_show(value, detail, path)}, wanted {' or '.join(wanted)}"
    if kind == "literal_error":
        wanted_values = context["expected"].replace(" or ", ", ").replace("'", '"')
        wanted_text = " | ".join(wanted_values.split(", "))
        return f"unknown value: found {_show(value, detail, path)}, wanted {wanted_text}"
    if kind in _RANGES:
        word, name = _RANGES[kind]
        return f"out of range: found {_show(value, detail, path)}, wanted {word} {context[name]:g}"
    if kind in _SIZES:
        word, name = _SIZES[kind]
        unit = "characters" if isinstance(value, str) else "items"
        limit = context[name]
        unit_wanted = unit[:-1] if limit == 1 else unit
        is_short = kind.endswith("short")
        what = "empty" if not value else "too short" if is_short else "too long"
        return f"{what}: found {len(value)} {unit}, wanted {word} {limit} {unit_wanted}"
    if kind == "finite_number":
        return f"wrong type: found {value}, wanted a finite number"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}: found {_show(value, detail, path)}"


def _show(value: Any, detail: ErrorDetails, path: Sequence[int | str]) -> str:
    """Return a value as JSON if it is short and no text, else its kind."""
    match value:
        case None | bool():
            return json.dumps(value)
        case int() if abs(value) >= 1 << 64:
            return "a number above 64 bits"
        case int() | float():
            return str(value)
        case str():
            is_scalar = path[:1] != [] and path[0] not in _TEXT_FIELDS
            is_scalar = is_scalar and not any(isinstance(part, int) for part in path)
            is_option = detail["type"] == "literal_error" or (
                is_scalar and detail["type"] in ("int_type", "float_type", "bool_type")
            )
            return json.dumps(value) if is_option and len(value) <= _MAX_SHOWN_CHARS else "a string"
        case list():
            return "a list"
        case _:
            return "an object"
