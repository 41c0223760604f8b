"""Every error a person can meet, each printed as one line.

MegaError
├── ConfigError      a flag or a key of the run file is wrong, or two of them disagree
├── LayoutError      a shape cannot be cut the way the parallel layout asks
├── FormatError      a file on disk is missing or is not what its reader expects
│   └── DamageError  a file or a checkpoint that was whole is damaged
└── RequestError     a client of the server asked for something it cannot have

What we got wrong ourselves is an `assert` or a plain exception: a traceback means a bug.
"""

from __future__ import annotations

from functools import partial

_ABSENT = object()


def escape_controls(text: str) -> str:
    """Write control characters, line breaks, text direction marks and lone surrogates as escapes.

    Text that comes from a file passes through here before a terminal sees it: an ESC sequence of a tensor's
    name would move the cursor or set the clipboard.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class MegaError(Exception):
    """What went wrong at a place a person can name.

    Args:
        where: the key, flag or path that is wrong; it begins the line.
        what: the property of it that is wrong, in a few words.
        found: the value that is there.
        wanted: the value, or a description of the values, that would do.
        hint: something that can be pasted or done to mend it.

    Attributes:
        values: found and wanted, where they are given.
    """

    def __init__(
        self, where: object, what: str, *, found: object = _ABSENT, wanted: object = _ABSENT, hint: str = ""
    ) -> None:
        self.where, self.what, self.found, self.wanted, self.hint = where, what, found, wanted, hint
        self.values = {n: v for n, v in (("found", found), ("wanted", wanted)) if v is not _ABSENT}
        values = [f"{word} {v}" for word, v in self.values.items()]
        line = f"{where}: {what}" + (": " + ", ".join(values) if values else "")
        # values come from files and requests: one must not break the line, nor steer a terminal
        super().__init__(escape_controls(line + (f"; hint: {hint}" if hint else "")))

    def __reduce__(self) -> tuple[object, ...]:
        # raised in a worker process, it has to reach the one that speaks
        values = {**self.values, "hint": self.hint}
        return partial(type(self), **values), (str(self.where), self.what)  # type: ignore[arg-type]


class ConfigError(MegaError):
    """A flag or a key of the run file is wrong, or two of them disagree."""


class LayoutError(MegaError):
    """A shape cannot be cut the way the parallel layout asks."""


class FormatError(MegaError):
    """A file on disk is missing or is not what its reader expects."""


class CorruptFileError(FormatError):
    """A file that was whole is damaged, or a checkpoint; one before it may be whole."""


class RequestError(MegaError):
    """A client of the server asked for something it cannot have."""
