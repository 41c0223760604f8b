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
    """The iterations removed and remaining, ascending, and the bytes freed."""

    removed: list[int]
    remaining: list[int]
    bytes: int


def prune(run: Path, *, last: int, every: int | None = None, dry_run: bool = False) -> PruneResult:
    """Remove the checkpoints older than the newest that the rule does not keep.

    Args:
        last: number of newest checkpoints to keep; 1 or more.
        every: also keep iterations that are multiples of this.
        dry_run: remove nothing.

    Raises:
        FormatError: the newest checkpoint is missing or incomplete: an older one may be needed.
        ConfigError: another process writes to the run's folder.
    """
    latest_iteration(run)  # check that it exists before it is locked
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
