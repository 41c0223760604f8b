"""Configuration: frozen dataclasses of sections, filled from a TOML file, flags and `--set a.b=c`.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Batch:
        micro: int = option("--micro-batch-size", 1, "samples in one forward pass of one rank")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Run:
        batch: Batch = Batch()

A setting has one name: its key is its flag with underscores, here `batch.micro_batch_size`, in the file, in
--set and in messages. The field's name (`run.batch.micro`) is for code only. `key_of_flag` has the rule.

`add_flags(Run)` decorates a click command with every flag; `load_config` merges the sources, later ones over
earlier: defaults, file, flags, --set. Only types and names are checked here; the code that resolves the
configuration checks that its values agree.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from mega_schema.app.click_options import LocalPath, MultiOption, NonEmptyPath
from mega_schema.errors import ConfigError
from mega_schema.urls import check_local

R = TypeVar("R")
WordList = tuple[str, ...]
Command = TypeVar("Command", bound=Callable[..., Any])


def option(flag: str, default: Any, help: str) -> Any:
    """Declare a field of a section by its flag, from which its key follows (`key_of_flag`).

    A bool is a flag without a value; one whose default is true is declared as "--no-on" or "--on/--no-on".
    """
    return dataclasses.field(default=default, metadata={"flag": flag, "help": help})


def multi_option(flag: str, help: str) -> Any:
    """Declare a field of several words after one flag: `--data-path 0.3 A 0.7 B`. Its type is WordList.

    The command must be a `MultiValueCommand`. A file has a list, whose numbers need no quotes, or one string.
    """
    return dataclasses.field(default=(), metadata={"flag": flag, "help": help, "words": True})


def key_of_flag(flag: str) -> str:
    """Return the key of a flag: its name with underscores.

    A flag that turns a default off, `--no-data-sharding`, has the key without "no": `data_sharding = false`.
    """
    return flag.partition("/")[0].removeprefix("--").removeprefix("no-").replace("-", "_")


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigKey:
    """One value of a configuration: section, type, and the field that declares its flag."""

    section: str
    kind: Any
    field: dataclasses.Field[Any]

    @property
    def name(self) -> str:
        """The key in its section; click passes the flag's value by this name too."""
        return key_of_flag(self.declared)

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return self.declared.partition("/")[0]

    @property
    def declared(self) -> str:
        """The flag as click's parameter declaration, with the flag that turns it off."""
        return str(self.field.metadata["flag"])

    @property
    def is_multi(self) -> bool:
        """Whether its flag takes all words that follow."""
        return bool(self.field.metadata.get("words"))

    def value_in(self, config: Any) -> Any:
        """Return the value of this key in a configuration."""
        return getattr(getattr(config, self.section), self.field.name)


def config_keys(cls: type[Any]) -> Iterator[ConfigKey]:
    """Yield every value of a configuration class, section by section."""
    for section, kind in get_type_hints(cls).items():
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            yield ConfigKey(section, hints[field.name], field)


def add_flags(cls: type[Any]) -> Callable[[Command], Command]:
    """Decorate a click command with a flag for every value, and with --config and --set."""

    def decorate(command: Command) -> Command:
        for key in reversed(list(config_keys(cls))):
            command = _click_option(key)(command)
        command = click.option(
            "--set",
            "sets",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Set one value, with priority over file and flags; none unsets an optional one.",
        )(command)
        return click.option(
            "--config",
            type=LocalPath(dir_okay=False),
            help="TOML file with a table for each section.",
        )(command)

    return decorate


