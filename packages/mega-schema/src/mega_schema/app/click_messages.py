"""Rephrase click's messages about a value: what is wrong, the value found, the value wanted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_NOT_A_CHOICE: Final = re.compile(r"'(.*)' is not one of (.*)\.")
_NOT_A_NUMBER: Final = re.compile(r"'(.*)' is not a valid (integer|float)(?: range)?\.")
_OUT_OF_RANGE: Final = re.compile(r"(\S+) is not in the range (\S+)\.")
_NO_PATH: Final = re.compile(r"(File|Directory|Path) '(.*)' does not exist\.")
_EXTRA_WORDS: Final = re.compile(r"Got unexpected extra arguments? \((.*)\)")
_QUOTED: Final = re.compile(r"'([^']*)'")
_BETWEEN: Final = re.compile(r"(.+?)(<=?)x(<=?)(.+)")
_ONE_BOUND: Final = re.compile(r"x([<>]=?)(.+)")
_BOUNDS: Final[Mapping[str, str]] = MappingProxyType(
    {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}
)


def rephrase_value(message: str) -> str:
    """Return a message about the value of an option or argument; unchanged if it is not one of click's."""
    if words := _NOT_A_CHOICE.fullmatch(message):
        return f"unknown value: found {words[1]}, wanted {' | '.join(_QUOTED.findall(words[2]))}"
    if words := _NOT_A_NUMBER.fullmatch(message):
        wanted = "an integer" if words[2] == "integer" else "a number"
        return f"wrong type: found {words[1]}, wanted {wanted}"
    if words := _OUT_OF_RANGE.fullmatch(message):
        return f"out of range: found {words[1]}, wanted {_describe_range(words[2])}"
    if words := _NO_PATH.fullmatch(message):
        kind = {"File": "file", "Directory": "folder"}.get(words[1], "file or folder")
        return f"no such {kind}: found {words[2]}"
    return message


def rephrase_usage(message: str) -> str:
    """Return a message about the command line; unchanged if it is not one of click's."""
    if words := _EXTRA_WORDS.fullmatch(message):
        return f"{words[1].split()[0]}: unexpected argument; hint: --help lists the arguments"
    return message


def _describe_range(text: str) -> str:
    """Return the words for a range as click writes it, such as 0<=x<=65535 or x>0."""
    if bounds := _BETWEEN.fullmatch(text):
        low, left, right, high = bounds.groups()
        if (left, right) == ("<=", "<="):
            return f"{low} to {high}"
        return f"{'above' if left == '<' else 'at least'} {low} and {_BOUNDS[right]} {high}"
    if bound := _ONE_BOUND.fullmatch(text):
        return f"{_BOUNDS[bound[1]]} {bound[2]}"
    return text
