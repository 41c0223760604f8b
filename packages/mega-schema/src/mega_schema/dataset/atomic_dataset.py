"""Write the files of a dataset under temporary names, until all of them replace an earlier dataset."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from mega_schema.atomic_io import sync_folder, sync_tree
from mega_schema.dataset.dataset_info import sibling
from mega_schema.file_lock import lock_file
from mega_schema.outputs import check_output

SUFFIXES = (".bin", ".json", ".idx")
_LEFTOVER = re.compile(r"\.(?:bin|json|idx)\.\d+\.tmp")
# hidden, and a name that no user chooses: such a folder may be removed
_LEFTOVER_FOLDER = re.compile(r"\.\d+\.mega-(?:new|old)")


class StagedDataset:
    """`PREFIX.bin`, `.json` and `.idx` being written.

    Each file is locked while it is open, so that a later writer of the same prefix can tell the temporary
    files of a killed process: it removes those, and no others.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self._files: dict[str, IO[bytes]] = {}
        prefix.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(prefix)

    def path(self, suffix: str) -> Path:
        return sibling(self.prefix, f"{suffix}.{os.getpid()}.tmp")

    def open(self, suffix: str) -> IO[bytes]:
        """Open a file to write, one of SUFFIXES; `publish` or `discard` closes it."""
        assert suffix in SUFFIXES, suffix
        file = self.path(suffix).open("wb", buffering=1 << 20)
        self._files[suffix] = file
        with contextlib.suppress(BlockingIOError):  # a later writer looks whether we are alive
            lock_file(file.fileno(), self.path(suffix))
        return file

    def publish(self) -> None:
        """Flush all files to the disk and give them their final names, replacing an earlier dataset."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        # Readers open the index first: without one there is no dataset. So the old index goes before the
        # new payload appears, and the new index comes last.
        for suffix in (".idx", ".json"):
            sibling(self.prefix, suffix).unlink(missing_ok=True)
        for suffix in SUFFIXES:
            if suffix in self._files:
                self.path(suffix).replace(sibling(self.prefix, suffix))
        sync_folder(self.prefix.parent)

    def discard(self) -> None:
        """Close the files, and remove those that were not published."""
        for suffix, file in self._files.items():
            self.path(suffix).unlink(missing_ok=True)
            # a full disk may refuse the buffered data, which is not needed any more
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()


def _remove_leftovers(prefix: Path) -> None:
    for path in prefix.parent.iterdir():
        if not path.name.startswith(prefix.name) or not _LEFTOVER.fullmatch(path.name[len(prefix.name) :]):
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:  # BlockingIOError: its writer is alive
            if lock_file(file.fileno(), path):
                path.unlink()


@contextlib.contextmanager
def atomic_folder(folder: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield a new folder to write into, and rename it to `folder` if the block succeeds; else remove it.

    Temporary files of a killed process are removed first, and a folder that it had moved aside is restored.

    Args:
        is_ours: whether an existing, non-empty folder may be removed with its content.

    Raises:
        ConfigError: it may not.
    """
    check_output(str(folder), folder, "folder", is_ours=is_ours)
    folder = folder.resolve()  # "." has no name for siblings
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in [*folder.parent.iterdir()]:
        if leftover.name.startswith(f".{folder.name}") and _LEFTOVER_FOLDER.fullmatch(
            leftover.name[len(folder.name) + 1 :]
        ):
            with _try_lock(leftover) as is_locked:
                if is_locked and leftover.suffix == ".mega-old" and not folder.exists():
                    leftover.rename(folder)
                elif is_locked:
                    shutil.rmtree(leftover, ignore_errors=True)
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.mega-{word}") for word in ("new", "old"))
    new.mkdir()
    try:
        with _try_lock(new):
            yield new
            sync_tree(new)
            # a folder cannot replace one that is not empty, so the earlier one is renamed first
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _try_lock(folder: Path) -> Iterator[bool]:
    """Yield whether the folder was locked.

    It is not if another process holds it, or on a file system without locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    is_locked = False
    try:
        with contextlib.suppress(BlockingIOError):
            is_locked = lock_file(descriptor, folder)
        yield is_locked
    finally:
        os.close(descriptor)
