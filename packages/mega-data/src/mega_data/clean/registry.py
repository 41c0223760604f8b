"""The cleaning steps by name, and their options from TOML tables or flags.

[[step]]                          --step language:keep=tr,score=0.8
name = "language"
keep = ["tr"]
score = 0.8

[[step]]                          --step python:my_filters:drop_tables
name = "python"
function = "my_filters:drop_tables"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from mega_data.clean.classifier import ClassifierStep
from mega_data.clean.decontaminate import Decontaminate
from mega_data.clean.fineweb import FinewebQuality
from mega_data.clean.language import Language
from mega_data.clean.normalize import FixText, Punctuation, Whitespace
from mega_data.clean.perplexity import PerplexityStep
from mega_data.clean.pii import PiiStep
from mega_data.clean.python_step import PythonStep
from mega_data.clean.quality import (
    C4Filter,
    GopherQuality,
    JavascriptFilter,
    LengthFilter,
    TokenCountFilter,
)
from mega_data.clean.repetition import GopherRepetition
from mega_data.clean.selection import RegexStep, SampleStep
from mega_data.clean.sentence_dedup import SentenceDedupStep
from mega_data.clean.url_list import UrlList
from mega_data.clean.urls import UrlFilter
from mega_schema.app.config import did_you_mean
from mega_schema.errors import ConfigError
from mega_schema.urls import check_local


@dataclass(frozen=True, slots=True)
class DuplicateFilter:
    """Keep the first of duplicate documents, across all shards.

    Attributes:
        preset: exact, megatron or datatrove, see dedup/presets.py.
        key: key of the compared value; "url" with exact drops repeated addresses. Empty is the text.
        jaccard: minimum similarity of a pair; 0 is the preset's.
    """

    preset: str = "exact"
    key: str = ""
    jaccard: float = 0.0


STEPS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "fix-text": FixText,
        "punctuation": Punctuation,
        "whitespace": Whitespace,
        "pii": PiiStep,
        "language": Language,
        "length": LengthFilter,
        "tokens": TokenCountFilter,
        "javascript": JavascriptFilter,
        "c4": C4Filter,
        "gopher-quality": GopherQuality,
        "gopher-repetition": GopherRepetition,
        "fineweb-quality": FinewebQuality,
        "classifier": ClassifierStep,
        "perplexity": PerplexityStep,
        "urls": UrlFilter,
        "url-list": UrlList,
        "regex": RegexStep,
        "sample": SampleStep,
        "python": PythonStep,
        "decontaminate": Decontaminate,
        "duplicates": DuplicateFilter,
        "spans": SentenceDedupStep,
    }
)
_RUNTIME_FIELDS = frozenset({"counts", "code"})  # fields that are not options
# options that are shares: 1 at most
_SHARES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "classifier": frozenset({"score"}),
        "duplicates": frozenset({"jaccard"}),
        "fineweb-quality": frozenset({"line_punct_thr", "short_line_thr", "char_duplicates_ratio"}),
        "language": frozenset({"score"}),
    }
)
# options of a lower and an upper limit
_LIMITS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "decontaminate": ("shortest", "longest"),
        "gopher-quality": ("fewest", "most"),
        "length": ("minimum", "maximum"),
    }
)
_NO_LIMIT = 0  # value of an upper limit
_NOT_PATHS = frozenset({"pattern", "replacement"})  # options whose value may be a URL


@dataclass(frozen=True, slots=True)
class NamedStep:
    """A step and its name in the report."""

    name: str
    step: Any


def steps_from_toml(path: Path) -> list[NamedStep]:
    """Read the steps of a TOML file.

    Raises:
        ConfigError: the file is not TOML, or a step or one of its keys is unknown.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "not TOML", found=error) from None
    tables = document.pop("step", None)
    if document or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        keys = ", ".join(document) or "no [[step]]"
        raise ConfigError(path, "not a list of steps", found=keys, wanted="[[step]] tables")
    for number, table in enumerate(tables, 1):
        if "name" not in table:
            found, hint = ", ".join(table) or "an empty table", did_you_mean(next(iter(table), ""), ["name"])
            where = f"{path}: step {number}"
            raise ConfigError(where, "has no name", found=found, wanted='name = "length"', hint=hint)
    return [_make_step(table.pop("name"), table, f"{path}: step {n}") for n, table in enumerate(tables, 1)]


