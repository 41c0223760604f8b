"""A Megatron run folder: the tracker file, and checkpoint folders that are written atomically."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mega_ckpt.checkpoint.output_dir import other_checkpoints_error
from mega_schema.atomic_io import atomic_write, disk_errors, sync_folder, sync_tree
from mega_schema.checkpoint.checkpoint_dir import LATEST as TRACKER
from mega_schema.checkpoint.checkpoint_dir import MANIFEST
from mega_schema.checkpoint.foreign_files import MAX_COMPANION_BYTES, read_foreign
from mega_schema.checkpoint.run_lock import lock_run_folder
from mega_schema.errors import ConfigError, FormatError
from mega_schema.outputs import check_output

RELEASE = "release"


def find_checkpoint_dir(load: Path, has: Callable[[Path], bool], wanted: str) -> Path:
    """Return the folder of a checkpoint: `load` itself, or the one that its tracker names.

    Args:
        has: returns whether a folder is a checkpoint of the format.
        wanted: description of the content of such a folder, for the message.

    Raises:
        FormatError: there is no checkpoint.
    """
    if not load.is_dir():
        raise FormatError(load, "no such folder")
    if has(load):
        return load
    tracker = load / TRACKER
    is_mega = (load / MANIFEST).is_file() or any(load.glob(f"iter_*/{MANIFEST}"))
    if is_mega or not tracker.is_file():
        hint = "--from mega" if is_mega else ""
        raise FormatError(
            load, "contains no checkpoint of this format", wanted=f"{TRACKER}, or {wanted}", hint=hint
        )
    text = read_foreign(tracker, MAX_COMPANION_BYTES).decode("utf-8", "replace").strip()
    if text != RELEASE and not (text.isascii() and text.isdigit() and len(text) < 19):
        raise FormatError(tracker, "is not an iteration", found=text[:40], wanted=f"a number, or {RELEASE}")
    name = checkpoint_dir_name(None if text == RELEASE else int(text))
    folder = load / name
    replaced = _replaced_dir(load, name)
    if not folder.exists() and has(replaced):
        return replaced
    if not has(folder):
        others = {"--from torch_dist": ".metadata", "--from megatron": "mp_rank_*"}
        hint = next((flag for flag, mark in others.items() if any(folder.glob(mark))), "")
        raise FormatError(folder, "contains no checkpoint of this format", wanted=wanted, hint=hint)
    return folder


def checkpoint_dir_name(iteration: int | None) -> str:
    """Return the name of an iteration's folder; None: a release, which has no iteration."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def _replaced_dir(run: Path, name: str) -> Path:
    """Return the temporary path of a checkpoint while another of the same name replaces it."""
    return run / f".{name}.replaced"


def is_release(folder: Path) -> bool:
    """Return whether the folder is a release, from which training does not resume."""
    return folder.name in (RELEASE, _replaced_dir(folder, RELEASE).name)


def check_run_dir(run: Path, iteration: int | None, *, force: bool) -> None:
    """Refuse a run with checkpoints; with `force`, only one with Mega checkpoints.

    Raises:
        ConfigError: the run has checkpoints, or is not a folder.
    """
    check_output("--save", run, "folder", is_ours=lambda _: True)
    candidates = (run / checkpoint_dir_name(iteration), _replaced_dir(run, checkpoint_dir_name(iteration)))
    for folder in (run, *sorted(run.glob("iter_*")), *candidates):
        if (folder / MANIFEST).exists():
            raise ConfigError("--save", "contains a Mega checkpoint", found=folder, wanted="another folder")
    for folder in candidates:
        if folder.exists() and not force:
            hint = "add --force to replace it"
            raise ConfigError("--save", "there is a checkpoint already", found=folder, hint=hint)
    if (run / TRACKER).exists() and not force:
        raise other_checkpoints_error(run / TRACKER)


@contextmanager
def atomic_checkpoint_dir(run: Path, iteration: int | None, *, force: bool) -> Iterator[Path]:
    """Yield a new checkpoint folder, which gets its final name if the block succeeds.

    If the block fails, the run is unchanged. Temporary folders of a killed process are removed first, and a
    checkpoint that it had moved aside is restored.

    Args:
        force: replace the checkpoint of that name.

    Raises:
        ConfigError: another process writes to the run's folder, or has written this checkpoint.
        MegaError: the disk is full, or refused the write for another reason.
    """
    is_new = not run.exists()
    with disk_errors(run):
        run.mkdir(parents=True, exist_ok=True)
        with lock_run_folder(run):  # before half-written folders of others are removed
            try:
                check_run_dir(run, iteration, force=force)
                with _atomic_dir_locked(run, iteration) as partial:
                    yield partial
            except BaseException:
                if is_new:
                    with contextlib.suppress(OSError):
                        run.rmdir()
                raise


@contextmanager
def _atomic_dir_locked(run: Path, iteration: int | None) -> Iterator[Path]:
    name = checkpoint_dir_name(iteration)
    partial = run / f".{name}.partial"
    replaced = _replaced_dir(run, name)
    final = run / name
    try:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        yield partial
        sync_tree(partial)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        sync_folder(run)
        with atomic_write(run / TRACKER) as tracker:
            tracker.write_text(RELEASE if iteration is None else str(iteration), "utf-8")
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:  # also after an interruption
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
