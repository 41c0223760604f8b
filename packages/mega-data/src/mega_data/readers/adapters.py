"""Adapters: functions of the user that convert a row of an input to a document.

    --adapter python:my_adapters:join_fields

    def join_fields(row: dict, path: str) -> dict | None

The function gets the values of a row and the path of its file. It returns the document, whose texts are
under --json-keys, or None to leave the row out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

from mega_data.readers.blocks import Block, Objects, RowError, Rows, find_texts
from mega_data.user_function import describe_error, hash_module, import_function
from mega_schema.errors import ConfigError

OPTION: Final = "--adapter"
_PREFIX: Final = "python:"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A function that converts rows, by its name: each process imports it.

    Attributes:
        function: MODULE:FUNCTION.
        code: hash of the module's file, so that a run is not resumed with another function.
    """

    function: str
    code: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the value of --adapter, and import the function.

        Raises:
            ConfigError: the value has another form, or there is no such module or function.
        """
        function = text.removeprefix(_PREFIX)
        module, _, name = function.partition(":")
        if not text.startswith(_PREFIX) or not module or not name.isidentifier():
            wanted = f"{_PREFIX}MODULE:FUNCTION"
            hint = f"{OPTION} {_PREFIX}my_adapters:join_fields"
            raise ConfigError(OPTION, "not a function", found=text or "nothing", wanted=wanted, hint=hint)
        _open_function(function)
        return cls(function, hash_module(function))


@lru_cache(maxsize=1)
def _open_function(name: str) -> Callable[..., object]:
    return import_function(f"{OPTION} {_PREFIX}{name}", name)


@dataclass(frozen=True, slots=True)
class AdaptedBlock:
    """A block whose rows an adapter converts.

    Attributes:
        path: of the input.
    """

    block: Block
    adapter: Adapter
    path: Path

    @property
    def end(self) -> int:
        return self.block.end

    @property
    def consumed_bytes(self) -> int:
        return self.block.consumed_bytes

    def rows(self, keys: Sequence[str]) -> Rows:
        objects = self.objects()
        rows = Rows(objects.count, objects.size)
        for number, document in objects.items:
            if isinstance(document, RowError):
                rows.errors.append(document)
                continue
            texts = find_texts(number, document, keys, repr(document))
            if isinstance(texts, RowError):
                rows.errors.append(texts)
            else:
                rows.numbers.append(number)
                rows.texts.append(texts)
        return rows

    def objects(self) -> Objects:
        """Return the documents."""
        objects = self.block.objects()
        function = _open_function(self.adapter.function)
        documents = list[tuple[int, dict[str, Any] | RowError]]()
        for number, row in objects.items:
            document = row if isinstance(row, RowError) else self._convert(function, number, row)
            if document is not None:
                documents.append((number, document))
        return Objects(objects.count, objects.size, documents)

    def _convert(
        self, function: Callable[..., object], number: int, row: dict[str, Any]
    ) -> dict[str, Any] | RowError | None:
        name = f"the adapter {self.adapter.function}"
        raw = repr(row)
        try:
            document = function(row, str(self.path))
        except (Exception, SystemExit) as error:
            return RowError(number, f"{name} raised an error", describe_error(error), "", raw)
        if document is not None and not isinstance(document, dict):
            found, wanted = type(document).__name__, "a document as a dict, or None"
            return RowError(number, f"{name} returned another type", found, wanted, raw, is_fatal=True)
        return document
