"""The messages and tools of chat requests, as clients send them and as templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mega_schema.errors import RequestError
from mega_serve.api.bodies import Body

ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]


class TextPart(Body):
    """A part of a message. Images, sound and files are refused: the server parses no media."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class CalledFunction(Body):
    """The function of a call in a message of the assistant; its arguments are JSON text."""

    name: ToolName
    arguments: str


class ToolCall(Body):
    """A call in a message of the assistant."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=1024)] | None = None


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    def for_template(self, position: int) -> dict[str, Any]:
        """Return the message as templates expect it: text content, arguments as an object.

        Raises:
            RequestError: arguments are not a JSON object, or a user's message has no content.
        """
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        if content is None and not self.tool_calls:
            if self.role != "assistant":
                raise RequestError(f"messages.{position}.content", "missing", wanted="text")
            content = self.refusal or ""
        # templates know no developer, whose instructions replaced the system's in OpenAI's API
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = content
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [
                _call_for_template(call, f"messages.{position}.tool_calls.{number}.function.arguments")
                for number, call in enumerate(self.tool_calls)
            ]
        return message


class FunctionTool(Body):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Body):
    """A tool of a chat request."""

    type: Literal["function"]
    function: FunctionTool

    def as_dict(self) -> dict[str, Any]:
        """Return the tool as templates and the grammar expect it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {
            "type": "function",
            "function": {"parameters": {"type": "object", "properties": {}}, **function},
        }


class NamedFunction(Body):
    """The name of a function."""

    name: ToolName


class NamedToolChoice(Body):
    """The choice of one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def check_tool_choice(tools: Sequence[ChatTool], choice: ToolChoice | None) -> str:
    """Return "none", "auto", "required", or the name of the function that must be called.

    Raises:
        RequestError: the choice needs tools that the request lacks, or two tools have one name.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools", "two functions have one name", wanted="distinct names")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            wanted = ", ".join(names) or "a function of tools"
            raise RequestError("tool_choice", "no such function", found=name, wanted=wanted)
        return name
    if choice == "required" and not tools:
        raise RequestError("tool_choice", "no tools", found="required", hint="add tools")
    return choice or ("auto" if tools else "none")


def _call_for_template(call: ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(where, "not JSON", wanted="the text of a JSON object")
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({"id": call.id} if call.id else {})}
