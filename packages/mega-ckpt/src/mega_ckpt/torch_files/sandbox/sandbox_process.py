"""The process that reads pickles: it opens no file, and forks a process for each.

It receives one socket per file. The forked process requests the file's bytes over it (MORE; the reply is
their count and the bytes, none at the end), and sends the result: ANSWER, a length and a JSON object,

    {"values": [...], "storages": {key: [type, numbers]}, "end": bytes taken}     or
    {"refused": what, "found": value}      or
    {"broken": what Python says of it}

in which null, booleans, numbers and strings are JSON values, and any other value is a list that begins with
its type:

    list, tuple, set    items
    dict                a key, its value, the next key, ...; of equal keys the last one counts
    int                 hexadecimal digits of an integer beyond 64 bits
    bytes               base64
    name                of a global that is only named, as torch.float32
    record              class, arguments, state
    storage             key, type of its numbers, first number
    tensor              the same, shape, strides, counted in numbers
    array               numpy's type, shape, whether in Fortran's order, base64
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from mega_ckpt.torch_files.sandbox.stubs import DictItems, GlobalName, RefusedError, Stub
from mega_ckpt.torch_files.sandbox.unpickler import BROKEN, PickleStream, StubUnpickler

MORE, ANSWER = b"M", b"A"
ORDER = struct.Struct("<BQ")  # maximum pickles of a file, and their maximum bytes
SECONDS = 120  # CPU time for one file
LONGEST = 1 << 28  # approximate bytes of an answer
_ROOM, _TIMES = 1 << 20, 1 << 10  # bytes allowed for every answer, and for each byte of the pickle
_VALUE = 32  # bytes counted for each value of an answer, besides its text
_FOUND = 200  # characters shown of a refused value
_DEEPEST = 100  # nested lists; a recursive list exceeds any depth
_WHOLE = range(-(1 << 63), 1 << 64)  # integers that fit in 64 bits


class JsonEncoder:
    """Encodes values as JSON, with limits on their size and depth.

    A value is written at each reference to it, so a short pickle may have a long answer.
    """

    def __init__(self, room: int) -> None:
        self._room = self._left = room

    def encode(self, value: Any, depth: int = 0) -> Any:
        self._spend(_VALUE)
        if depth > _DEEPEST:
            raise RefusedError("the pickle has lists in lists too deep", f"more than {_DEEPEST}")
        if value is None or type(value) in (bool, float):
            return value
        if type(value) is int:
            return value if value in _WHOLE else ["int", self._text(f"{value:x}")]
        if type(value) is str:
            return self._text(value)
        if type(value) is bytes:
            return ["bytes", self._base64(value)]
        if type(value) is GlobalName:
            return ["name", self._text(value)]
        if type(value) is Stub and value.tag == "array":
            *kind, raw = value.parts
            return ["array", *self._encode_all(kind, depth), self._base64(raw)]
        if type(value) is Stub:
            return [value.tag, *self._encode_all(value.parts, depth)]
        if type(value) is DictItems:
            return ["dict", *self._encode_all(value.items, depth)]
        return ["list" if type(value) is list else "tuple", *self._encode_all(value, depth)]

    def _encode_all(self, values: Any, depth: int) -> list[Any]:
        return [self.encode(value, depth + 1) for value in values]

    def _text(self, text: str) -> str:
        self._spend(len(text))
        return str(text)

    def _base64(self, raw: bytes) -> str:
        self._spend(2 * len(raw))
        return base64.b64encode(raw).decode("ascii")

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise RefusedError("the pickle is too large", f"more than {self._room} bytes when written out")


def read_pickles(source: PickleStream, pickles: int, size: int) -> bytes:
    """Read consecutive pickles of at most `size` bytes and return their values as JSON."""
    try:
        storages = dict[str, tuple[str, int]]()
        values = []
        for _ in range(pickles):
            value = StubUnpickler(source, storages).load()
            values.append(JsonEncoder(min(LONGEST, _ROOM + _TIMES * source.end)).encode(value))
        return json.dumps({"values": values, "storages": storages, "end": source.end}).encode("ascii")
    except RefusedError as error:
        reply = {"refused": error.what, "found": str(error.found)[:_FOUND]}
    except MemoryError:
        reply = {
            "refused": "the pickle takes too much memory to read",
            "found": f"more than {memory_limit(size)} bytes",
        }
    except BROKEN as error:
        reply = {"broken": f"{type(error).__name__} {error}"[:_FOUND]}
    return json.dumps(reply).encode("ascii")


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes.

    Raises:
        EOFError: the other side closed the connection.
    """
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main() -> NoReturn:
    """Serve the parent process over the socket whose descriptor is the last command-line argument."""
    listen = socket.socket(fileno=int(sys.argv[-1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit codes are not collected
    with contextlib.suppress(AttributeError, OSError):  # not on Linux, or not permitted
        ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET: no network
    for codec in ("latin-1", "raw-unicode-escape"):
        codecs.lookup(codec)  # imports its module while files can be opened
    while True:
        order, descriptors, _, _ = socket.recv_fds(listen, ORDER.size, 1)
        if not order:
            os._exit(0)
        if os.fork() == 0:
            listen.close()
            pickles, size = ORDER.unpack(order)
            limit_process(size)
            _serve(socket.socket(fileno=descriptors[0]), pickles, size)
        os.close(descriptors[0])


def memory_limit(size: int) -> int:
    """Return the memory limit of the process that reads pickles of `size` bytes."""
    return min(2 << 30, (1 << 28) + 128 * size)


def limit_process(size: int) -> None:
    """Set the resource limits of the process that reads pickles of `size` bytes."""
    limits = {
        resource.RLIMIT_AS: memory_limit(size),
        resource.RLIMIT_CPU: SECONDS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 0,  # no file and no socket besides the open one
        resource.RLIMIT_NPROC: 0,
    }
    for kind, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):  # not every system has all limits
            resource.setrlimit(kind, (limit, limit))


def _serve(connection: socket.socket, pickles: int, size: int) -> NoReturn:
    def read_next() -> bytes:
        connection.sendall(MORE)
        return receive(connection, struct.unpack("<I", receive(connection, 4))[0])

    gc.disable()  # the process ends soon; garbage collection would take a third of its time
    try:
        text = read_pickles(PickleStream(read_next), pickles, size)
        connection.sendall(ANSWER + struct.pack("<Q", len(text)) + text)
    finally:
        os._exit(0)
