"""Split the text of an assistant into content and tool calls, as it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mega_serve.api.engine_calls import new_id
from mega_serve.engine.requests import FinishReason
from mega_serve.engine.tool_calls import ToolCallDelta, ToolCallParser

CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"
ToolMode = Literal["text", "forced", "auto"]


def can_parse_calls(template: str) -> bool:
    """Whether the template tells the model to write its calls as JSON between <tool_call> tags (Hermes)."""
    return CALL_BEGIN in template and CALL_END in template and "tools" in template


@dataclass(slots=True)
class MessageDelta:
    """What an assistant's message gained."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


@dataclass(slots=True)
class CalledTool:
    """A call of a tool, as far as it has arrived."""

    call_id: str
    name: str
    arguments: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class AssistantOutput:
    """The message of one sequence.

    Args:
        mode: "forced": the whole text is calls, by grammar; "auto": calls stand between <tool_call> tags;
            "text": there are none.
    """

    def __init__(self, mode: ToolMode) -> None:
        self.mode = mode
        self.content = ""
        self.calls: list[CalledTool] = []
        self._parser = ToolCallParser()
        self._first_call = 0
        self._rest = ""
        self._is_in_call = False

    def append(self, text: str, *, is_last: bool) -> MessageDelta:
        """Return what the text adds to the message.

        Args:
            is_last: nothing follows; text that might have become a tag is content.
        """
        delta = MessageDelta()
        if self.mode == "text":
            delta.content = text
        elif self.mode == "forced":
            delta.calls = self._parser.append(text)
        else:
            self._split(text, delta, is_last)
        self.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                self.calls.append(CalledTool(new_id("call"), call.name))
            self.calls[call.index].arguments += call.arguments
        return delta

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return OpenAI's reason: "tool_calls" for a message that ended by itself and has calls."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    def message(self) -> dict[str, Any]:
        """Return OpenAI's message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.as_dict() for call in self.calls]
        return message

    def call_deltas(self, delta: MessageDelta) -> list[dict[str, Any]]:
        """Return OpenAI's stream objects of the calls in a delta."""
        parts = []
        for call in delta.calls:
            part: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
            if call.name is not None:
                part["id"] = self.calls[call.index].call_id
                part["type"] = "function"
                part["function"]["name"] = call.name
            parts.append(part)
        return parts

    def _split(self, text: str, delta: MessageDelta, is_last: bool) -> None:
        self._rest += text
        while True:
            tag = CALL_END if self._is_in_call else CALL_BEGIN
            before, found_tag, after = self._rest.partition(tag)
            if not found_tag:
                break
            self._add(before, delta)
            self._rest = after
            self._is_in_call = not self._is_in_call
            if self._is_in_call:
                self._first_call += self._parser.calls
                self._parser = ToolCallParser()
        tail = 0 if is_last else _tag_prefix(self._rest, tag)
        end = len(self._rest) - tail
        self._add(self._rest[:end], delta)
        self._rest = self._rest[end:]

    def _add(self, text: str, delta: MessageDelta) -> None:
        if not self._is_in_call:
            # a line break between the calls is no content
            has_calls = self.calls or delta.calls
            delta.content += text if text.strip() or not has_calls else ""
            return
        delta.calls += [
            ToolCallDelta(self._first_call + call.index, call.name, call.arguments)
            for call in self._parser.append(text)
        ]


def _tag_prefix(text: str, tag: str) -> int:
    """Return how many characters at the end of the text may be the beginning of the tag."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
