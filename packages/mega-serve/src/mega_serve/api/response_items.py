"""The items of /v1/responses: what clients send, and what the server returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mega_schema.errors import RequestError
from mega_serve.api.bodies import Body
from mega_serve.api.chat_messages import (
    CalledFunction,
    ChatMessage,
    ChatTool,
    FunctionTool,
    NamedFunction,
    NamedToolChoice,
    TextPart,
    ToolCall,
    ToolChoice,
    ToolName,
)
from mega_serve.api.sampling_fields import (
    JsonSchemaFormat,
    ResponseFormat,
    TagFormat,
    TagStructures,
    TagTriggers,
)

ItemId = Annotated[str, Field(max_length=256)] | None
Status = Literal["in_progress", "completed", "incomplete"] | None


class InputItem(Body):
    """A message, a call of a function, or its result. Its type says which fields it needs."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: ItemId = None
    status: Status = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    call_id: ItemId = None
    name: ToolName | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None

    def as_message(self, position: int) -> ChatMessage:
        """Return the item as a message of a chat.

        Raises:
            RequestError: a field that its type needs is missing.
        """
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }[self.type]
        for name in needed:
            if getattr(self, name) is None:
                raise RequestError(f"input.{position}.{name}", "missing", wanted=f"as in every {self.type}")
        if self.type == "function_call_output":
            return ChatMessage(role="tool", content=self.output, tool_call_id=self.call_id)
        if self.type == "function_call":
            function = CalledFunction(name=self.name or "", arguments=self.arguments or "")
            return ChatMessage(role="assistant", tool_calls=[ToolCall(id=self.call_id, function=function)])
        return ChatMessage(role=self.role or "user", content=self.content)


class ResponsesTool(FunctionTool):
    """A function, in the flat form of /v1/responses."""

    type: Literal["function"]

    def as_chat_tool(self) -> ChatTool:
        """Return the tool in the form of a chat."""
        values = self.model_dump(exclude={"type"})
        return ChatTool(type="function", function=FunctionTool(**values))


class ResponsesToolChoice(Body):
    """The choice of one function that must be called."""

    type: Literal["function"]
    name: ToolName


class TextFormat(Body):
    """The format of the text, in the flat form of /v1/responses."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    name: Annotated[str, Field(max_length=256)] | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None
    structures: TagStructures | None = None
    triggers: TagTriggers | None = None
    format: TagFormat | None = None

    def as_response_format(self) -> ResponseFormat:
        """Return the format as chats have it.

        Raises:
            RequestError: the format lacks a field.
        """
        has_parts = self.structures is not None and self.triggers is not None
        if self.type == "structural_tag" and not has_parts and self.format is None:
            name = "structures" if self.structures is None else "triggers"
            raise RequestError(f"text.format.{name}", "missing", wanted="a list")
        if self.type != "json_schema":
            return ResponseFormat(
                type=self.type, structures=self.structures, triggers=self.triggers, format=self.format
            )
        if self.schema_ is None:
            raise RequestError("text.format.schema", "missing", wanted="a JSON schema")
        json_schema = JsonSchemaFormat(name=self.name or "schema", schema=self.schema_)
        return ResponseFormat(type="json_schema", json_schema=json_schema)


def name_text_field(param: str) -> str:
    """Return the name in /v1/responses of a field of chats."""
    return param.replace("response_format.json_schema", "text.format").replace(
        "response_format", "text.format"
    )


class TextOptions(Body):
    """The field `text`."""

    format: TextFormat | None = None


def as_tool_choice(choice: str | ResponsesToolChoice | None) -> ToolChoice | None:
    """Return the choice in the form of a chat."""
    if isinstance(choice, ResponsesToolChoice):
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return choice  # type: ignore[return-value]  # the model of the body allows these strings only


def merge_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join the calls of an assistant, each in its own item, into one message, as templates expect."""
    merged: list[ChatMessage] = []
    for message in messages:
        if message.tool_calls and merged and merged[-1].role == "assistant":
            calls = [*(merged[-1].tool_calls or ()), *message.tool_calls]
            merged[-1] = merged[-1].model_copy(update={"tool_calls": calls})
        else:
            merged.append(message)
    return merged


def message_item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an item with a message of the assistant."""
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(item_id: str, status: str, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return an item with a call of a function."""
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }
