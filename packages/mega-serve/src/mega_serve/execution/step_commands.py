"""Commands of rank 0 to the other ranks of a model: JSON in a broadcast of bytes, never a pickle.

Every rank runs the same commands in the same order. A command is small: token ids, block tables and numbers;
activations travel as tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson
import torch
import torch.distributed as dist

from mega_serve.engine.interfaces import Chunk

_HEADER = 1  # int64 numbers before the bytes: their length
# one broadcast carries a command of up to this many bytes; a longer one takes a second
_INLINE_BYTES = 16 * 1024


class CommandChannel:
    """Broadcasts commands from rank 0 to all ranks of the process group.

    Args:
        group: a group of all ranks on CPUs (gloo). Its timeout must exceed the idle time of the server.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, is_source: bool) -> None:
        self.group = group
        self.is_source = is_source

    def send(self, command: dict[str, Any]) -> None:
        """Broadcast a command; only rank 0 calls it."""
        assert self.is_source
        body = orjson.dumps(command)
        first = torch.zeros(8 * _HEADER + _INLINE_BYTES, dtype=torch.uint8)
        first[:8] = torch.tensor([len(body)], dtype=torch.int64).view(torch.uint8)
        inline = body[:_INLINE_BYTES]
        first[8 : 8 + len(inline)] = torch.frombuffer(bytearray(inline), dtype=torch.uint8)
        dist.broadcast(first, 0, group=self.group)
        if len(body) > _INLINE_BYTES:
            rest = torch.frombuffer(bytearray(body[_INLINE_BYTES:]), dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self.group)

    def receive(self) -> dict[str, Any]:
        """Wait for the next command of rank 0."""
        assert not self.is_source
        first = torch.empty(8 * _HEADER + _INLINE_BYTES, dtype=torch.uint8)
        dist.broadcast(first, 0, group=self.group)
        length = int(first[:8].view(torch.int64))
        body = bytes(first[8 : 8 + min(length, _INLINE_BYTES)].numpy())
        if length > _INLINE_BYTES:
            rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self.group)
            body += bytes(rest.numpy())
        command: dict[str, Any] = orjson.loads(body)
        return command


def chunks_to_json(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    """Return chunks as JSON values."""
    return [
        {
            **{name: value for name, value in asdict(chunk).items() if not isinstance(value, Sequence)},
            "token_ids": [int(token) for token in chunk.token_ids],
            "pages": [int(page) for page in chunk.pages],
            "score": [int(token) for token in chunk.score],
        }
        for chunk in chunks
    ]


def chunks_from_json(values: Sequence[dict[str, Any]]) -> list[Chunk]:
    """Return the chunks that `chunks_to_json` wrote."""
    return [Chunk(**value) for value in values]