def load_config(
    cls: type[R], file: Path | None, flag_values: Mapping[str, Any], sets: Sequence[str] = ()
) -> R:
    """Build the configuration from file, flags and --set.

    Args:
        file: TOML with a table per section.
        flag_values: click's values by key; None: not given.
        sets: "section.key=value" texts, the value written as in TOML (a bare word is a string). The bare word
            none removes the file's or flag's value of an optional key.

    Raises:
        ConfigError: a key is unknown, or a value has another type.
    """
    keys_by_name = {key.dotted: key for key in config_keys(cls)}
    values: dict[str, Any] = {}
    for dotted, value in _from_file(file, list(get_type_hints(cls))):
        values[dotted] = _convert(_find_key(keys_by_name, dotted, str(file)), value, f"{file}: {dotted}")
    for key in keys_by_name.values():
        if flag_values.get(key.name) is not None:
            values[key.dotted] = _convert(key, flag_values[key.name], key.flag)
    for text in sets:
        dotted, equals, value = text.partition("=")
        if not equals:
            raise ConfigError("--set", "has no value", found=text, wanted="SECTION.KEY=VALUE")
        key = _find_key(keys_by_name, dotted.strip(), "--set")
        if _is_removal(value.strip(), key):
            values[key.dotted] = None
        else:
            values[key.dotted] = _convert(key, _literal(value.strip(), key), f"--set {key.dotted}")
    sections: dict[str, dict[str, Any]] = {section: {} for section in get_type_hints(cls)}
    for dotted, value in values.items():
        key = keys_by_name[dotted]
        sections[key.section][key.field.name] = value
    return cls(**{name: kind(**sections[name]) for name, kind in get_type_hints(cls).items()})


def to_toml(config: Any) -> str:
    """Write the configuration as TOML, without None and empty lists.

    `load_config` reads it back to an equal one.
    """
    lines: list[str] = []
    for section, values in to_dict(config).items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            if value is not None and value != ():
                lines.append(f"{name} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def to_dict(config: Any) -> dict[str, dict[str, Any]]:
    """Return every value of the configuration by section and key."""
    sections: dict[str, dict[str, Any]] = {section.name: {} for section in dataclasses.fields(config)}
    for key in config_keys(type(config)):
        sections[key.section][key.name] = key.value_in(config)
    return sections


def as_sentence(text: str) -> str:
    """Write a help text as a sentence; a name of a file keeps its first letter."""
    begins_with_name = "." in text.partition(" ")[0]
    return f"{text if begins_with_name else text[:1].upper() + text[1:]}."


def did_you_mean(word: str, words: Sequence[str]) -> str:
    """Return a hint with the most similar word, or ""."""
    similar = get_close_matches(word, words, 1, 0.5)
    return f"did you mean {similar[0]}?" if similar else ""


def _from_file(file: Path | None, sections: Sequence[str]) -> Iterator[tuple[str, Any]]:
    if file is None:
        return
    if not file.is_file():
        raise ConfigError("--config", "no such file", found=file)
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except ValueError as error:  # also invalid UTF-8, and numbers longer than Python reads
        raise ConfigError(file, "is not TOML", found=error) from error
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{file}: {section}", "is outside every section", wanted="[section] key = value"
            )
        if section not in sections:
            raise ConfigError(f"{file}: [{section}]", "unknown section", hint=did_you_mean(section, sections))
        for name, value in table.items():
            yield f"{section}.{name}", value


def _find_key(keys: Mapping[str, ConfigKey], dotted: str, where: str) -> ConfigKey:
    if dotted not in keys:
        raise ConfigError(f"{where}: {dotted}", "unknown key", hint=closest_key(keys, dotted))
    return keys[dotted]


def closest_key(keys: Mapping[str, ConfigKey], dotted: str) -> str:
    """Return a hint with the most likely key, if there is one.

    It is that flag's key in any section; or one of the section that the word abbreviates (`parallel.tp`), is
    part of, or resembles.
    """
    section, _, word = dotted.rpartition(".")
    word = key_of_flag(word)
    names = sorted((key.name for key in keys.values() if key.section == section), key=len)
    likely = [key.dotted for key in keys.values() if key.name == word]
    likely += [f"{section}.{name}" for name in names if _is_abbreviation(word, name)]
    likely += [f"{section}.{name}" for name in names if f"_{word}_" in f"_{name}_"]
    likely += [f"{section}.{name}" for name in get_close_matches(word, names, 1, 0.7)]
    question = f"; did you mean {likely[0]}?" if likely else ""
    return f"a key is its flag with underscores{question}"


