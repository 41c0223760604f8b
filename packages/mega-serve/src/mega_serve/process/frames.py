"""Frames between processes: four bytes of length, big-endian, then a JSON value.

The socket to the engine is one half of a `socketpair` that the child inherits: it has no path and no port, so
nobody else can connect. The ranks of a model use the same frames. Nothing is unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import orjson

# a request of the largest context with the scores of all its tokens takes a tenth of it
MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The other process sent bytes that are no frame: one of the two is broken."""


def encode_frame(value: object, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return the value as a frame. Dataclasses are written as JSON objects.

    Args:
        default: replaces values of other classes by JSON values.

    Raises:
        FrameError: the value is no JSON value, or too long.
    """
    try:
        body = orjson.dumps(value, default)
    except TypeError as error:  # orjson.JSONEncodeError is one; the text may hold a lone surrogate
        raise FrameError(f"a value cannot be sent: {error}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body):,} bytes is above the limit of {MAX_FRAME_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cut a stream of bytes into the values of its frames.

    Args:
        max_bytes: longest frame accepted. The length is checked before any of the frame is stored.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the values of the frames that `data` completes.

        Raises:
            FrameError: a length above the limit, or a body that is not JSON.
        """
        self._buffer += data
        values = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > self._max_bytes:
                raise FrameError(f"a frame of {size:,} bytes is above the limit of {self._max_bytes:,}")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                values.append(_parse_body(view[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return values

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._buffer)


def _parse_body(body: memoryview) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise FrameError(f"a frame is not JSON: {error}") from None
    finally:
        body.release()
