"""The newest checkpoint of a run's folder, as its tracker file says."""

from __future__ import annotations

from pathlib import Path

from mega_schema.errors import DamageError, FormatError
from mega_schema.run_folder import (
    LATEST,
    MANIFEST,
    iteration_folder,
    iterations,
    pending_tracker,
    replaced_folder,
)

_TRACKER_BYTES = 100  # more than any iteration and white space
_DIGITS = 20  # more are no iteration, and Python refuses to read thousands of them


def latest_iteration(run: Path) -> int:
    """Iteration of the newest checkpoint of a run, as its tracker file says.

    A commit that was killed between its last two renames has left a checkpoint under its final name and the
    new tracker under a temporary one: that tracker counts.

    Raises:
        FormatError: the run holds no checkpoint, or the tracker file says something else than an iteration.
    """
    tracker = run / LATEST
    if not tracker.is_file():
        if not run.exists():
            raise FormatError(run, "no such folder", wanted="a checkpoint or the folder of a run")
        if found := iterations(run):
            hint = (
                f"echo {found[-1]} > {tracker}, once mega-ckpt verify {run}/iter_{found[-1]:07d} says sound"
            )
            raise FormatError(
                run, f"has no {LATEST}", found=f"checkpoints up to iteration {found[-1]}", hint=hint
            )
        half = sorted(run.glob(".iter_*.partial"))
        what = f"half-written {half[-1].name}" if half else "no checkpoint"
        raise FormatError(run, "holds no finished checkpoint", found=what, wanted=f"{LATEST} or {MANIFEST}")
    return max(_tracked(tracker), _pending(run))


def _pending(run: Path) -> int:
    """The iteration of a commit that lacks its last rename alone; -1 where there is none."""
    tracker, pending = run / LATEST, pending_tracker(run)
    try:
        iteration = _tracked(pending)
        completed = pending.stat().st_mtime_ns >= tracker.stat().st_mtime_ns
    except (OSError, FormatError):
        return -1
    return iteration if completed and (iteration_folder(run, iteration) / MANIFEST).is_file() else -1


def _tracked(tracker: Path) -> int:
    text = tracker.read_bytes()[:_TRACKER_BYTES].decode("utf-8", "replace").strip()
    if not (text.isascii() and text.isdecimal() and len(text) < _DIGITS):
        raise FormatError(
            tracker,
            "content",
            found=repr(text[:40]),
            wanted="an iteration number",
            hint="a Megatron `release` checkpoint has to be converted first" if text == "release" else "",
        )
    return int(text)


def latest(run: Path) -> Path:
    """Folder of the newest checkpoint of a run.

    Raises:
        FormatError: `latest_iteration` finds none; a DamageError where the folder it names is not there.
    """
    iteration = latest_iteration(run)
    folder, replaced = iteration_folder(run, iteration), replaced_folder(run, iteration)
    if not folder.exists() and (replaced / MANIFEST).is_file():
        return replaced
    if not (folder / MANIFEST).is_file():
        raise DamageError(
            folder,
            "is not a checkpoint of ours",
            found=f"no {MANIFEST}",
            wanted=f"the checkpoint {LATEST} names",
            hint=f"echo N > {run / LATEST} with the number of one that is whole",
        )
    return folder
