"""Lock a run's folder: only one process at a time, trainer or converter, writes checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mega_schema.checkpoint.checkpoint_dir import EVENTS
from mega_schema.errors import ConfigError
from mega_schema.file_lock import lock_file


@contextlib.contextmanager
def lock_run_folder(folder: Path, *, named_by: str = "--save") -> Iterator[None]:
    """Lock a run's folder, which must exist, while the block runs.

    Both the folder and the run's event log, if any, are locked: network file systems lock only files that are
    open for writing. File systems without locks are tolerated.

    Args:
        named_by: the flag or the argument that named the folder; begins the message.

    Raises:
        ConfigError: another process holds it.
    """
    with contextlib.ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        descriptors = [descriptor]
        if (folder / EVENTS).is_file():
            descriptors.append(stack.enter_context((folder / EVENTS).open("ab")).fileno())
        for descriptor in descriptors:
            try:
                lock_file(descriptor, folder)
            except BlockingIOError:
                raise ConfigError(
                    named_by,
                    "another process writes to this folder",
                    found=folder,
                    wanted="one writer at a time, a run or mega-ckpt",
                    hint=f"wait for it, end it, or {named_by} elsewhere"
                    if named_by.startswith("--")
                    else "wait for it, or end it",
                ) from None
        yield
