"""Explain a flag or its key, or a flag of another program, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from mega_schema.app.config import ConfigKey, as_sentence, closest_key, config_keys
from mega_schema.arch import table
from mega_schema.errors import ConfigError
from mega_schema.params import count_params
from mega_schema.presets import PRESETS
from mega_train.compat.flag_translation import SIMILAR, refusal_of
from mega_train.compat.megatron_flags import find_flag, flag_table
from mega_train.config import RunConfig


def explain_word(word: str) -> Iterator[str]:
    """Yield the lines that explain one word.

    Args:
        word: a flag, with or without its first hyphens, its key, or section.key.

    Raises:
        ConfigError: nothing has that name.
    """
    flag = word if word.startswith("--") else f"--{word}"
    for key in config_keys(RunConfig):
        if flag in key.declared.split("/") or word.replace("-", "_") in (key.dotted, key.name):
            yield from _explain_key(key)
            return
    if lines := list(_explain_foreign_flag(flag)):
        yield from lines
        return
    known = [name for key in config_keys(RunConfig) for name in (key.dotted, *key.declared.split("/"))]
    known += flag_table().names
    close = get_close_matches(word, known, 1, SIMILAR) or get_close_matches(flag, known, 1, SIMILAR)
    hint = f"did you mean {close[0]}?" if close else ""
    if not close and "." in word:
        hint = closest_key({key.dotted: key for key in config_keys(RunConfig)}, word)
    raise ConfigError(word, "is neither a key nor a flag", hint=hint)


def list_keys() -> Iterator[str]:
    """Yield a line for every key, section by section."""
    section = ""
    for key in config_keys(RunConfig):
        if key.section != section:
            section = key.section
            yield f"[{section}]"
        yield f"  {key.name:44} {_default(key)}"


def list_presets() -> Iterator[str]:
    """Yield a line for every preset."""
    for name, spec in PRESETS.items():
        shape = f"{spec.layers} layers, hidden {spec.hidden}, {spec.heads} heads, {spec.max_seq_len} tokens"
        yield f"{name:18} {spec.family:6} {count_params(table(spec)) / 1e9:8.2f} billion   {shape}"


def _explain_key(key: ConfigKey) -> Iterator[str]:
    words = str(key.field.metadata["help"])
    turned_off = f" {key.name} = false" if key.declared.startswith("--no-") else ""
    yield f"{key.declared}   [{key.section}]{turned_off}"
    yield f"  {as_sentence(words)}"
    yield f"  {_kind(key.kind)}; {_default(key)}"
    for value, instead in flag_table().values.get(key.flag, {}).items():
        yield f"  {value} is read as {' '.join(instead)}"
    if key.flag == "--preset":
        yield from (f"  {line}" for line in list_presets())


def _explain_foreign_flag(flag: str) -> Iterator[str]:
    table = flag_table()
    if flag in table.in_context:
        yield f"{flag}   {table.in_context[flag]}"
    elif flag in table.read_as:
        yield f"{flag}   is read as {' '.join(table.read_as[flag])}"
    elif flag in table.values:
        for value, instead in table.values[flag].items():
            yield f"{flag} {value}   is read as {' '.join(instead) or 'nothing: it is so here'}"
    elif (why := find_flag(table.left_out, flag)) is not None:
        yield f"{flag}   is left out: {why}"
    elif (refusal := refusal_of(flag, table)) is not None:
        yield f"{flag}   is refused: {str(refusal).removeprefix(f'{flag}: ')}"


def _default(key: ConfigKey) -> str:
    default = key.field.default
    if default is None or default == ():
        return "not given by default"
    return f"{str(default).lower() if isinstance(default, bool) else default} by default"


def _kind(kind: Any) -> str:
    plain = (
        next(argument for argument in get_args(kind) if argument is not NoneType)
        if NoneType in get_args(kind)
        else kind
    )
    if get_origin(plain) is Literal:
        return " | ".join(map(str, get_args(plain)))
    if get_origin(plain) is tuple:
        return "several words"
    return {int: "an integer", float: "a number", bool: "a flag without a value"}.get(plain, "text")
