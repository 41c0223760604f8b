"""Tool calls that a grammar forces: the grammar of the tools, and a parser of the streamed text.

The text is JSON, without blanks between its parts: {"name":"f","arguments":{...}}, or a list of such objects
where several calls are allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from mega_schema.errors import RequestError
from mega_serve.engine.json_whitespace import without_blanks
from mega_serve.engine.requests import GrammarSpec

MAX_CALLS: Final = 16
# from the beginning of the text, or from the end of a call, to the arguments of the next
_HEAD: Final = re.compile(r'[\s,\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
# text of a head without a match: not a call, and not to be searched again and again
_MAX_HEAD_CHARS: Final = 4096


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call.

    Attributes:
        index: number of the call in the answer.
        name: of the function, in the first delta of a call; None in the others.
        arguments: JSON text to append to the call's arguments.
    """

    index: int
    name: str | None
    arguments: str


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any], *, parallel: bool = False
) -> GrammarSpec:
    """Return the grammar of a text that calls the tools.

    Args:
        tools: OpenAI's form: {"type": "function", "function": {"name": ..., "parameters": JSON schema}}.
        tool_choice: "required", or a tool by name: {"type": "function", "function": {"name": ...}}.
        parallel: allow up to MAX_CALLS calls, as a list.

    Raises:
        RequestError: there is no tool, or none of this name.
    """
    functions = [tool["function"] for tool in tools]
    if isinstance(tool_choice, Mapping):
        name = tool_choice["function"]["name"]
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            wanted = " | ".join(str(tool["function"]["name"]) for tool in tools)
            raise RequestError("tool_choice", "no such tool", found=repr(name), wanted=wanted)
    elif tool_choice != "required":
        wanted = '"required" or a tool by name'
        raise RequestError("tool_choice", "has no grammar", found=repr(tool_choice), wanted=wanted)
    if not functions:
        raise RequestError("tools", "empty", wanted="at least one tool")
    definitions: dict[str, Any] = {}
    calls = [_call_schema(i, function, definitions) for i, function in enumerate(functions)]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if parallel:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_CALLS}
    if definitions:
        schema["$defs"] = definitions
    # without blanks, which a weak model could repeat until the length limit
    return GrammarSpec(kind="json_schema", text=json.dumps(without_blanks(schema)), param="tools")


def _call_schema(index: int, function: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call; definitions of its parameters move to `definitions`."""
    parameters = function.get("parameters") or {"type": "object", "additionalProperties": False}
    parameters = _move_references(parameters, f"tool{index}_")
    for key in ("$defs", "definitions"):
        for name, definition in parameters.pop(key, {}).items():
            definitions[f"tool{index}_{name}"] = definition
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _move_references(schema: Any, prefix: str) -> Any:
    """Return the schema with references to its own definitions renamed."""
    if isinstance(schema, list):
        return [_move_references(value, prefix) for value in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _move_references(value, prefix) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str):
        moved["$ref"] = re.sub(r"^#/(\$defs|definitions)/", lambda _: f"#/$defs/{prefix}", reference)
    return moved


class _State(Enum):
    HEAD = "head"
    ARGUMENTS = "arguments"
    TAIL = "tail"
    DONE = "done"


class ToolCallParser:
    """Reads tool calls from a text that arrives in parts.

    Text that is not a call is ignored: a grammar excludes it, but for the end that a length limit cuts off.
    """

    def __init__(self) -> None:
        self._state = _State.HEAD
        self._head = ""
        self._index = -1
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._is_scalar = False

    @property
    def calls(self) -> int:
        """Number of calls that have begun."""
        return self._index + 1

    @property
    def is_complete(self) -> bool:
        """Whether the text is between two calls or behind the last one."""
        return self.calls > 0 and self._state is _State.HEAD and not self._head.strip("], \t\r\n")

    def append(self, text: str) -> list[ToolCallDelta]:
        """Return what the text adds to calls; at most one delta of each call."""
        deltas = list[ToolCallDelta]()
        while text:
            if self._state is _State.HEAD:
                name, text = self._read_head(text)
                if name is not None:
                    deltas.append(ToolCallDelta(self._index, name, ""))
            elif self._state is _State.ARGUMENTS:
                size = self._count_arguments(text)
                _add_arguments(deltas, self._index, text[:size])
                text = text[size:]
            elif self._state is _State.TAIL:
                end = text.find("}") + 1
                text = text[end:] if end else ""
                self._state = _State.HEAD if end else _State.TAIL
            else:
                break
        return deltas

    def _read_head(self, text: str) -> tuple[str | None, str]:
        """Return the name of a call whose arguments begin in the text, and the text from there."""
        self._head += text
        match = _HEAD.match(self._head)
        if match is None:
            if len(self._head) > _MAX_HEAD_CHARS:
                self._state = _State.DONE
            return None, ""
        rest = self._head[match.end() :]
        self._head = ""
        self._index += 1
        self._state = _State.ARGUMENTS
        self._is_scalar = rest[0] not in '{["'
        return json.loads(match[1], strict=False), rest

    def _count_arguments(self, text: str) -> int:
        """Return how many characters belong to the arguments; at their end, enter the next state."""
        for i, char in enumerate(text):
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_string = False
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif self._is_scalar and char in "},":
                self._state = _State.TAIL
                return i
            elif char in "}]":
                self._depth -= 1
            else:
                continue
            if self._depth == 0 and not self._is_string:
                self._state = _State.TAIL
                return i + 1
        return len(text)


def _add_arguments(deltas: list[ToolCallDelta], index: int, arguments: str) -> None:
    if not arguments:
        return
    if deltas and deltas[-1].index == index:
        deltas[-1] = ToolCallDelta(index, deltas[-1].name, deltas[-1].arguments + arguments)
    else:
        deltas.append(ToolCallDelta(index, None, arguments))
