"""Find the newest checkpoint of a run's folder by its tracker file."""

from __future__ import annotations

from pathlib import Path

from mega_schema.checkpoint.checkpoint_dir import (
    LATEST,
    MANIFEST,
    iteration_folder,
    iterations,
    pending_tracker,
    replaced_folder,
)
from mega_schema.checkpoint.formats import FORMAT_TITLES, conversion_command, detect_format
from mega_schema.errors import CorruptFileError, FormatError

_WANTED = "a checkpoint or the folder of a run"
_WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".safetensors")
_TRACKER_BYTES = 100  # longer than any iteration with white space
_DIGITS = 20  # longer than any iteration; Python refuses to parse thousands of digits


def latest_iteration(run: Path) -> int:
    """Return the iteration of a run's newest checkpoint, from its tracker file.

    A commit killed between its last two renames leaves a checkpoint under its final name and the new tracker
    under a temporary one: that tracker counts.

    Raises:
        FormatError: the run holds no checkpoint, or the tracker file does not hold an iteration. The hint
            gives a command that repairs it.
    """
    tracker = run / LATEST
    if tracker.is_file():
        return max(_read_tracker(tracker), _pending_iteration(run))
    if not run.is_dir():
        raise _missing_folder_error(run)
    if saved := iterations(run):
        up_to = f"checkpoints up to iteration {saved[-1]}"
        raise FormatError(run, f"has no {LATEST}", found=up_to, hint=_remedy(run))
    if format_name := _foreign_format(run):
        what = "is a checkpoint of another program"
        raise FormatError(run, what, found=FORMAT_TITLES[format_name], wanted=_WANTED, hint=_remedy(run))
    partial = sorted(run.glob(".iter_*.partial"))
    what = f"half-written {partial[-1].name}" if partial else "no checkpoint"
    hint = "wait for the run's first save, or restart it" if partial else _hint_run_below(run)
    raise FormatError(
        run, "contains no finished checkpoint", found=what, wanted=f"{LATEST} or {MANIFEST}", hint=hint
    )


def _missing_folder_error(run: Path) -> FormatError:
    if run.exists():
        return FormatError(run, "is a file", wanted=_WANTED, hint=_hint_instead_of_file(run))
    existing = next(folder for folder in (*run.parents, Path()) if folder.is_dir())
    hint = f"ls -d {existing}/iter_*" if iterations(existing) else f"ls {existing}"
    return FormatError(run, "no such folder", wanted=_WANTED, hint=hint)


def _hint_instead_of_file(path: Path) -> str:
    """Return a hint for a file that is given as a checkpoint: a file of one, or a whole model."""
    if (path.parent / MANIFEST).is_file():
        return f"name {path.parent}"
    if path.suffix in _WEIGHT_SUFFIXES and (format_name := _foreign_format(path.parent)):
        return conversion_command(path.parent, format_name)
    if path.suffix == ".bin":
        return f"a model of llama2.c needs {conversion_command(path, 'llama2c')}"
    return f"ls {path.parent}"


def _remedy(run: Path) -> str:
    """Return a hint to repair a run's tracker, or to convert another program's checkpoint."""
    if format_name := _foreign_format(run):
        return conversion_command(run, format_name)
    if not (saved := iterations(run)):
        return f"name another folder: {run} has no checkpoint"
    folder = iteration_folder(run, saved[-1])
    return f"echo {saved[-1]} > {run / LATEST}, once mega-ckpt verify {folder} reports it as sound"


def _foreign_format(run: Path) -> str | None:
    format_name = detect_format(run)
    return None if format_name == "mega" else format_name


def _hint_run_below(folder: Path) -> str:
    """Return a hint that names a run's folder inside this folder."""
    below = min(folder.glob(f"*/{LATEST}"), default=None)
    return (
        f"name a run's folder, such as {below.parent}" if below else "name a folder that a run has saved to"
    )


def _pending_iteration(run: Path) -> int:
    """Return the iteration of a commit that lacks only its last rename; -1 if there is none."""
    tracker = run / LATEST
    pending = pending_tracker(run)
    try:
        iteration = _read_tracker(pending)
        completed = pending.stat().st_mtime_ns >= tracker.stat().st_mtime_ns
    except (OSError, FormatError):
        return -1
    return iteration if completed and (iteration_folder(run, iteration) / MANIFEST).is_file() else -1


def _read_tracker(tracker: Path) -> int:
    text = tracker.read_bytes()[:_TRACKER_BYTES].decode("utf-8", "replace").strip()
    if not (text.isascii() and text.isdecimal() and len(text) < _DIGITS):
        raise FormatError(
            tracker,
            "content",
            found=repr(text[:40]),
            wanted="an iteration number",
            hint=_remedy(tracker.parent),
        )
    return int(text)


def latest_checkpoint(run: Path) -> Path:
    """Return the folder of a run's newest checkpoint.

    Raises:
        FormatError: `latest_iteration` finds none; a CorruptFileError if the folder it names does not exist.
    """
    iteration = latest_iteration(run)
    folder, replaced = iteration_folder(run, iteration), replaced_folder(run, iteration)
    if not folder.exists() and (replaced / MANIFEST).is_file():
        return replaced
    if not (folder / MANIFEST).is_file():
        raise CorruptFileError(
            folder,
            "is not a Mega checkpoint",
            found=f"no {MANIFEST}",
            wanted=f"the checkpoint {LATEST} names",
            hint=_remedy(run),
        )
    return folder
