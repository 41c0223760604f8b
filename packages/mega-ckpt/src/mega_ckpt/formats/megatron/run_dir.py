"""A folder of Megatron's runs: the tracker, and an iteration that appears whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mega_ckpt.checkpoint.output_dir import other_checkpoints
from mega_schema.disk import on_disk, replacing, sync_folder, sync_tree
from mega_schema.errors import ConfigError, FormatError
from mega_schema.foreign_files import MOST_BESIDE, read_foreign
from mega_schema.outputs import check_output
from mega_schema.run_folder import LATEST as TRACKER
from mega_schema.run_folder import MANIFEST
from mega_schema.run_lock import hold_run_folder

RELEASE = "release"


def folder_of(load: Path, has: Callable[[Path], bool], wanted: str) -> Path:
    """The folder of a checkpoint: `load` itself, or the one that its tracker names.

    Args:
        has: whether a folder is one of the format's.
        wanted: what is in such a folder.

    Raises:
        FormatError: there is none.
    """
    if not load.is_dir():
        raise FormatError(load, "no such folder")
    if has(load):
        return load
    tracker = load / TRACKER
    ours = (load / MANIFEST).is_file() or any(load.glob(f"iter_*/{MANIFEST}"))
    if ours or not tracker.is_file():
        hint = "--from mega" if ours else ""
        raise FormatError(load, "holds no such checkpoint", wanted=f"{TRACKER}, or {wanted}", hint=hint)
    text = read_foreign(tracker, MOST_BESIDE).decode("utf-8", "replace").strip()
    if text != RELEASE and not (text.isascii() and text.isdigit() and len(text) < 19):
        raise FormatError(tracker, "is not an iteration", found=text[:40], wanted=f"a number, or {RELEASE}")
    name = name_of(None if text == RELEASE else int(text))
    folder, replaced = load / name, _replaced(load, name)
    if not folder.exists() and has(replaced):
        return replaced
    if not has(folder):
        others = {"--from torch_dist": ".metadata", "--from megatron": "mp_rank_*"}
        hint = next((flag for flag, mark in others.items() if any(folder.glob(mark))), "")
        raise FormatError(folder, "holds no such checkpoint", wanted=wanted, hint=hint)
    return folder


def name_of(iteration: int | None) -> str:
    """Of a checkpoint's folder; None: of a model that no training goes on from."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def _replaced(run: Path, name: str) -> Path:
    """Where a checkpoint waits while one of the same name takes its place."""
    return run / f".{name}.replaced"


def released(folder: Path) -> bool:
    """Whether no training goes on from a checkpoint's folder."""
    return folder.name in (RELEASE, _replaced(folder, RELEASE).name)


def check_free(run: Path, iteration: int | None, *, force: bool) -> None:
    """Refuse a run that has checkpoints; with `force`, only one of ours.

    Raises:
        ConfigError: it has, or it is no folder.
    """
    check_output("--save", run, "folder", is_ours=lambda _: True)
    places = (run / name_of(iteration), _replaced(run, name_of(iteration)))
    for folder in (run, *sorted(run.glob("iter_*")), *places):
        if (folder / MANIFEST).exists():
            raise ConfigError("--save", "holds a checkpoint of ours", found=folder, wanted="another folder")
    for folder in places:
        if folder.exists() and not force:
            hint = "add --force to replace it"
            raise ConfigError("--save", "there is a checkpoint already", found=folder, hint=hint)
    if (run / TRACKER).exists() and not force:
        raise other_checkpoints(run / TRACKER)


@contextmanager
def placing(run: Path, iteration: int | None, *, force: bool) -> Iterator[Path]:
    """A new folder to write a checkpoint into, which has its name once the block has ended well.

    A block that fails leaves the run as it was. What a killed process left of such a folder is removed first,
    and what it had put aside comes back.

    Args:
        force: replace the checkpoint of that name.

    Raises:
        ConfigError: another process writes to the run's folder, or has written this checkpoint.
        MegaError: the disk is full, or would not write for another reason.
    """
    made = not run.exists()
    with on_disk(run):
        run.mkdir(parents=True, exist_ok=True)
        with hold_run_folder(run):  # before what others left half-written is removed
            try:
                check_free(run, iteration, force=force)
                with _placing_held(run, iteration) as partial:
                    yield partial
            except BaseException:
                if made:
                    with contextlib.suppress(OSError):
                        run.rmdir()
                raise


@contextmanager
def _placing_held(run: Path, iteration: int | None) -> Iterator[Path]:
    name = name_of(iteration)
    partial, replaced, final = run / f".{name}.partial", _replaced(run, name), run / name
    try:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        for left in (partial, replaced):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        yield partial
        sync_tree(partial)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        sync_folder(run)
        with replacing(run / TRACKER) as tracker:
            tracker.write_text(RELEASE if iteration is None else str(iteration), "utf-8")
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:  # an interruption too must leave nothing behind
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
