"""Checkpoints of a run that are not to be kept, removed by the trainer's rule (`run_folder.outdated`)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from mega_schema import run_folder
from mega_schema.checkpoint import Checkpoint
from mega_schema.run_lock import hold_run_folder
from mega_schema.tracker import latest, latest_iteration


@dataclass(frozen=True, slots=True)
class Pruned:
    """Iterations removed and kept, ascending, and the bytes that this set free."""

    removed: list[int]
    kept: list[int]
    bytes: int


def prune(run: Path, *, last: int, every: int | None = None, dry_run: bool = False) -> Pruned:
    """Remove what is not to be kept of the checkpoints before the newest.

    Args:
        last: so many of the newest stay; 1 or more.
        every: those whose iteration this divides stay too.
        dry_run: only say which.

    Raises:
        FormatError: the newest is not there or not whole: an older one may be needed then.
        ConfigError: a run or another mega-ckpt writes there now.
    """
    latest_iteration(run)  # is there at all, before it is locked
    with contextlib.nullcontext() if dry_run else hold_run_folder(run, named_by="RUN"):
        return _prune_held(run, last, every, dry_run=dry_run)


def _prune_held(run: Path, last: int, every: int | None, *, dry_run: bool) -> Pruned:
    newest = latest_iteration(run)
    Checkpoint(latest(run))
    gone = run_folder.outdated(run, newest, last=last, every=every)
    size = sum(_size(run_folder.iteration_folder(run, iteration)) for iteration in gone)
    kept = [iteration for iteration in run_folder.iterations(run) if iteration not in gone]
    if not dry_run:
        run_folder.prune(run, newest, last=last, every=every)
    return Pruned(gone, kept, size)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
