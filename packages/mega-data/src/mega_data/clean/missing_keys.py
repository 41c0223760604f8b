"""Note the steps whose key no document has: it is probably mistyped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from mega_data.clean.step import Row, RowFunction, Verdict
from mega_data.readers.nested_keys import value_or_none

MISSING_KEYS: Final = "missing_keys"  # in the result of a task
_MAX_KEYS: Final = 10  # of the first document, in the note


class KeyWatch:
    """The function of a step; notes whether a document has the step's key.

    Attributes:
        key: of the step; "" for none.
        is_found: a document has it.
        keys: of the first document without it.
    """

    def __init__(self, function: RowFunction, key: str) -> None:
        self.function = function
        self.key = key
        self.is_found = not key
        self.keys = list[str]()

    def __call__(self, row: Row) -> Verdict:
        if not self.is_found:
            self.is_found = value_or_none(row.values, self.key) is not None
            self.keys = self.keys or list(row.values)[:_MAX_KEYS]
        return self.function(row)


def watch_keys(steps: Iterable[Any]) -> list[KeyWatch]:
    """Start steps, each with a watch of its key."""
    return [KeyWatch(step.start(), getattr(step, "key", "")) for step in steps]


def missing_keys(watches: Sequence[KeyWatch]) -> dict[str, list[str]]:
    """Return the keys of the first document for each step, by number, whose key no document of a task has."""
    return {
        str(number): watch.keys for number, watch in enumerate(watches) if watch.keys and not watch.is_found
    }


def find_missing_keys(step: int, shards: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of a document if no document that reached a step has the step's key, else none.

    Args:
        shards: results of the tasks of a pass.
    """
    keys = list[str]()
    for shard in shards:
        if shard["steps"][step]["documents_in"]:
            missing = shard.get(MISSING_KEYS, {}).get(str(step))
            if not missing:
                return []
            keys = keys or missing
    return keys
