"""Turn the engine's outputs into the events of /v1/responses, in OpenAI's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mega_serve.api.chat_output import AssistantOutput, MessageDelta
from mega_serve.api.context import ApiContext
from mega_serve.api.engine_calls import new_id
from mega_serve.api.logprobs import chat_logprobs
from mega_serve.api.openai_chat import ChatJob
from mega_serve.api.response_items import call_item, message_item, text_part
from mega_serve.api.usage import Usage
from mega_serve.engine.requests import FinishReason, SequenceOutput

Event = dict[str, Any]


class ResponseWriter:
    """The response of one sequence: a message, calls of functions, or both.

    Args:
        echo: fields of the response that repeat the request.
    """

    def __init__(self, context: ApiContext, job: ChatJob, echo: Mapping[str, Any]) -> None:
        self.tokenizer = context.tokenizer
        self.job = job
        self.echo = echo
        self.message = AssistantOutput(job.mode)
        self.output: list[dict[str, Any]] = []
        self.finish_reason: FinishReason | None = None
        self._sequence_number = 0
        self._is_open = False
        # of tokens whose text is held back: a part of a character, or perhaps the beginning of a call
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first item."""
        yield self._event("response.created", response=self.response(None))
        yield self._event("response.in_progress", response=self.response(None))

    def write(self, output: SequenceOutput) -> Iterator[Event]:
        """Yield the events of an output."""
        self.finish_reason = output.finish_reason
        delta = self.message.append(output.text, is_last=output.finish_reason is not None)
        if self.job.top is not None and output.logprobs:
            self._logprobs += chat_logprobs(self.tokenizer, output.logprobs, self.job.top)["content"]
        if delta.content:
            yield from self._write_text(delta.content)
        if delta.calls:
            self._logprobs.clear()
        yield from self._write_calls(delta)
        if self.finish_reason is not None:
            if not self.output:  # an empty answer is a message without text
                yield from self._open_message()
            if self._logprobs and self._has_open_message:
                yield from self._write_text("")
            yield from self._close_item()

    def end(self, usage: Usage) -> Event:
        """Return the last event."""
        kind = "response.incomplete" if self.finish_reason == "length" else "response.completed"
        return self._event(kind, response=self.response(usage))

    def response(self, usage: Usage | None) -> dict[str, Any]:
        """Return the response as far as it has come.

        Args:
            usage: None while it is in progress.
        """
        is_cut = self.finish_reason == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        return {
            **self.echo,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self.output),
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, kind: str, **values: Any) -> Event:
        number = self._sequence_number
        self._sequence_number += 1
        return {"type": kind, "sequence_number": number, **values}

    def _item_event(self, kind: str, **values: Any) -> Event:
        item = self.output[-1]
        return self._event(kind, item_id=item["id"], output_index=len(self.output) - 1, **values)

    @property
    def _has_open_message(self) -> bool:
        return self._is_open and self.output[-1]["type"] == "message"

    def _write_text(self, text: str) -> Iterator[Event]:
        logprobs, self._logprobs = self._logprobs, []
        if not self._has_open_message:
            yield from self._close_item()
            yield from self._open_message()
        part = self.output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _write_calls(self, delta: MessageDelta) -> Iterator[Event]:
        for gained in delta.calls:
            if gained.name is not None:
                yield from self._close_item()
                call_id = self.message.calls[gained.index].call_id
                yield from self._open(call_item(new_id("fc"), "in_progress", call_id, gained.name, ""))
            if gained.arguments:
                self.output[-1]["arguments"] += gained.arguments
                yield self._item_event("response.function_call_arguments.delta", delta=gained.arguments)

    def _open_message(self) -> Iterator[Event]:
        yield from self._open(message_item(new_id("msg"), "in_progress", []))
        part = text_part("", [])
        yield self._item_event("response.content_part.added", content_index=0, part=part)
        self.output[-1]["content"].append(text_part("", []))

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        self.output.append(item)
        self._is_open = True
        index = len(self.output) - 1
        yield self._event("response.output_item.added", output_index=index, item=_copy(item))

    def _close_item(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item["status"] = "incomplete" if self.finish_reason == "length" else "completed"
        if item["type"] == "message":
            part = item["content"][0]
            yield self._item_event(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            arguments, name = item["arguments"], item["name"]
            yield self._item_event("response.function_call_arguments.done", name=name, arguments=arguments)
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=_copy(item))


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
