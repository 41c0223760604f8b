"""Compile C++ sources with this machine's compiler, cache the library, and load it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

log = logging.getLogger("mega.schema")

# without instructions of one CPU: other machines read the same cache
PORTABLE_FLAGS: Final = ("-std=c++17", "-O3", "-fPIC")
_TIMEOUT_SECONDS: Final = 120


class CompileError(Exception):
    """The library cannot be compiled or loaded; the text gives the reason."""


def load_library(folder: str, flags: Sequence[str]) -> ctypes.CDLL:
    """Return the library of all C++ sources of a folder, compiled unless it is in the cache.

    The cache is $XDG_CACHE_HOME/mega, by default ~/.cache/mega. A library's key is a digest of the sources,
    the headers, the compiler's path and the flags. The compiler is $CXX, else g++.

    Raises:
        CompileError: there is no compiler, it failed, or the library cannot be written or loaded.
    """
    compiler = _compiler()
    files = sorted((*Path(folder).glob("*.h"), *Path(folder).glob("*.cpp")))
    key = hashlib.sha256(" ".join((compiler, *flags)).encode())
    for file in files:
        key.update(file.read_bytes())
    path = _cache() / f"{Path(folder).name}-{key.hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _compile([compiler, *flags], [file for file in files if file.suffix == ".cpp"], path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"{path} cannot be loaded: {error}") from None


@cache
def cpu_vendor() -> str:
    """Return this CPU's vendor by Linux's name, "AuthenticAMD" or "GenuineIntel"; "" if it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")


def _compiler() -> str:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise CompileError(f"no C++ compiler: {name} is not on PATH; hint: apt-get install g++")
    return path


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mega"


def _compile(command: Sequence[str], sources: Sequence[Path], path: Path) -> None:
    """Compile and link the library. Concurrent processes each replace the file with an equal one."""
    start = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}.") as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        for source, object_file in zip(sources, objects, strict=True):
            _run([*command, "-c", str(source), "-o", object_file])
        # link without -fopenmp: torch has already loaded the OpenMP runtime
        library = Path(folder, path.name)
        _run([command[0], "-shared", *objects, "-o", str(library)])
        library.replace(path)
    log.info("compiled %s with %s in %.1f s", path.name, command[0], time.perf_counter() - start)


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise CompileError(f"{command[0]} took more than {_TIMEOUT_SECONDS} s") from None
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or ["no error message"]
        raise CompileError(f"{command[0]} failed: {lines[0][:200]}")
