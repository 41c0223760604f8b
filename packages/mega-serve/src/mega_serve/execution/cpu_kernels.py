"""Load the numba kernels: whether they can run here, and the folder of their compiled code."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError

CACHE_VARIABLE = "NUMBA_CACHE_DIR"  # numba's own


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The modules of compiled kernels: `numba_attention` and `numba_linear`."""

    attention: ModuleType
    linear: ModuleType


def has_numba() -> bool:
    """Whether numba is installed (the extra mega-serve[cpu])."""
    return find_spec("numba") is not None


def load_kernels(cache: Path | None = None) -> CpuKernels:
    """Return the numba kernels, with their compiled code cached in a private folder.

    A cached function is machine code that the next start runs, so nobody else may write to the folder.

    Args:
        cache: the folder; None takes $NUMBA_CACHE_DIR, else $XDG_CACHE_HOME/mega/numba, by default
            ~/.cache/mega/numba.

    Raises:
        ConfigError: numba is not installed, or others can read or write the folder.
    """
    if not has_numba():
        raise ConfigError("numba", "is not installed", hint=install_hint("mega-serve", "cpu"))
    folder = cache or default_cache()
    check_private_folder(folder)
    numba = import_module("numba")
    numba.config.CACHE_DIR = str(folder)
    # the default layer may be `workqueue`, which ends the process if two threads use it at once
    numba.config.THREADING_LAYER = "omp"
    package = "mega_serve.execution"
    return CpuKernels(import_module(f"{package}.numba_attention"), import_module(f"{package}.numba_linear"))


def default_cache() -> Path:
    """Return the folder of compiled kernels."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mega" / "numba"


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
