"""Every error that a user can meet, each printed as one line.

MegaError
├── ConfigError      a flag or a key of the run file is wrong, or two of them disagree
├── AccessError      a remote place refuses access to a file
├── LayoutError      a shape cannot be split over the parallel layout
├── FormatError      a file on disk is missing or is not what its reader expects
│   └── CorruptFileError  a file or a checkpoint is damaged
└── RequestError     a client of the server asked for something that is not allowed

Our own mistakes are an `assert` or a plain exception: a traceback means a bug.
"""

from __future__ import annotations

from functools import partial

_ABSENT = object()


def escape_controls(text: str) -> str:
    """Write control characters, line breaks, text direction marks and lone surrogates as escapes.

    Text from files passes through here before a terminal prints it: an ESC sequence in a tensor's name could
    move the cursor or set the clipboard.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class MegaError(Exception):
    """An error message for the user: the wrong key or file, the value found, the value wanted, and a hint.

    Args:
        where: the key, flag or path that is wrong; it begins the line.
        what: the problem, in a few words.
        found: the value found.
        wanted: the value expected, or a description of accepted values.
        hint: what to paste or do to fix it.

    Attributes:
        values: found and wanted, if given.
    """

    def __init__(
        self, where: object, what: str, *, found: object = _ABSENT, wanted: object = _ABSENT, hint: str = ""
    ) -> None:
        self.where = where
        self.what = what
        self.found = found
        self.wanted = wanted
        self.hint = hint
        self.values = {n: v for n, v in (("found", found), ("wanted", wanted)) if v is not _ABSENT}
        values = [f"{word} {v}" for word, v in self.values.items()]
        line = f"{where}: {what}" + (": " + ", ".join(values) if values else "")
        # values come from files and requests: they must not break the line or control the terminal
        super().__init__(escape_controls(line + (f"; hint: {hint}" if hint else "")))

    def __reduce__(self) -> tuple[object, ...]:
        # a worker process pickles it to send it to the process that prints it
        values = {**self.values, "hint": self.hint}
        return partial(type(self), **values), (str(self.where), self.what)  # type: ignore[arg-type]


class ConfigError(MegaError):
    """A flag or a key of the run file is wrong, or two of them disagree."""


class AccessError(MegaError):
    """A remote place refuses access to a file."""


class LayoutError(MegaError):
    """A shape cannot be split over the parallel layout."""


class FormatError(MegaError):
    """A file on disk is missing or is not what its reader expects."""


class CorruptFileError(FormatError):
    """A file or a checkpoint is damaged; an earlier checkpoint may be intact."""


class RequestError(MegaError):
    """A client of the server asked for something that is not allowed."""
