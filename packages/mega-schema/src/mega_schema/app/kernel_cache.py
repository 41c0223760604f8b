"""The folder of compiled kernels, which only this user may use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mega_schema.errors import ConfigError

CACHE_VARIABLE = "NUMBA_CACHE_DIR"  # numba's own


def private_cache(folder: str | None = None) -> str:
    """Return the folder of compiled kernels, created if need be.

    Args:
        folder: None takes `default_cache()`.

    Raises:
        ConfigError: others can use it, see `check_private_folder`.
    """
    path = default_cache() if folder is None else Path(folder)
    check_private_folder(path)
    return str(path)


def default_cache() -> Path:
    """Return $NUMBA_CACHE_DIR, else $XDG_CACHE_HOME/mega/numba, by default ~/.cache/mega/numba."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mega" / "numba"


def has_compiled_kernels(folder: Path | None = None) -> bool:
    """Whether the folder holds compiled kernels: without any, the first use of each takes seconds.

    Args:
        folder: None takes `default_cache()`.
    """
    return any((folder or default_cache()).glob("*/*.nbi"))  # numba's indices, in a folder for each module


def check_private_folder(folder: Path) -> None:
    """Create a folder that only this user can use, or check that it is one.

    Raises:
        ConfigError: it is a link, is not a folder, has another owner, or others have access to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(folder, "the cache of compiled kernels is not a folder", wanted="a folder, no link")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            folder, "owner of the cache of compiled kernels", found=status.st_uid, wanted=os.geteuid()
        )
    if mode & 0o077:
        raise ConfigError(
            folder,
            "others have access to the cache of compiled kernels",
            found=f"mode {mode:04o}",
            wanted="mode 0700",
            hint=f"chmod 700 {folder}",
        )
