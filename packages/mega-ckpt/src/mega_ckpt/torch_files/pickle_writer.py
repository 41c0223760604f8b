"""Write a tree of plain values as a pickle of protocol 2, which torch and all Pythons since 2.3 read.

It may contain the types that `pickle_reader` returns: plain Python values, `Record`, `EnumMember`,
`GlobalName`, numpy arrays, and a `TensorHeader` for each tensor.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_ckpt.torch_files.pickle_reader import EnumMember, GlobalName, Record
from mega_ckpt.torch_files.sandbox.allowlist import STORAGES

_STORAGE_OF: Mapping[str, str] = MappingProxyType(
    {dtype: name for name, dtype in STORAGES.items() if name != "torch.storage.UntypedStorage"}
)


class _Code(bytes):
    """Opcodes that leave one value on the stack."""

    __slots__ = ()


def dumps(tree: Any, key: Callable[[TensorHeader], str]) -> bytes:
    """Return the pickle of a tree.

    Args:
        key: returns the storage key of a tensor; tensors with one key share a storage.

    Raises:
        TypeError: the tree contains another type.
    """
    return b"\x80\x02" + _Pickler(key).code(tree) + b"."


class _Pickler:
    def __init__(self, key: Callable[[TensorHeader], str]) -> None:
        self._key = key

    def code(self, value: Any) -> _Code:
        match value:
            case _Code():
                return value
            case None | bool():
                return _Code({None: b"N", True: b"\x88", False: b"\x89"}[value])
            case int():
                raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
                return _Code(b"J" + struct.pack("<i", value) if len(raw) < 5 else _long(raw))
            case float():
                return _Code(b"G" + struct.pack(">d", value))
            case GlobalName():
                return _name(value)
            case str():
                raw = value.encode("utf-8", "surrogatepass")
                return _Code(b"X" + struct.pack("<I", len(raw)) + raw)
            case bytes():
                return self._call("_codecs.encode", value.decode("latin-1"), "latin1")
            case list():
                return _Code(b"](" + self._codes(value) + b"e")
            case tuple():
                return _Code(b"(" + self._codes(value) + b"t")
            case set() | frozenset():
                return self._call("__builtin__.set", list(value))
            case dict():
                begin = self._call("collections.OrderedDict") if isinstance(value, OrderedDict) else b"}"
                return _Code(
                    begin + b"(" + self._codes(part for pair in value.items() for part in pair) + b"u"
                )
            case np.ndarray():
                return self._array(value)
            case TensorHeader():
                return self._tensor(value)
            case EnumMember():
                return self._call(value.enum, value.value)
            case Record() if value.args and not value.fields:
                return self._call(value.kind, *value.args)
            case Record():
                created = _name(value.kind) + self.code(value.args) + b"\x81"
                return self._with_state(_Code(created), value.fields)
        raise TypeError(f"a pickle of {type(value).__name__}")

    def _codes(self, values: Iterable[Any]) -> bytes:
        return b"".join(map(self.code, values))

    def _call(self, name: str, *arguments: Any) -> _Code:
        return _Code(_name(name) + self.code(arguments) + b"R")

    def _with_state(self, created: _Code, state: Any) -> _Code:
        return _Code(created + self.code(state) + b"b")

    def _array(self, array: np.ndarray) -> _Code:
        dtype = self._call("numpy.dtype", array.dtype.str[1:], False, True)
        order = (3, array.dtype.str[0], None, None, None, -1, -1, 0)
        state = (1, array.shape, self._with_state(dtype, order), False, array.tobytes())
        empty = self._call("numpy.core.multiarray._reconstruct", GlobalName("numpy.ndarray"), (0,), b"b")
        return self._with_state(empty, state)

    def _tensor(self, tensor: TensorHeader) -> _Code:
        numbers = 1
        strides = list[int]()
        for count in reversed(tensor.shape):
            strides.insert(0, numbers)
            numbers *= max(1, count)
        persistent_id = (
            "storage",
            GlobalName(_STORAGE_OF[tensor.dtype]),
            self._key(tensor),
            "cpu",
            math.prod(tensor.shape),
        )
        storage = _Code(self.code(persistent_id) + b"Q")
        hooks = OrderedDict[Any, Any]()
        make = "torch._utils._rebuild_tensor_v2"
        return self._call(make, storage, 0, tensor.shape, tuple(strides), False, hooks)


def _name(name: str) -> _Code:
    module, _, last = name.rpartition(".")
    return _Code(f"c{module}\n{last}\n".encode())


def _long(raw: bytes) -> bytes:
    return (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw))) + raw
