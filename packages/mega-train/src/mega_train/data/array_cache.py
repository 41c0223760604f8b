"""Cache of numpy arrays on disk, keyed by a hash of the values they are computed from; mapped by every rank.

    FOLDER/NAME-KEY/ARRAY.npy     the arrays
    FOLDER/NAME-KEY/made-of.json  the values whose hash is KEY, for people
    FOLDER/.lock                  locked by the process of a machine that builds an entry

A folder gets its name once it is complete and flushed. The key covers all values that determine the arrays,
so a cached entry equals a new one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mega_schema.atomic_io import disk_errors, sync_folder
from mega_schema.errors import MegaError
from mega_schema.file_lock import lock_file

Arrays = dict[str, NDArray[Any]]
Files = Mapping[str, tuple[DTypeLike, tuple[int, ...]]]

VALUES_FILE = "made-of.json"
_PARTIAL_SUFFIX = ".partial"

log = logging.getLogger("mega.train")


def load_or_build(
    folders: Sequence[Path], name: str, values: Mapping[str, object], build: Callable[[Path], None]
) -> Arrays:
    """Load the cached arrays of `values`, as read-only memory maps; build them if no folder has them.

    Args:
        folders: searched in this order. New arrays go to the first that is writable.
        name: prefix of the cache entry, for people.
        values: everything the arrays are computed from; must be JSON serialisable.
        build: writes the arrays as .npy files into a folder.

    Raises:
        MegaError: no folder can be written to, or the disk is full.
    """
    text = json.dumps(values, sort_keys=True)
    entry = f"{name}-{blake2b(text.encode(), digest_size=16).hexdigest()}"
    arrays = _load_first(folders, entry)
    if arrays is not None:
        return arrays
    folder = _first_writable(folders)
    with _lock_folder(folder):
        arrays = _load_first([folder], entry)  # another process may have built it meanwhile
        if arrays is None:
            _build(folder, entry, text, build)
            arrays = _load_arrays(folder / entry)
    return arrays


def write_arrays(
    folder: Path,
    files: Files,
    blocks: Iterable[Mapping[str, NDArray[Any]]],
) -> None:
    """Write .npy files side by side.

    Args:
        files: dtype and shape of each file, by name without suffix.
        blocks: blocks of rows of every file.
    """
    with contextlib.ExitStack() as stack:
        handles = {name: stack.enter_context((folder / f"{name}.npy").open("wb")) for name in files}
        for name, (dtype, shape) in files.items():
            descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
            head = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(handles[name], head)
        rows = dict.fromkeys(files, 0)
        for block in blocks:
            for name, (dtype, _) in files.items():
                np.ascontiguousarray(block[name], dtype).tofile(handles[name])
                rows[name] += len(block[name])
    assert rows == {name: shape[0] for name, (_, shape) in files.items()}, rows


def _load_first(folders: Sequence[Path], entry: str) -> Arrays | None:
    for folder in folders:
        if not (folder / entry).is_dir():
            continue
        try:
            return _load_arrays(folder / entry)
        except (ValueError, EOFError) as error:
            log.warning("%s is damaged and is rebuilt: %s", folder / entry, error)
            with contextlib.suppress(OSError):
                shutil.rmtree(folder / entry)
    return None


def _load_arrays(folder: Path) -> Arrays:
    """Load the arrays of a folder; ValueError or EOFError if a file is incomplete."""
    files = sorted(folder.glob("*.npy"))
    if not files:
        raise ValueError("no arrays")
    # np.load cannot map an empty array; elements of a plain ndarray view are faster to read than np.memmap's
    return {file.stem: np.load(file, "r" if _count_rows(file) else None).view(np.ndarray) for file in files}


def _count_rows(path: Path) -> int:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
    return shape[0]


def _build(folder: Path, entry: str, text: str, build: Callable[[Path], None]) -> None:
    for stale in folder.glob(f".*{_PARTIAL_SUFFIX}"):  # its writer is dead: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    partial = folder / f".{entry}.{os.getpid()}{_PARTIAL_SUFFIX}"
    try:
        with disk_errors(folder):
            partial.mkdir()
            build(partial)
            (partial / VALUES_FILE).write_text(text, "utf-8")
            for path in partial.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(partial)
            try:
                partial.rename(folder / entry)
            except OSError:
                if not (folder / entry).is_dir():  # on a file system without locks another may be first
                    raise
            sync_folder(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _first_writable(folders: Sequence[Path]) -> Path:
    reasons = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
            reasons.append("Permission denied")
        except OSError as error:
            reasons.append(str(error.strerror))
    raise MegaError(
        "--data-cache-path",
        "the sample order cannot be cached",
        found=f"{folders[0]}: {reasons[0]}",
        wanted="a folder that can be written to",
        hint="--data-cache-path DIR",
    )


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder among the processes of this machine; does nothing on file systems without locks."""
    try:
        number = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's, in a shared folder
        number = os.open(folder / ".lock", os.O_RDONLY)
    try:
        lock_file(number, folder, wait=True)
        yield
    finally:
        os.close(number)
