"""The pickle stack machine, with names in the place of objects."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from struct import Struct
from types import MappingProxyType
from typing import Any

from mega_ckpt.torch_files.sandbox.allowlist import CLASSES, VALUES
from mega_ckpt.torch_files.sandbox.stubs import (
    MAKERS,
    STATE_SETTERS,
    DictItems,
    GlobalName,
    RefusedError,
    Stub,
    set_stub,
    storage_stub,
)

# what Python raises for a program that no pickler wrote
BROKEN = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
_LATEST = 5  # protocol
_U8, _U16, _U32, _U64 = (Struct(f"<{letter}") for letter in "BHIQ")
_I32, _F64 = Struct("<i"), Struct(">d")
_LONGEST_LINE = 1 << 20  # bytes; the first protocol ends its texts with a line break
_RENAMED = MappingProxyType({"__builtin__": "builtins", "copy_reg": "copyreg"})


class PickleStream:
    """A byte stream that requests more as it is read.

    Args:
        more: the next of them, none at the end.
    """

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._have = b""
        self._at = 0
        self._before = 0

    @property
    def end(self) -> int:
        """The bytes read so far."""
        return self._before + self._at

    def take(self, count: int) -> bytes:
        begin = self._at
        if begin + count > len(self._have):
            self._gather(count)
            begin = 0
        self._at = begin + count
        return self._have[begin : self._at]

    def line(self) -> bytes:
        """Read up to the next line break and drop it."""
        while (end := self._have.find(b"\n", self._at)) < 0:
            if (had := len(self._have) - self._at) > _LONGEST_LINE:
                raise RefusedError("the pickle has a line that is too long", f"{had} bytes")
            self._gather(had + 1)
        text = self.take(end + 1 - self._at)
        return text[:-1]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self, form: Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def _gather(self, count: int) -> None:
        parts = [self._have[self._at :]]
        have = len(parts[0])
        while have < count:
            parts.append(self._more())
            have += len(parts[-1])
            if not parts[-1]:
                raise EOFError(f"the end, after {self.end + have} bytes")
        self._before, self._at, self._have = self.end, 0, b"".join(parts)


class Machine:
    """Runs pickles, one after another.

    Attributes:
        storages: key of every storage that was named: type and count of its numbers.
    """

    def __init__(self, source: PickleStream) -> None:
        self.source = source
        self.storages: dict[str, tuple[str, int]] = {}
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under each mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run the next pickle and return its value.

        Raises:
            RefusedError: it wants what is not allowed.
            one of BROKEN: it was cut off, or no pickler wrote it.
        """
        self._stack = []
        self._below = []
        self._memo = {}
        while (code := self.source.take(1)) != b".":
            if code not in _CODES:
                raise RefusedError("the pickle has an operation that is not allowed", repr(code))
            _CODES[code](self)
        (value,) = self._stack
        return value

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def drop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.above_mark()

    def duplicate(self) -> None:
        self.push(self._stack[-1])

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def above_mark(self) -> list[Any]:
        above, self._stack = self._stack, self._below.pop()
        return above

    def pop_many(self, count: int) -> list[Any]:
        begin = len(self._stack) - count
        if begin < 0:
            raise IndexError(begin)
        values = self._stack[begin:]
        del self._stack[begin:]
        return values

    def get(self, at: int) -> None:
        self.push(self._memo[at])

    def put(self, at: int) -> None:
        self._memo[at] = self._stack[-1]

    def memoize(self) -> None:
        self.put(len(self._memo))

    def protocol(self) -> None:
        if (number := self.source.byte()) > _LATEST:
            raise RefusedError(f"the pickle's protocol is later than {_LATEST}", number)

    def numbered(self, form: Struct) -> bytes:
        """Read a count, and as many bytes."""
        return self.source.take(self.source.number(form))

    def text(self, form: Struct) -> None:
        self.push(self.numbered(form).decode("utf-8", "surrogatepass"))

    def long(self, form: Struct) -> None:
        self.push(int.from_bytes(self.numbered(form), "little", signed=True))

    def old_text(self, raw: bytes) -> None:
        try:  # Python 2 had one type for text and bytes
            self.push(raw.decode("utf-8"))
        except UnicodeDecodeError:
            self.push(raw)

    def quoted(self) -> None:
        raw = self.source.line()
        if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
            raise ValueError("a text without quotes")
        self.old_text(raw[1:-1].decode("unicode_escape").encode("latin-1"))

    def decimal(self) -> None:
        line = self.source.line()
        truth = {b"00": False, b"01": True}
        self.push(truth[line] if line in truth else int(line))

    def name(self, module: str, name: str) -> GlobalName:
        """Return the name if it is allowed, in the spelling of the newest Python and the oldest numpy."""
        head, dot, rest = module.partition(".")
        full = f"{_RENAMED.get(head, head)}{dot}{rest}.{name}".replace("numpy._core.", "numpy.core.", 1)
        if full not in MAKERS and full not in CLASSES and full not in VALUES:
            raise RefusedError("the pickle asks for what is not allowed", f"{module}.{name}")
        return GlobalName(full)

    def name_in_lines(self) -> GlobalName:
        module = self.source.line().decode("utf-8")
        return self.name(module, self.source.line().decode("utf-8"))

    def name_on_stack(self) -> None:
        module, name = self.pop_many(2)
        if type(module) is not str or type(name) is not str:
            raise TypeError("a name that is not a text")
        self.push(self.name(module, name))

    def call(self, called: Any, arguments: Any) -> None:
        if type(called) is not GlobalName or type(arguments) is not tuple:
            raise TypeError("a call of what is not a name")
        if called in MAKERS:
            self.push(MAKERS[called](*arguments))
        elif called in CLASSES:
            self.push(Stub("record", called, arguments, None))
        else:
            raise RefusedError("the pickle calls what may only be named", called)

    def build(self) -> None:
        state = self.pop()
        target = self._stack[-1]
        if type(target) is DictItems:  # attributes of an OrderedDict: the versions of a module's layers
            return
        if type(target) is not Stub or target.tag not in STATE_SETTERS:
            raise TypeError("a state for what has none")
        STATE_SETTERS[target.tag](target.parts, state)

    def append(self, more: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError("items for what is not a list")
        self._stack[-1].extend(more)

    def add(self, more: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not Stub or target.tag != "set":
            raise TypeError("items for what is not a set")
        target.parts.extend(more)

    def set_items(self, more: list[Any]) -> None:
        if type(self._stack[-1]) is not DictItems or len(more) % 2:
            raise TypeError("keys and values for what is not a dict")
        self._stack[-1].extend(more)

    def dictionary(self) -> None:
        more = self.above_mark()
        self.push(DictItems())
        self.set_items(more)

    def persistent(self) -> None:
        key, type_, numbers, stub = storage_stub(self.pop())
        known = self.storages.setdefault(key, (type_, numbers))
        if known != (type_, numbers):
            raise RefusedError(
                "the pickle has two types or sizes of one storage", f"{known}, {type_, numbers}"
            )
        self.push(stub)


_CODES: Mapping[bytes, Callable[[Machine], Any]] = MappingProxyType(
    {
        b"\x80": Machine.protocol,
        b"\x95": lambda m: m.source.take(8),  # length of a frame, for read-ahead
        b"(": Machine.mark,
        b"0": Machine.drop,
        b"1": Machine.above_mark,
        b"2": Machine.duplicate,
        b"N": lambda m: m.push(None),
        b"\x88": lambda m: m.push(True),
        b"\x89": lambda m: m.push(False),
        b"I": Machine.decimal,
        b"L": lambda m: m.push(int(m.source.line().rstrip(b"L"))),
        b"F": lambda m: m.push(float(m.source.line())),
        b"J": lambda m: m.push(m.source.number(_I32)),
        b"K": lambda m: m.push(m.source.byte()),
        b"M": lambda m: m.push(m.source.number(_U16)),
        b"G": lambda m: m.push(m.source.number(_F64)),
        b"\x8a": lambda m: m.long(_U8),
        b"\x8b": lambda m: m.long(_U32),
        b"S": Machine.quoted,
        b"T": lambda m: m.old_text(m.numbered(_U32)),
        b"U": lambda m: m.old_text(m.numbered(_U8)),
        b"V": lambda m: m.push(m.source.line().decode("raw_unicode_escape")),
        b"X": lambda m: m.text(_U32),
        b"\x8c": lambda m: m.text(_U8),
        b"\x8d": lambda m: m.text(_U64),
        b"B": lambda m: m.push(m.numbered(_U32)),
        b"C": lambda m: m.push(m.numbered(_U8)),
        b"\x8e": lambda m: m.push(m.numbered(_U64)),
        b"\x96": lambda m: m.push(m.numbered(_U64)),
        b"]": lambda m: m.push([]),
        b"l": lambda m: m.push(m.above_mark()),
        b"a": lambda m: m.append([m.pop()]),
        b"e": lambda m: m.append(m.above_mark()),
        b"}": lambda m: m.push(DictItems()),
        b"d": Machine.dictionary,
        b"s": lambda m: m.set_items(m.pop_many(2)),
        b"u": lambda m: m.set_items(m.above_mark()),
        b")": lambda m: m.push(()),
        b"t": lambda m: m.push(tuple(m.above_mark())),
        b"\x85": lambda m: m.push(tuple(m.pop_many(1))),
        b"\x86": lambda m: m.push(tuple(m.pop_many(2))),
        b"\x87": lambda m: m.push(tuple(m.pop_many(3))),
        b"\x8f": lambda m: m.push(set_stub()),
        b"\x90": lambda m: m.add(m.above_mark()),
        b"\x91": lambda m: m.push(set_stub(m.above_mark())),
        b"g": lambda m: m.get(int(m.source.line())),
        b"h": lambda m: m.get(m.source.byte()),
        b"j": lambda m: m.get(m.source.number(_U32)),
        b"p": lambda m: m.put(int(m.source.line())),
        b"q": lambda m: m.put(m.source.byte()),
        b"r": lambda m: m.put(m.source.number(_U32)),
        b"\x94": Machine.memoize,
        b"c": lambda m: m.push(m.name_in_lines()),
        b"\x93": Machine.name_on_stack,
        b"R": lambda m: m.call(*m.pop_many(2)),
        b"\x81": lambda m: m.call(*m.pop_many(2)),
        b"b": Machine.build,
        b"i": lambda m: m.call(m.name_in_lines(), tuple(m.above_mark())),
        b"o": lambda m: m.call((made := m.above_mark())[0], tuple(made[1:])),
        b"Q": Machine.persistent,
    }
)