def step_from_flag(text: str) -> NamedStep:
    """Parse a flag `name` or `name:key=value,key=value`; `+` separates several values of one key.

    The value of `python` is the function alone: `python:MODULE:FUNCTION`.
    """
    name, _, options = text.partition(":")
    if not name:
        wanted = "NAME or NAME:KEY=VALUE,KEY=VALUE"
        raise ConfigError("--step", "has no name", found=repr(text), wanted=wanted, hint="--step whitespace")
    if name == "python":
        return _make_step(name, {"function": options.removeprefix("function=")}, f"--step {name}")
    values = dict[str, Any]()
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            hint = f"--step {name}:key=value,key=value"
            raise ConfigError("--step", "not key=value", found=option, hint=hint)
        if key in values:
            found = f"{values[key]} and {value}"
            hint = "+ separates several values: keep=en+de"
            raise ConfigError(f"--step {name}: {key}", "is given twice", found=found, hint=hint)
        values[key] = value
    return _make_step(name, values, f"--step {name}")


def _make_step(name: object, values: Mapping[str, Any], where: str) -> NamedStep:
    if not isinstance(name, str) or name not in STEPS:
        found, hint = name or "no name", did_you_mean(str(name), list(STEPS))
        raise ConfigError(where, "unknown step", found=found, wanted=" | ".join(STEPS), hint=hint)
    step_type = STEPS[name]
    hints = get_type_hints(step_type)
    known = [field.name for field in fields(step_type) if field.name not in _RUNTIME_FIELDS]
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ConfigError(f"{where}: {key}", "unknown key", wanted=" | ".join(known) or "none", hint=hint)
    options = {key: _convert_value(value, hints[key], f"{where}: {key}") for key, value in values.items()}
    step = step_type(**options)
    _check_limits(name, step, where)
    return NamedStep(name, step)


def _check_limits(name: str, step: object, where: str) -> None:
    """Refuse a share above 1, and a lower limit above the upper one."""
    for key in _SHARES.get(name, ()):
        if (value := getattr(step, key)) > 1:
            raise ConfigError(f"{where}: {key}", "wrong value", found=value, wanted="a share from 0 to 1")
    if name in _LIMITS:
        low, high = _LIMITS[name]
        smallest, largest = getattr(step, low), getattr(step, high)
        if smallest > largest != _NO_LIMIT:
            wanted = f"at most {largest:,}, the value of {high}"
            raise ConfigError(f"{where}: {low}", "wrong value", found=f"{smallest:,}", wanted=wanted)


def _convert_value(value: Any, target_type: Any, where: str) -> Any:
    if target_type is bool:
        if value in (True, False, "true", "false"):
            return value in (True, "true")
        raise ConfigError(where, "wrong value", found=repr(value), wanted="true | false")
    if target_type in (int, float) and not isinstance(value, bool):
        try:
            number = target_type(value)
        except (TypeError, ValueError):
            number = None
        if (
            number is not None
            and number >= 0
            and (target_type is float or isinstance(value, str) or number == value)
        ):
            return number
        wanted = "an integer" if target_type is int else "a number"
        raise ConfigError(where, "wrong value", found=repr(value), wanted=f"{wanted}, not negative")
    if target_type is str and isinstance(value, str):
        if where.rpartition(": ")[2] not in _NOT_PATHS:
            check_local(where, value)
        return value
    if target_type == tuple[str, ...]:
        values = value.split("+") if isinstance(value, str) else value
        if isinstance(values, Sequence) and all(isinstance(item, str) for item in values):
            for item in values:
                check_local(where, item)
            return tuple(values)
    wanted = "a text" if target_type is str else "a list of texts"
    raise ConfigError(where, "wrong value", found=repr(value), wanted=wanted)
