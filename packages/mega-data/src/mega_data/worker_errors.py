"""Send errors of worker processes to the parent process."""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress

from mega_schema.errors import MegaError


def portable_error(error: Exception) -> Exception:
    """Return an error that another process can raise, with the traceback of this one as a note.

    A pipe does not carry a traceback. User errors and errors of files or disks need none: they are one line.
    """
    if isinstance(error, MegaError | OSError):
        return error
    copy: Exception = RuntimeError(f"{type(error).__name__}: {error}")
    with suppress(Exception):  # the error may not be picklable
        if isinstance(same := pickle.loads(pickle.dumps(error)), Exception):
            copy = same
    copy.add_note(f"in a worker process:\n{''.join(traceback.format_exception(error))}")
    return copy
