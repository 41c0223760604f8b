"""Remove old checkpoints of a run by the trainer's rule (`checkpoint_dir.to_prune`)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from mega_schema.checkpoint import checkpoint_dir
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.run_lock import lock_run_folder
from mega_schema.checkpoint.tracker import latest_checkpoint, latest_iteration


@dataclass(frozen=True, slots=True)
class PruneResult:
    """Iterations removed and remaining, ascending, and the bytes that were freed."""

    removed: list[int]
    remaining: list[int]
    bytes: int


def prune(run: Path, *, last: int, every: int | None = None, dry_run: bool = False) -> PruneResult:
    """Remove checkpoints older than the newest that the rule does not keep.

    Args:
        last: how many of the newest stay; 1 or more.
        every: those whose iteration this divides stay too.
        dry_run: remove nothing.

    Raises:
        FormatError: the newest is not there or not whole: an older one may be needed then.
        ConfigError: a run or another mega-ckpt writes there now.
    """
    latest_iteration(run)  # is there at all, before it is locked
    with contextlib.nullcontext() if dry_run else lock_run_folder(run, named_by="RUN"):
        return _prune_locked(run, last, every, dry_run=dry_run)


def _prune_locked(run: Path, last: int, every: int | None, *, dry_run: bool) -> PruneResult:
    newest = latest_iteration(run)
    Checkpoint(latest_checkpoint(run))
    outdated = checkpoint_dir.to_prune(run, newest, last=last, every=every)
    size = sum(_folder_bytes(checkpoint_dir.iteration_folder(run, iteration)) for iteration in outdated)
    remaining = [iteration for iteration in checkpoint_dir.iterations(run) if iteration not in outdated]
    if not dry_run:
        checkpoint_dir.prune(run, newest, last=last, every=every)
    return PruneResult(outdated, remaining, size)


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
