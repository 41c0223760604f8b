"""Errors of worker processes, passed on to the process that started them."""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress

from mega_schema.errors import MegaError


def portable_error(error: Exception) -> Exception:
    """An error that another process can raise, with the traceback of this one as a note.

    A pipe does not carry a traceback. A mistake of a person, and a file or disk that the system refuses, need
    none: they are one line.
    """
    if isinstance(error, MegaError | OSError):
        return error
    copy: Exception = RuntimeError(f"{type(error).__name__}: {error}")
    with suppress(Exception):  # an error whose own arguments cannot be sent
        if isinstance(same := pickle.loads(pickle.dumps(error)), Exception):
            copy = same
    copy.add_note(f"in a worker process:\n{''.join(traceback.format_exception(error))}")
    return copy
