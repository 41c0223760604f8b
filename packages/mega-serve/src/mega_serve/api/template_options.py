"""The variables of a chat template that a client may set, and the rendering of a client's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mega_schema.errors import RequestError
from mega_serve.api.bodies import Body
from mega_serve.api.chat_messages import ChatMessage, ChatTool
from mega_serve.api.chat_templates import ChatTemplate
from mega_serve.http.errors import HttpError


class TemplateOptions(Body):
    """vLLM's `chat_template_kwargs`: the known ones. A template, or a program, is never among them."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None


async def render_messages(
    template: ChatTemplate | None,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[ChatTool] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    options: TemplateOptions | None = None,
) -> tuple[str, list[int]]:
    """Return the text and the ids of a conversation.

    Raises:
        HttpError: 400, the checkpoint has no template.
        RequestError: as `ChatTemplate.encode`, or the flags exclude each other.
    """
    if template is None:
        hint = "start the server with --chat-template FILE, or send a prompt to /v1/completions"
        message = f"the model's checkpoint has no chat template; hint: {hint}"
        raise HttpError(400, message, param="messages", code="chat_template_missing")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message", "excludes add_generation_prompt", hint='"add_generation_prompt": false'
        )
    return await template.encode(
        [message.for_template(position) for position, message in enumerate(messages)],
        tools=[tool.as_dict() for tool in tools] or None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        options=None if options is None else options.model_dump(exclude_none=True),
    )
