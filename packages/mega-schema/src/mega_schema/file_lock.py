"""Lock files and folders against other processes."""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path

log = logging.getLogger("mega.schema")


def lock_file(descriptor: int, path: Path, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file or folder. The system releases the lock when it is closed or the process ends.

    File systems without locks are tolerated.

    Args:
        path: names it in the log.
        shared: other processes may hold shared locks at the same time.
        wait: wait for the process that holds it.

    Returns:
        whether it is locked: False on a file system without locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        raise
    except OSError as error:
        log.info("%s cannot be locked (%s): a second writer would not be detected", path, error.strerror)
        return False
    return True