def _is_abbreviation(word: str, name: str) -> bool:
    """Whether a word of two or three letters has initials of the name's words, in their order."""
    initials = iter(part[:1] for part in name.split("_"))
    return 2 <= len(word) <= 3 and all(letter in initials for letter in word)


def _strip_none(kind: Any) -> Any:
    """Return an optional type without its None."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [k for k in get_args(kind) if k is not NoneType]
        assert len(kinds) == 1, kind
        return kinds[0]
    return kind


def _convert(key: ConfigKey, value: Any, where: str) -> Any:
    kind = _strip_none(key.kind)
    if key.is_multi:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list | tuple):
            value = [str(v) if type(v) in (int, float) else v for v in value]
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ConfigError(where, "unknown choice", found=value, wanted=" | ".join(map(str, get_args(kind))))
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str | Path):
        check_local(where, value)
        return Path(value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple) and _matches_tuple(kind, value):
        return tuple(value)
    if type(value) is not kind:
        wanted = _list_type_name(kind) if get_origin(kind) is tuple else _TYPE_NAMES[kind]
        raise ConfigError(where, "has another type", found=repr(value), wanted=wanted)
    return value


def _matches_tuple(kind: Any, values: Sequence[Any]) -> bool:
    *first, last = get_args(kind)  # (str, ...) of any length, or one type per item
    kinds = [*first, last] if last is not ... else first * len(values)
    return len(kinds) == len(values) and all(type(v) is k for v, k in zip(values, kinds, strict=True))


def _list_type_name(kind: Any) -> str:
    *first, last = get_args(kind)
    if last is ...:
        return "a list of strings"
    return f"a list of {len(first) + 1}: {', '.join(_TYPE_NAMES[k] for k in (*first, last))}"


_TYPE_NAMES: Mapping[type, str] = MappingProxyType(
    {int: "an integer", float: "a number", str: "text", bool: "true or false", Path: "a path"}
)


def _literal(text: str, key: ConfigKey) -> Any:
    """Parse a value as TOML. A text value needs no quotes, even if it looks like a number."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except ValueError:
        return text
    wants_text = _strip_none(key.kind) in (str, Path) or (key.is_multi and not isinstance(value, list))
    return text if wants_text and not isinstance(value, str) else value


def _is_removal(text: str, key: ConfigKey) -> bool:
    """Whether a word of --set removes a key's value; for some keys none is itself a value."""
    return (
        text == "none"
        and _strip_none(key.kind) is not key.kind
        and text not in get_args(_strip_none(key.kind))
    )


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    # JSON escapes like TOML, except for one character that only TOML requires to be escaped
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _click_option(key: ConfigKey) -> Callable[[Command], Command]:
    kind = _strip_none(key.kind)
    help_text = str(key.field.metadata["help"])
    text = as_sentence(help_text)
    default = key.field.default
    if default is not None and not isinstance(default, bool) and default != ():
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text += f"  [default: {shown}]"
    if kind is bool:
        value = not key.declared.startswith("--no-")
        return click.option(key.declared, key.name, is_flag=True, flag_value=value, default=None, help=text)
    if get_origin(kind) is Literal:
        return click.option(key.flag, key.name, type=click.Choice(get_args(kind)), default=None, help=text)
    if get_origin(kind) is tuple and get_args(kind)[-1] is ...:
        return click.option(
            key.flag,
            key.name,
            cls=MultiOption if key.is_multi else click.Option,
            multiple=True,
            callback=_none_if_empty,
            metavar="WORD..." if key.is_multi else None,
            help=text,
        )
    if get_origin(kind) is tuple:
        return click.option(key.flag, key.name, type=get_args(kind), default=None, help=text)
    types = {int: click.INT, float: click.FLOAT, str: click.STRING, Path: NonEmptyPath()}
    return click.option(key.flag, key.name, type=types[kind], default=None, help=text)


def _none_if_empty(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    return value or None
