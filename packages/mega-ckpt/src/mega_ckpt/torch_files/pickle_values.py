"""What is in a file of `torch.save`, as `pickle_reader` makes it of what the file says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_ckpt.tensors.mapped_tensor import Stored
from mega_schema.errors import FormatError

_NAMES = 1 << 27  # characters of all tensors' names


class Name(str):
    """Of something that the file names and nothing is made of."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Member:
    """Of an enum; `name` is empty where `allowlist.ENUMS` does not tell it."""

    enum: str
    value: Any
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """An object of a class that is not here.

    Attributes:
        kind: its class, with the module.
        args: what it was made with.
        fields: its attributes; "state" alone where its class has a way of its own to say them.
    """

    kind: str
    args: tuple[Any, ...]
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pickled:
    """What is in a file."""

    file: Path
    tree: Any

    def at(self, name: str) -> Any:
        """The value under a dotted name; keys may have dots themselves, and attributes count as keys.

        Raises:
            FormatError: there is none.
        """
        found = list(_under(self.tree, name))
        if not found:
            raise FormatError(self.file, "has no such entry", wanted=name)
        return found[0]

    def tensors(self) -> dict[str, Stored]:
        """Every tensor under its dotted name.

        Raises:
            FormatError: they are too long, all together.
        """
        found, characters = dict[str, Stored](), 0
        for keys, tensor in _tensors(self.tree, ()):
            characters += sum(map(len, keys))
            if characters > _NAMES:  # a long key over many tensors is in the name of each
                wanted = f"at most {_NAMES:,} characters"
                raise FormatError(self.file, "names of tensors are too long", wanted=wanted)
            found[".".join(keys)] = tensor
        return found


def _children(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Record):
        return value.fields
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}


def _under(value: Any, name: str) -> Iterator[Any]:
    children, parts = _children(value), name.split(".")
    for count in range(len(parts), 0, -1):
        key: Any = ".".join(parts[:count])
        if key not in children and key.isdigit():
            key = int(key)
        if key in children and count == len(parts):
            yield children[key]
        elif key in children:
            yield from _under(children[key], ".".join(parts[count:]))


def _tensors(value: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Stored]]:
    """Every tensor, with the keys that lead to it."""
    for key, child in _children(value).items():
        if isinstance(child, Stored):
            yield (*above, str(key)), child
        else:
            yield from _tensors(child, (*above, str(key)))
