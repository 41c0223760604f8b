"""The standard library's unpickler, with stubs instead of objects.

The base is `pickle._Unpickler`, the implementation in Python, which has a table of methods, one per opcode.
`pickle.Unpickler`, in C, builds real dicts and sets, and hashes keys that the file chooses: a pickle of 74
bytes takes minutes of CPU time (docs/adr/0030-the-standard-unpickler.md).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, ClassVar, Never

from mega_ckpt.torch_files.sandbox.allowlist import CLASSES, VALUES
from mega_ckpt.torch_files.sandbox.stubs import (
    MAKERS,
    STATE_SETTERS,
    DictItems,
    GlobalName,
    RefusedError,
    Stub,
    parts_of_stub,
    set_stub,
    storage_stub,
)

# exceptions that Python raises for a malformed pickle
BROKEN = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)
_LATEST = 5  # protocol
_LONGEST_LINE = 1 << 20  # bytes; the first protocol ends its texts with a line break
_RENAMED = MappingProxyType({"__builtin__": "builtins", "copy_reg": "copyreg"})

# Opcodes that keep the standard library's methods. These read numbers and texts, move values on the stack,
# and put them into lists and tuples. They call find_class, persistent_load, _decode_string and _instantiate,
# which StubUnpickler overrides.
_INHERITED = (
    *(pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP, pickle.STOP),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.INT, pickle.LONG, pickle.FLOAT, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.LONG4, pickle.BINFLOAT),
    *(pickle.STRING, pickle.BINSTRING, pickle.SHORT_BINSTRING),
    *(pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.INST, pickle.OBJ, pickle.BINPERSID),
)


class PickleStream:
    """A file object for an unpickler, which requests more bytes as it is read.

    Args:
        read_next: returns the next bytes; none at the end of the file.
    """

    def __init__(self, read_next: Callable[[], bytes]) -> None:
        self._read_next = read_next
        self._buffer = b""
        self._position = 0
        self._buffer_start = 0

    @property
    def end(self) -> int:
        """The bytes read so far."""
        return self._buffer_start + self._position

    def read(self, count: int) -> bytes:
        begin = self._position
        if begin + count > len(self._buffer):
            self._gather(count)
            begin = 0
        self._position = begin + count
        return self._buffer[begin : self._position]

    def readline(self) -> bytes:
        """Read up to and including the next line break."""
        while (end := self._buffer.find(b"\n", self._position)) < 0:
            if (rest := len(self._buffer) - self._position) > _LONGEST_LINE:
                raise RefusedError("the pickle has a line that is too long", f"{rest} bytes")
            self._gather(rest + 1)
        return self.read(end + 1 - self._position)

    def _gather(self, count: int) -> None:
        parts = [self._buffer[self._position :]]
        size = len(parts[0])
        while size < count:
            parts.append(self._read_next())
            size += len(parts[-1])
            if not parts[-1]:
                raise EOFError(f"the end, after {self.end + size} bytes")
        self._buffer_start = self.end
        self._position = 0
        self._buffer = b"".join(parts)


class Opcodes(dict[int, Callable[[Any], None]]):
    """The methods of the allowed opcodes."""

    def __missing__(self, code: int) -> Never:
        raise RefusedError("the pickle has an operation that is not allowed", repr(bytes([code])))


class StubUnpickler(pickle._Unpickler):
    """Reads one pickle and returns stubs of its objects.

    Args:
        storages: receives an entry for every storage that the pickle names: key, type and element count.
    """

    # the base class has no annotations
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, source: PickleStream, storages: dict[str, tuple[str, int]]) -> None:
        super().__init__(source)
        self._storages = storages

    def load(self) -> Any:
        """Read the pickle and return its value.

        Raises:
            RefusedError: the pickle requests something that is not allowed.
            one of BROKEN: it is truncated, or no pickler wrote it.
        """
        value = super().load()
        if self.stack:
            raise ValueError(f"{len(self.stack) + 1} values")
        return value

    def find_class(self, module: str, name: str) -> GlobalName:
        """Return the name if it is allowed, as spelled by the newest Python and the oldest numpy."""
        head, dot, rest = module.partition(".")
        full = f"{_RENAMED.get(head, head)}{dot}{rest}.{name}".replace("numpy._core.", "numpy.core.", 1)
        if full not in MAKERS and full not in CLASSES and full not in VALUES:
            raise RefusedError("the pickle names a global that is not allowed", f"{module}.{name}")
        return GlobalName(full)

    def persistent_load(self, pid: Any) -> Stub:
        key, type_, numbers, stub = storage_stub(pid)
        known = self._storages.setdefault(key, (type_, numbers))
        if known != (type_, numbers):
            raise RefusedError(
                "the pickle has two types or sizes of one storage", f"{known}, {type_, numbers}"
            )
        return stub

    def _decode_string(self, raw: bytes) -> str | bytes:
        try:  # Python 2 had one type for text and bytes
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw

    def _instantiate(self, called: Any, arguments: Iterable[Any]) -> None:
        self.append(_make(called, tuple(arguments)))

    def _load_proto(self) -> None:
        if (number := self.read(1)[0]) > _LATEST:
            raise RefusedError(f"the pickle's protocol is later than {_LATEST}", number)

    def _load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = _make(self.stack[-1], arguments)

    def _load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is DictItems:  # attributes of an OrderedDict: the versions of a module's layers
            return
        if type(target) is not Stub or target.tag not in STATE_SETTERS:
            raise TypeError("a state for what has none")
        STATE_SETTERS[target.tag](target.parts, state)

    def _load_dict(self) -> None:
        items = self.pop_mark()
        if len(items) % 2:
            raise TypeError("a key without a value")
        self.append(DictItems(items))

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(set_stub(items))  # to the stack below the mark: pop_mark has changed `append`

    def _load_additems(self) -> None:
        items = self.pop_mark()
        parts_of_stub(self.stack[-1], "set").extend(items)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = Opcodes(
        {
            **{opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _INHERITED},
            pickle.PROTO[0]: _load_proto,
            pickle.FRAME[0]: lambda self: self.read(8),  # its length, for read-ahead
            pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]],
            pickle.REDUCE[0]: _load_reduce,
            pickle.NEWOBJ[0]: _load_reduce,
            pickle.BUILD[0]: _load_build,
            pickle.EMPTY_DICT[0]: lambda self: self.append(DictItems()),
            pickle.DICT[0]: _load_dict,
            pickle.EMPTY_SET[0]: lambda self: self.append(set_stub()),
            pickle.FROZENSET[0]: _load_frozenset,
            pickle.ADDITEMS[0]: _load_additems,
        }
    )


def _make(called: Any, arguments: Any) -> Any:
    """Return the stub for the result of a call."""
    if type(called) is not GlobalName or type(arguments) is not tuple:
        raise TypeError("a call of what is not a name")
    if called in MAKERS:
        return MAKERS[called](*arguments)
    if called in CLASSES:
        return Stub("record", called, arguments, None)
    raise RefusedError("the pickle calls a global that may only be named", called)
