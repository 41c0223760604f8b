"""Inert stubs for the objects that a pickle builds: descriptions of tensors, arrays and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any


class RefusedError(Exception):
    """The pickle requests something that is not allowed; has the reason and the value found."""

    def __init__(self, what: str, found: object) -> None:
        super().__init__(what, found)
        self.what = what
        self.found = found


class GlobalName(str):
    """The dotted name of a class or a function."""

    __slots__ = ()


class DictItems:
    """A dict as alternating keys and values. Keys are not hashed: an attacker could make that slow."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.items = list(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items += (key, value)


class Stub:
    """A value that is not plain Python: a tag and its parts.

    set: items · record: class, arguments, state · dtype: numpy's code, byte order
    storage: key, type, first number · tensor: the same, shape, strides
    array: numpy's type, shape, whether in Fortran's order, bytes
    """

    __slots__ = ("parts", "tag")

    def __init__(self, tag: str, *parts: Any) -> None:
        self.tag = tag
        self.parts = list(parts)


def parts_of_stub(value: Any, tag: str) -> list[Any]:
    if type(value) is not Stub or value.tag != tag:
        raise TypeError(f"no {tag}")
    return value.parts


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("not an integer")
    return value


def storage_stub(persistent_id: Any) -> tuple[str, str, int, Stub]:
    """Parse torch's persistent id of a storage: key, type, count of numbers, and its stub."""
    word, type_, key, _, numbers, *view = persistent_id
    if word != "storage" or type(type_) is not GlobalName or type(key) is not str:
        raise RefusedError("the pickle refers to something other than a storage", word)
    first = _number(view[0][1]) if view and view[0] is not None else 0
    return key, str(type_), _number(numbers), Stub("storage", key, str(type_), first)


def _dict_stub(*arguments: Any) -> DictItems:
    """Build OrderedDict(items), Counter(dict) or defaultdict(factory, items)."""
    result = DictItems()
    for argument in arguments:
        if type(argument) is DictItems:
            result.items.extend(argument.items)
        elif type(argument) in (list, tuple):
            result.items.extend(part for key, value in argument for part in (key, value))
    return result


def set_stub(items: Sequence[Any] = ()) -> Stub:
    """Build a set."""
    return Stub("set", *items)


def _encode(raw: Any = b"", encoding: Any = "latin-1") -> bytes:
    if encoding not in ("latin-1", "latin1"):  # other encodings expand text, or import Python modules
        raise RefusedError("the pickle uses an encoding that is not allowed", encoding)
    return raw if type(raw) is bytes else raw.encode("latin-1")


def _tensor_stub(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Stub:
    key, type_, first = parts_of_stub(storage, "storage")
    return Stub("tensor", key, type_, first + _number(offset), shape, strides)


def _typed_tensor_stub(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Stub:
    """Build a tensor whose dtype is an argument; its storage counts bytes."""
    stub = _tensor_stub(storage, offset, shape, strides)
    stub.parts[1] = rest[2]
    return stub


def _parameter_stub(data: Any, *_: Any) -> Any:
    parts_of_stub(data, "tensor")
    return data


def _subclass_stub(called: Any, _: Any, arguments: Any, *__: Any) -> Any:
    """Build a tensor of a subclass of Tensor through the function that builds the tensor."""
    if type(called) is not GlobalName or called not in _TENSORS:
        raise RefusedError("the pickle builds a tensor in a way that is not allowed", called)
    return _TENSORS[called](*arguments)


def _array(dtype: Any, shape: Any, fortran: bool, raw: Any) -> Stub:
    code, order = parts_of_stub(dtype, "dtype")
    return Stub("array", order + code, shape, fortran, _encode(raw))


def _instance(class_: Any, *_: Any) -> Stub:
    if type(class_) is not GlobalName:
        raise TypeError("no class")
    return Stub("record", class_, (), None)


def _set_record(parts: list[Any], state: Any) -> None:
    parts[2] = state


def _set_array(parts: list[Any], state: Any) -> None:
    _, shape, dtype, fortran, raw = state
    parts[:] = _array(dtype, shape, fortran is True, raw).parts


def _set_dtype(parts: list[Any], state: Any) -> None:
    if any(part is not None for part in state[2:5]):
        raise RefusedError("the pickle has a numpy array with a structured dtype", parts[0])
    parts[1] = ">" if state[1] == ">" else "<"


def _set_tensor(parts: list[Any], state: Any) -> None:
    """Ignore extra attributes of a tensor."""


_TENSORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "torch._utils._rebuild_tensor": _tensor_stub,
        "torch._utils._rebuild_tensor_v2": _tensor_stub,
        "torch._utils._rebuild_tensor_v3": _typed_tensor_stub,
        "torch._utils._rebuild_parameter": _parameter_stub,
        "torch._utils._rebuild_parameter_with_state": _parameter_stub,
    }
)
MAKERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **_TENSORS,
        "torch._tensor._rebuild_from_type": _subclass_stub,
        "torch._tensor._rebuild_from_type_v2": _subclass_stub,
        "torch.Size": lambda shape=(): tuple(shape),
        "collections.OrderedDict": _dict_stub,
        "collections.defaultdict": _dict_stub,
        "collections.Counter": _dict_stub,
        "builtins.set": set_stub,
        "builtins.frozenset": set_stub,
        "builtins.bytearray": _encode,
        "_codecs.encode": _encode,
        "copyreg._reconstructor": _instance,
        "numpy.dtype": lambda code, *_: Stub("dtype", code, "<"),
        "numpy.core.multiarray._reconstruct": lambda *_: Stub("array", "u1", (0,), False, b""),
        "numpy.core.multiarray.scalar": lambda dtype, raw: _array(dtype, (), False, raw),
        "numpy.core.numeric._frombuffer": lambda raw, dtype, shape, order: _array(
            dtype, shape, order == "F", raw
        ),
    }
)
# stubs that accept a state after construction
STATE_SETTERS: Mapping[str, Callable[[list[Any], Any], None]] = MappingProxyType(
    {"record": _set_record, "array": _set_array, "dtype": _set_dtype, "tensor": _set_tensor}
)
