"""A conversation with a chat model: its messages, and requests that continue it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mega_schema.atomic_io import atomic_write, write_text
from mega_schema.outputs import check_output, has_keys
from mega_serve.client.generation import CHAT_COMPLETIONS, Message, TokenUsage, stream_text
from mega_serve.client.http import ServerClient


@dataclass(slots=True)
class ChatSession:
    """The messages of a conversation.

    Attributes:
        system: the system message; "" has none.
        fields: of every request: model, sampling.
        messages: of user and assistant in turn.
    """

    system: str
    fields: Mapping[str, Any]
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages.clear()

    async def ask(self, client: ServerClient, text: str, usage: TokenUsage) -> AsyncGenerator[str]:
        """Send a message of the user and yield the pieces of the answer.

        If the iterator is closed early, the received part of the answer stays in the conversation. A message
        without any answer is removed again.

        Raises:
            ServerError: the request failed.
        """
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.request_messages, **self.fields}
        pieces: list[str] = []
        try:
            async with aclosing(stream_text(client, CHAT_COMPLETIONS, body, usage)) as deltas:
                async for delta, _ in deltas:
                    if delta.text:
                        pieces.append(delta.text)
                        yield delta.text
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    @property
    def request_messages(self) -> list[Message]:
        """Return the messages with the system message at the front."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def save(self, path: Path) -> None:
        """Write the messages as JSON, in the form of a request's body.

        Raises:
            ConfigError: the file exists and is not a saved conversation.
        """
        check_output("/save", path, "file", is_ours=has_keys(("messages",)))
        document = json.dumps({"messages": self.request_messages}, ensure_ascii=False, indent=1)
        with atomic_write(path) as partial:
            write_text(partial, document + "\n")
