"""Keys of values in nested objects: "meta.text" is "text" in the object "meta".

A key that an object has as it is written, with its dots, has priority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value under a key.

    Raises:
        KeyError: there is none.
        TypeError: `values` is no object.
    """
    try:
        return values[key]
    except KeyError:
        value: Any = values
        for part in key.split("."):
            if not isinstance(value, Mapping):
                raise KeyError(key) from None
            value = value[part]
        return value


def value_getter(key: str) -> Callable[[Any], Any]:
    """Return a function that does `value_at` of one key, as fast as an index if the key has no dot."""
    if "." not in key:
        return itemgetter(key)
    return lambda values: value_at(values, key)


def value_or_none(values: Mapping[str, Any], key: str) -> Any:
    """Return the value under a key, or None."""
    try:
        return value_at(values, key)
    except KeyError:
        return None


def replace_value(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of the object with another value under a key; other objects in it are shared."""
    head, dot, rest = key.partition(".")
    inner = values.get(head)
    if not dot or key in values or not isinstance(inner, Mapping):
        return {**values, key: value}
    return {**values, head: replace_value(inner, rest, value)}
