"""What the functions in a pickle make here: descriptions of tensors, arrays and objects, never the things."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any


class RefusedError(Exception):
    """What in the pickle is refused, and the value that is there."""

    def __init__(self, what: str, found: object) -> None:
        super().__init__(what, found)
        self.what, self.found = what, found


class Name(str):
    """Of a class or a function, with its module."""

    __slots__ = ()


class Pairs(list[Any]):
    """A dict: its keys and values in turn. Keys are not hashed, which takes as long as their author likes."""

    __slots__ = ()


class Tagged:
    """What is none of Python's plain values: a word for what it is, and its parts.

    set: items · record: class, arguments, state · dtype: numpy's code, byte order
    storage: key, type, first number · tensor: the same, shape, strides
    array: numpy's type, shape, whether in Fortran's order, bytes
    """

    __slots__ = ("parts", "tag")

    def __init__(self, tag: str, *parts: Any) -> None:
        self.tag, self.parts = tag, list(parts)


def _tagged(value: Any, tag: str) -> list[Any]:
    if type(value) is not Tagged or value.tag != tag:
        raise TypeError(f"no {tag}")
    return value.parts


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("no whole number")
    return value


def storage(kept: Any) -> tuple[str, str, int, Tagged]:
    """A storage from what torch keeps beside the pickle: its key, type, numbers, and what it is here."""
    word, type_, key, _, numbers, *view = kept
    if word != "storage" or type(type_) is not Name or type(key) is not str:
        raise RefusedError("the pickle keeps something else than a storage beside it", word)
    first = _number(view[0][1]) if view and view[0] is not None else 0
    return key, str(type_), _number(numbers), Tagged("storage", key, str(type_), first)


def _pairs(*arguments: Any) -> Pairs:
    """OrderedDict(items), Counter(dict) and defaultdict(factory, items)."""
    made = Pairs()
    for argument in arguments:
        if type(argument) is Pairs:
            made.extend(argument)
        elif type(argument) in (list, tuple):
            made.extend(part for key, value in argument for part in (key, value))
    return made


def items(of: Sequence[Any] = ()) -> Tagged:
    """A set."""
    return Tagged("set", *of)


def _bytes(raw: Any = b"", encoding: Any = "latin-1") -> bytes:
    if encoding not in ("latin-1", "latin1"):  # with others, text grows or is looked for among Python's files
        raise RefusedError("the pickle asks for an encoding that is not allowed", encoding)
    return raw if type(raw) is bytes else raw.encode("latin-1")


def _tensor(of: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tagged:
    key, type_, first = _tagged(of, "storage")
    return Tagged("tensor", key, type_, first + _number(offset), shape, strides)


def _typed_tensor(of: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tagged:
    """Its storage counts bytes; the type of its own numbers is the third of the rest."""
    made = _tensor(of, offset, shape, strides)
    made.parts[1] = rest[2]
    return made


def _parameter(data: Any, *_: Any) -> Any:
    _tagged(data, "tensor")
    return data


def _subclass(called: Any, _: Any, arguments: Any, *__: Any) -> Any:
    """A tensor of a subclass of Tensor, from the function that makes the tensor."""
    if type(called) is not Name or called not in _TENSORS:
        raise RefusedError("the pickle makes a tensor in a way that is not allowed", called)
    return _TENSORS[called](*arguments)


def _array(dtype: Any, shape: Any, fortran: bool, raw: Any) -> Tagged:
    code, order = _tagged(dtype, "dtype")
    return Tagged("array", order + code, shape, fortran, _bytes(raw))


def _instance(class_: Any, *_: Any) -> Tagged:
    if type(class_) is not Name:
        raise TypeError("no class")
    return Tagged("record", class_, (), None)


def _set_record(parts: list[Any], state: Any) -> None:
    parts[2] = state


def _set_array(parts: list[Any], state: Any) -> None:
    _, shape, dtype, fortran, raw = state
    parts[:] = _array(dtype, shape, fortran is True, raw).parts


def _set_dtype(parts: list[Any], state: Any) -> None:
    if any(part is not None for part in state[2:5]):
        raise RefusedError("the pickle has an array of numpy whose items have fields", parts[0])
    parts[1] = ">" if state[1] == ">" else "<"


def _set_tensor(parts: list[Any], state: Any) -> None:
    """Attributes that somebody hung on a tensor are not read."""


_TENSORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _typed_tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
    }
)
MAKERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **_TENSORS,
        "torch._tensor._rebuild_from_type": _subclass,
        "torch._tensor._rebuild_from_type_v2": _subclass,
        "torch.Size": lambda shape=(): tuple(shape),
        "collections.OrderedDict": _pairs,
        "collections.defaultdict": _pairs,
        "collections.Counter": _pairs,
        "builtins.set": items,
        "builtins.frozenset": items,
        "builtins.bytearray": _bytes,
        "_codecs.encode": _bytes,
        "copyreg._reconstructor": _instance,
        "numpy.dtype": lambda code, *_: Tagged("dtype", code, "<"),
        "numpy.core.multiarray._reconstruct": lambda *_: Tagged("array", "u1", (0,), False, b""),
        "numpy.core.multiarray.scalar": lambda dtype, raw: _array(dtype, (), False, raw),
        "numpy.core.numeric._frombuffer": lambda raw, dtype, shape, order: _array(
            dtype, shape, order == "F", raw
        ),
    }
)
# what may be given a state after it was made
STATES: Mapping[str, Callable[[list[Any], Any], None]] = MappingProxyType(
    {"record": _set_record, "array": _set_array, "dtype": _set_dtype, "tensor": _set_tensor}
)
