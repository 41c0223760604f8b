"""What a step of cleaning gets and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

from mega_data.texts import text_of
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """One document.

    Attributes:
        values: the line's JSON object; not changed in place.
        key: where its text is.
        shard: its file's number.
        line: its number in the shard, from 1.
    """

    values: dict[str, Any]
    key: str
    shard: int
    line: int

    @property
    def text(self) -> str:
        return text_of(self.values, self.key)

    def with_values(self, **values: Any) -> Row:
        """The document with other values."""
        return replace(self, values={**self.values, **values})


Verdict = list[Row] | str
"""What becomes of a document: none to several documents, or the reason why it goes."""
RowFunction = Callable[[Row], Verdict]


class Step(Protocol):
    """A step's options; a dataclass whose fields are the keys of its table in TOML."""

    def start(self) -> RowFunction:
        """Make what the step needs; what it says of a document depends on the document alone.

        Each task calls it: what takes time to make is kept for the next task of the process.
        """
        ...


def import_for_step(step: str, module: str, package: str = "") -> Any:
    """A module that not everyone has.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        name = package or module.partition(".")[0]
        what, hint = f"needs {name}, which is not installed", install_hint("mega-data", "clean")
        raise ConfigError(f"step {step}", what, hint=hint) from None
