"""Values in a file of `torch.save`, as `pickle_reader` builds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_schema.errors import FormatError

_NAMES = 1 << 27  # maximum characters of all tensor names


class GlobalName(str):
    """The dotted name of a global that the file refers to, such as torch.float32."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class EnumMember:
    """A member of an enum; `name` is empty if `allowlist.ENUMS` does not list it."""

    enum: str
    value: Any
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """An object of a class that is not imported.

    Attributes:
        kind: its class, with the module.
        args: arguments of its constructor.
        fields: its attributes; only "state" if its class has a custom pickle state.
    """

    kind: str
    args: tuple[Any, ...]
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PickleFile:
    """The content of a file."""

    file: Path
    tree: Any

    def entry(self, name: str) -> Any:
        """Return the value under a dotted name; keys may contain dots, and attributes count as keys.

        Raises:
            FormatError: there is none.
        """
        matches = list(_lookup(self.tree, name))
        if not matches:
            raise FormatError(self.file, "has no such entry", wanted=name)
        return matches[0]

    def tensors(self) -> dict[str, MappedTensor]:
        """Return every tensor under its dotted name.

        Raises:
            FormatError: the names are too long in total.
        """
        tensors = dict[str, MappedTensor]()
        characters = 0
        for keys, tensor in _tensors(self.tree, ()):
            characters += sum(map(len, keys))
            if characters > _NAMES:  # a long key is part of the names of all tensors below it
                wanted = f"at most {_NAMES:,} characters"
                raise FormatError(self.file, "names of tensors are too long", wanted=wanted)
            tensors[".".join(keys)] = tensor
        return tensors


def _children(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Record):
        return value.fields
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}


def _lookup(value: Any, name: str) -> Iterator[Any]:
    children = _children(value)
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        key: Any = ".".join(parts[:count])
        if key not in children and key.isdigit():
            key = int(key)
        if key in children and count == len(parts):
            yield children[key]
        elif key in children:
            yield from _lookup(children[key], ".".join(parts[count:]))


def _tensors(value: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], MappedTensor]]:
    """Yield every tensor with the keys that lead to it."""
    for key, child in _children(value).items():
        if isinstance(child, MappedTensor):
            yield (*above, str(key)), child
        else:
            yield from _tensors(child, (*above, str(key)))
