"""The steps by name, and their options from TOML tables or flags.

[[step]]                          --step language:keep=tr,score=0.8
name = "language"
keep = ["tr"]
score = 0.8
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from mega_data.clean.decontaminate import Decontaminate
from mega_data.clean.language import Language
from mega_data.clean.normalize import FixText, Punctuation, Whitespace
from mega_data.clean.quality import C4, GopherQuality, GopherRepetition, Javascript, Length, Tokens
from mega_data.clean.sentence_dedup import Spans
from mega_data.clean.urls import Urls
from mega_schema.app.config import did_you_mean
from mega_schema.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Keep the first of documents that are alike, across all shards.

    Attributes:
        preset: exact, megatron or datatrove, see dedup/presets.py.
        key: what is compared; "url" with exact drops addresses seen before. Empty is the text.
        jaccard: check pairs, from this similarity on; 0 is the preset's own.
    """

    preset: str = "exact"
    key: str = ""
    jaccard: float = 0.0


STEPS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "fix-text": FixText,
        "punctuation": Punctuation,
        "whitespace": Whitespace,
        "language": Language,
        "length": Length,
        "tokens": Tokens,
        "javascript": Javascript,
        "c4": C4,
        "gopher-quality": GopherQuality,
        "gopher-repetition": GopherRepetition,
        "urls": Urls,
        "decontaminate": Decontaminate,
        "duplicates": Duplicates,
        "spans": Spans,
    }
)
_FILLED_IN = frozenset({"counts"})  # fields that are no option


@dataclass(frozen=True, slots=True)
class Named:
    """A step and the name it is reported under."""

    name: str
    step: Any


def from_toml(path: Path) -> list[Named]:
    """The steps of a file.

    Raises:
        ConfigError: it is not TOML, or a step or one of its keys is not known.
    """
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "not TOML", found=error) from None
    tables = found.pop("step", None)
    if found or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        other = ", ".join(found) or "no [[step]]"
        raise ConfigError(path, "not a list of steps", found=other, wanted="[[step]] tables")
    return [_made(table.pop("name", ""), table, f"{path}: step {n}") for n, table in enumerate(tables, 1)]


def from_flag(text: str) -> Named:
    """The step of a flag: `name`, or `name:key=value,key=value`; a `+` joins several values of one key."""
    name, _, options = text.partition(":")
    values = dict[str, Any]()
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            hint = f"--step {name}:key=value,key=value"
            raise ConfigError("--step", "not key=value", found=option, hint=hint)
        values[key] = value
    return _made(name, values, f"--step {name}")


def _made(name: object, values: Mapping[str, Any], where: str) -> Named:
    if not isinstance(name, str) or name not in STEPS:
        found, hint = name or "no name", did_you_mean(str(name), list(STEPS))
        raise ConfigError(where, "unknown step", found=found, wanted=" | ".join(STEPS), hint=hint)
    kind = STEPS[name]
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind) if field.name not in _FILLED_IN]
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ConfigError(f"{where}: {key}", "unknown key", wanted=" | ".join(known) or "none", hint=hint)
    made = {key: _typed(value, hints[key], f"{where}: {key}") for key, value in values.items()}
    return Named(name, kind(**made))


def _typed(value: Any, kind: Any, where: str) -> Any:
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = kind(value)
        except (TypeError, ValueError):
            number = None
        if (
            number is not None
            and number >= 0
            and (kind is float or isinstance(value, str) or number == value)
        ):
            return number
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(where, "not of its kind", found=repr(value), wanted=f"{wanted}, not negative")
    if kind is str and isinstance(value, str):
        return value
    if kind == tuple[str, ...]:
        several = value.split("+") if isinstance(value, str) else value
        if isinstance(several, Sequence) and all(isinstance(one, str) for one in several):
            return tuple(several)
    wanted = "a text" if kind is str else "a list of texts"
    raise ConfigError(where, "not of its kind", found=repr(value), wanted=wanted)
