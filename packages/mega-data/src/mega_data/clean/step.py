"""The interface of a cleaning step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

from mega_data.readers.nested_keys import replace_value
from mega_data.texts import text_of
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """One document.

    Attributes:
        values: the line's JSON object; not changed in place.
        key: key of its text.
        shard: number of its file.
        line: number of the line in the shard, from 1.
        counts: what the last step counted in it for the report, by name.
    """

    values: dict[str, Any]
    key: str
    shard: int
    line: int
    counts: Mapping[str, int] | None = None

    @property
    def text(self) -> str:
        return text_of(self.values, self.key)

    def with_values(self, **values: Any) -> Row:
        """Return a copy of the document with other values."""
        new_values = self.values
        for key, value in values.items():
            new_values = replace_value(new_values, key, value)
        return replace(self, values=new_values)

    def with_counts(self, counts: Mapping[str, int] | None) -> Row:
        """Return a copy of the document with counts of the step for the report."""
        return replace(self, counts=counts)


Verdict = list[Row] | str
"""The result of a step for a document: zero or more documents, or the reason to drop it."""
RowFunction = Callable[[Row], Verdict]


class Step(Protocol):
    """The options of a step; a dataclass whose fields are the keys of its TOML table."""

    def start(self) -> RowFunction:
        """Build the function that processes a document; its result depends on the document alone.

        Each task calls it, so expensive objects are cached for the next task of the process.
        """
        ...


def import_for_step(step: str, module: str, package: str = "") -> Any:
    """Import an optional module.

    Raises:
        ConfigError: the module is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        name = package or module.partition(".")[0]
        what, hint = f"needs {name}, which is not installed", install_hint("mega-data", "clean")
        raise ConfigError(f"step {step}", what, hint=hint) from None
