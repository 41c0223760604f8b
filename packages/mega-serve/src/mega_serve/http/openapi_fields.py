"""The fields of a JSON schema as rows of a table: name, type with its limits, default, description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_NO_LIMIT: Final = 2**31 - 1  # of what an int32 holds


@dataclass(frozen=True, slots=True)
class FieldRow:
    """A field of a request.

    Attributes:
        name: its path; `[]` stands for each item of a list: `messages[].role`.
        default: as JSON; "" for none.
    """

    name: str
    type: str
    default: str
    description: str


def list_fields(schema: Mapping[str, Any], prefix: str = "") -> Iterator[FieldRow]:
    """Yield the fields of an object and of the objects in it. The schema has no references."""
    required = schema.get("required", ())
    for key, value in schema.get("properties", {}).items():
        name = prefix + key
        default = value.get("default")
        is_required = key in required and not prefix
        yield FieldRow(
            name,
            _describe_type(value),
            "required" if is_required else "" if default is None else json.dumps(default),
            next(filter(None, (part.get("description", "") for part in _branches(value))), ""),
        )
        for branch in _branches(value):
            items = branch.get("items")
            if isinstance(items, Mapping):
                for item in _branches(items):
                    yield from list_fields(item, f"{name}[].")
            yield from list_fields(branch, f"{name}.")


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schema and the branches of its unions, in depth."""
    branches = [schema]
    for key in ("anyOf", "oneOf"):
        for branch in schema.get(key, ()):
            branches += _branches(branch)
    return branches


def _describe_type(schema: Mapping[str, Any]) -> str:
    """Return the type in words, such as "string or list (at least 1 items) of integer"."""
    names = dict.fromkeys(filter(None, map(_describe_branch, _branches(schema))))
    return " or ".join(names) or "any"


def _describe_branch(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    kind = schema.get("type", "")
    kinds = [name for name in (kind if isinstance(kind, list) else [kind]) if name not in ("", "null")]
    if kinds == ["array"]:
        limits = _describe_limits(schema, "minItems", "maxItems", " items")
        return f"list{limits} of {_describe_type(schema.get('items', {}))}"
    names = " or ".join(kinds)
    if kinds == ["string"]:
        return names + _describe_limits(schema, "minLength", "maxLength", " characters")
    return names + _describe_limits(schema, "minimum", "maximum", "")


def _describe_limits(schema: Mapping[str, Any], low: str, high: str, unit: str) -> str:
    least, most, above = schema.get(low), schema.get(high), schema.get("exclusiveMinimum")
    if most is not None and most >= _NO_LIMIT:
        most = None
    if least is not None and least <= -_NO_LIMIT:
        least = None
    words = [
        "" if above is None else f"above {above:,g}",
        "" if least is None else f"at least {least:,g}",
        "" if most is None else f"at most {most:,g}",
    ]
    limits = (
        f"{least:,g} to {most:,g}"
        if least is not None and most is not None
        else " and ".join(filter(None, words))
    )
    return f" ({limits}{unit})" if limits else ""
