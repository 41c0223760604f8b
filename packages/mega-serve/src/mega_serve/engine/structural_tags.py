"""Structural tags: free text in which a trigger begins a structure, whose content follows a JSON schema.

The JSON form is vLLM's:

    {"structures": [{"begin": "<f=add>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}

After a trigger, the text is one of the structures whose `begin` starts with it; then it is free again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

MAX_STRUCTURES: Final = 128
MAX_TRIGGERS: Final = 32
MAX_CHARS: Final = 256  # of a trigger, a begin or an end
_FORM: Final = '{"structures": [{"begin", "schema", "end"}], "triggers": []}'


def write_structural_tag(text: str, json_options: Callable[[object], Mapping[str, Any]]) -> str:
    """Return a Lark grammar of llguidance's.

    A text is free up to the first trigger: a lazy lexeme ends where a trigger is complete, so no free text
    contains one.

    Args:
        text: the JSON form.
        json_options: returns llguidance's options of JSON for a schema, beside those of its "x-guidance".

    Raises:
        ValueError: the text does not have the form; the message names the part.
    """
    structures, triggers = _parse(text)
    bodies: list[list[str]] = [[] for _ in triggers]
    rules = []
    for number, (begin, schema, end) in enumerate(structures):
        # of two triggers, the shorter one is complete first
        matching = [index for index, trigger in enumerate(triggers) if begin.startswith(trigger)]
        if not matching:
            raise ValueError(f"structures.{number}.begin starts with no trigger")
        index = min(matching, key=lambda i: len(triggers[i]))
        bodies[index].append(f"structure_{number}")
        if isinstance(schema, dict):
            own = schema.get("x-guidance", {})
            if isinstance(own, dict):
                schema = {**schema, "x-guidance": {**json_options(schema), **own}}
        parts = (_quote(begin[len(triggers[index]) :]), f"%json {json.dumps(schema)}", _quote(end))
        rules.append(f"structure_{number}: {' '.join(part for part in parts if part)}")
    for index, (trigger, names) in enumerate(zip(triggers, bodies, strict=True)):
        if not names:
            raise ValueError(f"triggers.{index} begins no structure")
        rules += [
            f"tag_{index}: trigger_{index} ({' | '.join(names)})",
            f"trigger_{index}[lazy]: TEXT {_quote(trigger)}",
        ]
    tags = " | ".join(f"tag_{index}" for index in range(len(triggers)))
    return "\n".join(["%llguidance {}", f"start: ({tags})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _parse(text: str) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """Return (begin, schema, end) of each structure, and the triggers."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict) or value.keys() - {"type"} != {"structures", "triggers"}:
        raise ValueError(f"not of the form {_FORM}")
    triggers = [
        _short_text(trigger, f"triggers.{index}", least=1)
        for index, trigger in enumerate(_list(value["triggers"], "triggers", MAX_TRIGGERS))
    ]
    if len(set(triggers)) < len(triggers):
        raise ValueError("two triggers are equal")
    structures = []
    for index, structure in enumerate(_list(value["structures"], "structures", MAX_STRUCTURES)):
        name = f"structures.{index}"
        if not isinstance(structure, dict) or not {"begin", "end"} <= structure.keys() <= {
            "begin",
            "schema",
            "end",
        }:
            raise ValueError(f'{name} must have "begin" and "end", and may have "schema"')
        begin = _short_text(structure["begin"], f"{name}.begin", least=1)
        schema = structure.get("schema")
        end = _short_text(structure["end"], f"{name}.end", least=0)
        structures.append((begin, {} if schema is None else schema, end))
    return structures, triggers


def _list(value: object, name: str, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise ValueError(f"{name} must be a list of 1 to {most}")
    return value


def _short_text(value: object, name: str, *, least: int) -> str:
    if not isinstance(value, str) or not least <= len(value) <= MAX_CHARS:
        raise ValueError(f"{name} must be a text of {least} to {MAX_CHARS} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{name} has half of a surrogate pair")
    return value


def _quote(text: str) -> str:
    """Return the text as a string of Lark, or "" for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""
