"""Check the keys under which steps store values: no value may replace the text, the id or another value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mega_schema.errors import ConfigError

_OPTIONS: Final = ("store", "bucket")  # of any step: keys of the values that it stores


def check_stored_keys(name: str, step: object, key: str, id_key: str) -> None:
    """Refuse a step that would overwrite the text or the id of the documents, or a value of its own.

    Args:
        name: of the step.
        key: key of the text.
        id_key: key of the id; "" for none.

    Raises:
        ConfigError: an option of the step is one of these keys, or that of an object around it.
    """
    read_keys = {"text (--json-key)": key, "id (--id-key)": id_key}
    for option, stored_key in _stored_keys(step):
        for what, read_key in read_keys.items():
            if _is_at_or_above(stored_key, read_key):
                is_above = stored_key != read_key
                problem = f"is the key of {'the object around ' if is_above else ''}the {what}"
                where = f"step {name}: {option}"
                raise ConfigError(where, problem, found=stored_key, hint="name another key")
    pairs = [*_stored_keys(step)]
    for first, first_key in pairs:
        for second, second_key in pairs:
            if first != second and _is_at_or_above(first_key, second_key):
                wanted = f"a key beside {second_key}, which is {second}"
                where = f"step {name}: {first}"
                raise ConfigError(where, f"overwrites {second}", found=first_key, wanted=wanted)


def _stored_keys(step: object) -> Iterator[tuple[str, str]]:
    """Yield the options of a step that name a key, and the key."""
    for option in _OPTIONS:
        if isinstance(key := getattr(step, option, ""), str) and key:
            yield option, key


def _is_at_or_above(stored_key: str, read_key: str) -> bool:
    """Return whether a value under one key replaces that under the other, which may be nested in it."""
    return read_key == stored_key or read_key.startswith(f"{stored_key}.")
