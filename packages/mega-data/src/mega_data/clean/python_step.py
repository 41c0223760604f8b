"""A step that is a Python function of the user: `--step python:my_filters:drop_tables`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

from mega_data.clean.step import Row, RowFunction, Verdict
from mega_data.readers.nested_keys import value_or_none
from mega_data.texts import dump_line
from mega_data.user_function import describe_error, hash_module, import_function
from mega_schema.errors import ConfigError, FormatError, MegaError

_NO_REASON = "by the function"
_RESULTS = "a document, None, or the reason to drop it as a string"


class DocumentError(MegaError):
    """A step cannot process a document; the run adds the file and the line."""

    def locate(self, place: str) -> FormatError:
        """Return the error with the place of the document."""
        return FormatError(place, f"{self.where}: {self.what}", **self.values, hint=self.hint)


@dataclass(frozen=True, slots=True)
class PythonStep:
    """Call a function with a copy of each document; it returns a document, None or a reason to drop it.

    The module is imported from the current folder or from the installed packages. The result must depend on
    the document alone.

    Attributes:
        function: MODULE:FUNCTION.
        code: hash of the module's file; set by the run, so that a changed function is not mixed with results
            of an earlier one. Modules that it imports are not hashed.
    """

    function: str = ""
    code: str = ""

    def start(self) -> RowFunction:
        where = f"step python: {self.function}"
        function = _open_function(self.function)

        def work(row: Row) -> Verdict:
            try:
                result = function(deepcopy(row.values))
            except MegaError:
                raise
            except (Exception, SystemExit) as error:
                raise DocumentError(where, "raised an error", found=describe_error(error)) from error
            if result is None or isinstance(result, str):
                return result or _NO_REASON
            if not isinstance(result, dict):
                found = type(result).__name__
                raise DocumentError(where, "returned another type", found=found, wanted=_RESULTS)
            if not _is_text(value_or_none(result, row.key)):
                raise DocumentError(where, f"returned a document without text under {row.key!r}")
            try:
                is_same = dump_line(result) == dump_line(row.values)
            except (TypeError, ValueError) as error:
                raise DocumentError(where, "returned a value that is not JSON", found=error) from error
            return [row] if is_same else [replace(row, values=result)]

        return work

    def with_code(self) -> PythonStep:
        """Return the step with the hash of its module's file."""
        return replace(self, code=hash_module(self.function)) if self.function.partition(":")[0] else self


def _open_function(name: str) -> Callable[..., object]:
    """Import MODULE:FUNCTION.

    Raises:
        ConfigError: the name has another form, or there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise ConfigError(
            "step python: function",
            "not a function",
            found=name or "nothing",
            wanted="MODULE:FUNCTION",
            hint="--step python:my_filters:drop_tables",
        )
    return import_function(f"step python: {name}", name)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(sentence, str) for sentence in value)
    )
