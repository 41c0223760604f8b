"""Validate JSON against the JSON Schema of a result, without a library.

Implements the keywords of `result.schema.json` only; an unknown keyword is an error, so that no rule of the
schema is ignored. The tests compare it with the `jsonschema` library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_TYPES: Final = (
    ("object", dict),
    ("array", list),
    ("string", str),
    ("boolean", bool),
    ("null", type(None)),
)
_ANNOTATIONS: Final = frozenset(("$schema", "$id", "$defs", "title", "description", "format"))
_LENGTH_KEYWORDS: Final = frozenset(("minLength", "minItems", "minProperties"))


def find_violations(
    value: Any, schema: Any, root: Mapping[str, Any], where: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the path of each wrong value and what is wrong with it.

    Args:
        value: from a JSON parser.
        schema: the schema, or a part of it.
        root: the whole schema, for references.
        where: path of `value`, as "metrics.accuracy.value".
    """
    if isinstance(schema, bool):
        if not schema:
            yield where, "not allowed here"
        return
    for keyword, rule in schema.items():
        if keyword == "$ref":
            yield from find_violations(value, root["$defs"][rule.rpartition("/")[2]], root, where)
        elif keyword == "anyOf":
            if all(any(find_violations(value, choice, root)) for choice in rule):
                yield where, "has none of the allowed forms"
        elif keyword == "type":
            types = [rule] if isinstance(rule, str) else rule
            if not any(_has_type(value, name) for name in types):
                yield where, f"not {' or '.join(types)}"
        elif keyword == "const":
            if value != rule or isinstance(value, bool) != isinstance(rule, bool):
                yield where, f"not {rule}"
        elif keyword in ("minimum", "maximum"):
            if _has_type(value, "number") and (value < rule if keyword == "minimum" else value > rule):
                yield where, f"{'below' if keyword == 'minimum' else 'above'} {rule:g}"
        elif keyword in _LENGTH_KEYWORDS:
            if isinstance(value, str | list | dict) and len(value) < rule:
                yield where, f"shorter than {rule}"
        elif keyword == "pattern":
            if isinstance(value, str) and not re.search(rule, value):
                yield where, f"does not match {rule}"
        elif keyword not in _ANNOTATIONS:
            yield from _find_inside(keyword, value, schema, root, where)


def _find_inside(
    keyword: str, value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str
) -> Iterator[tuple[str, str]]:
    """Apply a keyword about members of an object or items of an array."""
    rule = schema[keyword]
    prefix = f"{where}." if where else ""
    if keyword == "required":
        if isinstance(value, dict):
            yield from ((f"{prefix}{name}", "missing") for name in rule if name not in value)
    elif keyword == "properties":
        if isinstance(value, dict):
            for name in rule.keys() & value.keys():
                yield from find_violations(value[name], rule[name], root, f"{prefix}{name}")
    elif keyword == "additionalProperties":
        if isinstance(value, dict):
            for name in value.keys() - schema.get("properties", {}).keys():
                yield from find_violations(value[name], rule, root, f"{prefix}{name}")
    elif keyword == "prefixItems":
        if isinstance(value, list):
            for index, (item, part) in enumerate(zip(value, rule, strict=False)):
                yield from find_violations(item, part, root, f"{where}[{index}]")
    elif keyword == "items":
        if isinstance(value, list):
            first = len(schema.get("prefixItems", ()))
            for index, item in enumerate(value[first:], first):
                yield from find_violations(item, rule, root, f"{where}[{index}]")
    else:
        raise AssertionError(f"the schema uses a keyword that is not implemented: {keyword}")


def _has_type(value: Any, name: str) -> bool:
    if name in ("number", "integer"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (name == "number" or value == int(value))
    return isinstance(value, dict(_TYPES)[name])
