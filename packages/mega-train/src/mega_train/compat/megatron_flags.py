"""Read `megatron_flags.toml`: the translation of other programs' flags to those of `mega-train`.

It covers Megatron-LM from its first release to its tree of 2026, BigScience's and DeepSpeed's forks, and
fairseq's for megatron_11b; of data preparation, serving and evaluation only flags that may occur in training
scripts. A name that ends with a hyphen matches every flag with that prefix. A flag that `mega-train` has must
not be in the file, which a test checks.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

Value = TypeVar("Value")
FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a flag is refused, and its replacement; empty if there is none."""

    why: str
    instead: str


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags of other programs.

    Attributes:
        left_out: flags that change no result in `mega-train`, and the reason.
        refused: flags of unsupported features.
        read_as: the replacement of a flag; its value, if any, follows.
        values: by flag and value, the replacement; empty if `mega-train` always behaves so.
        in_context: flags whose translation depends on other flags of the command line.
    """

    left_out: Mapping[str, str]
    refused: Mapping[str, Refusal]
    read_as: Mapping[str, tuple[str, ...]]
    values: Mapping[str, Mapping[str, tuple[str, ...]]]
    in_context: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Every flag by its full name."""
        tables = (self.left_out, self.refused, self.read_as, self.values, self.in_context)
        return tuple(flag for table in tables for flag in table if not flag.endswith("-"))


@functools.cache
def flag_table() -> FlagTable:
    """Read the table from its file."""
    content = tomllib.loads(FILE.read_text("utf-8"))
    return FlagTable(
        left_out=_by_flag(content["left_out"], lambda group: group["why"]),
        refused=_by_flag(content["refused"], lambda group: Refusal(group["why"], group.get("instead", ""))),
        read_as=MappingProxyType({flag: tuple(words) for flag, words in content["read_as"].items()}),
        values=MappingProxyType(
            {
                flag: MappingProxyType({value: tuple(words) for value, words in values.items()})
                for flag, values in content["values"].items()
            }
        ),
        in_context=MappingProxyType(content["in_context"]),
    )


def find_flag(table: Mapping[str, Value], flag: str) -> Value | None:
    """Look a flag up by its name or by a prefix in the table."""
    if flag in table:
        return table[flag]
    return next((text for key, text in table.items() if key.endswith("-") and flag.startswith(key)), None)


def _by_flag(groups: list[dict[str, Any]], value: Callable[[dict[str, Any]], Value]) -> Mapping[str, Value]:
    return MappingProxyType({flag: value(group) for group in groups for flag in group["flags"]})
