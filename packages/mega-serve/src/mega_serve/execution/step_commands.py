"""Commands of rank 0 to the other ranks of a model: JSON in a broadcast of bytes, never a pickle.

Every rank runs the same commands in the same order. A command is small: token ids, block tables and numbers;
activations travel as tensors. The process group is torch's default one; its timeout must exceed the idle time
of the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import torch
import torch.distributed as dist

from mega_serve.engine.interfaces import Chunk

_LENGTH_BYTES = 8  # an int64 before the body
# one broadcast carries a command of up to this many bytes; a longer one takes a second
_INLINE_BYTES = 16 * 1024


def send_command(command: Mapping[str, Any]) -> None:
    """Broadcast a command; only rank 0 calls it. Chunks in it become JSON objects."""
    body = orjson.dumps(command, default=list)  # block tables may be ranges
    first = torch.zeros(_LENGTH_BYTES + _INLINE_BYTES, dtype=torch.uint8)
    first[:_LENGTH_BYTES] = torch.tensor([len(body)], dtype=torch.int64).view(torch.uint8)
    inline = body[:_INLINE_BYTES]
    first[_LENGTH_BYTES : _LENGTH_BYTES + len(inline)] = torch.frombuffer(
        bytearray(inline), dtype=torch.uint8
    )
    dist.broadcast(first, 0)
    if len(body) > _INLINE_BYTES:
        dist.broadcast(torch.frombuffer(bytearray(body[_INLINE_BYTES:]), dtype=torch.uint8), 0)


def receive_command() -> dict[str, Any]:
    """Wait for the next command of rank 0."""
    first = torch.empty(_LENGTH_BYTES + _INLINE_BYTES, dtype=torch.uint8)
    dist.broadcast(first, 0)
    length = int(first[:_LENGTH_BYTES].view(torch.int64))
    body = bytes(first[_LENGTH_BYTES : _LENGTH_BYTES + min(length, _INLINE_BYTES)].numpy())
    if length > _INLINE_BYTES:
        rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8)
        dist.broadcast(rest, 0)
        body += bytes(rest.numpy())
    command: dict[str, Any] = orjson.loads(body)
    return command


def chunks_from_json(values: Sequence[dict[str, Any]]) -> list[Chunk]:
    """Return the chunks of a command."""
    return [Chunk(**value) for value in values]
