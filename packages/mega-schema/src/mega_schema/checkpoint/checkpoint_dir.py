"""Layout of a run's folder: file names, and commit and removal of checkpoints.

docs/formats/checkpoint.md is the specification. Uses Python's standard library only: the process that writes
in the background imports it. Functions that write may raise OSError; callers that face a user wrap them in
`atomic_io.disk_errors`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_schema.atomic_io import atomic_write, partial_file, sync_folder, sync_tree, write_text
from mega_schema.checkpoint.side_files import (
    DIGEST,
    MANIFEST,
    RUN_CONFIG,
    TOKENIZER,
    TRAINER,
    describe_side_files,
    write_manifest,
)

__all__ = ["DIGEST", "MANIFEST", "RUN_CONFIG", "TOKENIZER", "TRAINER"]

FORMAT = 2
READABLE_FORMATS = (1, 2)  # formats
PIECE_FORMAT = 1  # of a shard file, in its own header
LATEST = "latest_checkpointed_iteration.txt"
EVENTS = "events.jsonl"  # a run's event log
# of the files in which ranks list what they wrote; the commit removes them
PIECE_LIST_SUFFIX = ".pieces"
_ITERATION = re.compile(r"iter_(\d{7,19})")
_SUPERSEDED = re.compile(r"iter_(\d{7,19})\.superseded")
_PIECE_PATTERN = "*.safetensors"


def iteration_folder(run: Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint."""
    return run / f"iter_{iteration:07d}"


def partial_folder(run: Path, iteration: int) -> Path:
    """Return the folder in which a checkpoint is written before its commit."""
    return run / f".iter_{iteration:07d}.partial"


def replaced_folder(run: Path, iteration: int) -> Path:
    """Return the temporary name of a checkpoint while another of the same iteration takes its place."""
    return run / f".iter_{iteration:07d}.replaced"


def superseded_folder(run: Path, iteration: int) -> Path:
    """Return the name of a checkpoint from which a later launch did not resume. Readers ignore it."""
    return run / f"iter_{iteration:07d}.superseded"


def pending_tracker(run: Path) -> Path:
    """Return the tracker of a running commit: it exists before the checkpoint has its final name."""
    return partial_file(run / LATEST)


def iteration_folders(run: Path) -> dict[int, Path]:
    """Return every folder with the name of a checkpoint, with any content, by iteration, ascending."""
    names = ((_ITERATION.fullmatch(path.name), path) for path in run.glob("iter_*") if path.is_dir())
    return dict(sorted((int(name[1]), path) for name, path in names if name))


def is_foreign(folder: Path) -> bool:
    """Whether a checkpoint's folder has files but no Mega file; Megatron uses the same folder names."""
    mega_files = (folder / MANIFEST, folder / TRAINER)
    return (
        not any(path.exists() for path in mega_files)
        and next(folder.glob(_PIECE_PATTERN), None) is None
        and next(folder.iterdir(), None) is not None
    )


def iterations(run: Path) -> list[int]:
    """Return the iterations of a run's checkpoints, ascending.

    Folders without a Mega manifest do not count.
    """
    names = (_ITERATION.fullmatch(path.parent.name) for path in run.glob(f"iter_*/{MANIFEST}"))
    return sorted(int(name[1]) for name in names if name)


def begin(run: Path, iteration: int) -> None:
    """Create the folder of a new checkpoint, and clean up what an earlier save or removal left unfinished."""
    run.mkdir(parents=True, exist_ok=True)
    for leftover in run.glob(".iter_*.replaced"):
        final = run / leftover.stem.removeprefix(".")
        if final.exists():
            shutil.rmtree(leftover)
        else:
            leftover.rename(final)
    for ending in ("partial", "removed"):
        for leftover in run.glob(f".iter_*.{ending}"):
            shutil.rmtree(leftover)
    partial_folder(run, iteration).mkdir()


def commit(
    run: Path,
    iteration: int,
    header: Mapping[str, Any],
    text_files: Mapping[str, str],
    tokenizer: Path | None,
    *,
    replace: bool = False,
) -> Path:
    """Assemble what the ranks wrote, and make it the run's latest checkpoint.

    Args:
        header: the manifest's fields besides files and tensors.
        text_files: other files of the checkpoint, by name.
        tokenizer: folder whose files are copied into it.
        replace: replace a checkpoint of this iteration; without it that is an error.

    Returns:
        the checkpoint's folder under its final name.

    Raises:
        OSError: it could not be written, a file is shorter than its rank wrote it, or this iteration has a
            checkpoint.
    """
    folder = partial_folder(run, iteration)
    if not replace and (final := iteration_folder(run, iteration)).exists():
        raise FileExistsError(errno.EEXIST, "there is a checkpoint already", str(final))
    lists = sorted(folder.glob(f"*{PIECE_LIST_SUFFIX}"))
    records = [json.loads(part.read_bytes()) for part in lists]
    files = {record["file"]: record["size"] for record in records}
    for name, size in files.items():
        if (actual := (folder / name).stat().st_size) != size:
            raise OSError(errno.EIO, f"{name} has {actual} bytes where {size} were written")
    for name, text in text_files.items():
        write_text(folder / name, text)
    if tokenizer is not None:
        shutil.copytree(tokenizer, folder / TOKENIZER)
        sync_tree(folder / TOKENIZER)
    for part in lists:
        part.unlink()
    manifest = {
        "format": FORMAT,
        "iteration": iteration,
        **header,
        "side_files": describe_side_files(folder),
        "files": files,
        "tensors": _tensors(records),
    }
    write_manifest(folder, json.dumps(manifest))
    sync_folder(folder)
    final = iteration_folder(run, iteration)
    with atomic_write(run / LATEST) as tracker:
        # before the folder has its final name: if the process is killed between the two renames, the new
        # checkpoint must not look like one that the run has rolled back
        write_text(tracker, f"{iteration}\n")
        _give_final_name(run, iteration)
    if (replaced := replaced_folder(run, iteration)).exists():
        shutil.rmtree(replaced)
    return final


def _give_final_name(run: Path, iteration: int) -> None:
    """Rename a checkpoint's `.partial` folder to its final name; undo that if it cannot be flushed."""
    folder, final = partial_folder(run, iteration), iteration_folder(run, iteration)
    replaced = replaced_folder(run, iteration)
    if final.exists():
        # a folder cannot be renamed onto another; between the two renames `latest_checkpoint` finds this one
        final.rename(replaced)
    try:
        folder.rename(final)
        sync_folder(run)
    except OSError:
        with contextlib.suppress(OSError):
            if not folder.exists():
                final.rename(folder)
            if replaced.exists():
                replaced.rename(final)
        raise


def supersede(run: Path, superseded: Iterable[int]) -> None:
    """Rename checkpoints to a name that readers ignore, replacing earlier ones of that name."""
    for iteration in superseded:
        folder, aside = iteration_folder(run, iteration), superseded_folder(run, iteration)
        if folder.exists():
            if aside.exists():
                shutil.rmtree(aside)
            folder.rename(aside)


def remove_superseded(run: Path, newest: int) -> None:
    """Remove superseded checkpoints of iterations up to `newest`, which the run has passed again."""
    for aside in run.glob("iter_*.superseded"):
        name = _SUPERSEDED.fullmatch(aside.name)
        if name and int(name[1]) <= newest:
            shutil.rmtree(aside)


def discard(run: Path, iteration: int) -> None:
    """Remove the files of a checkpoint that will not be committed."""
    shutil.rmtree(partial_folder(run, iteration), ignore_errors=True)


def to_prune(run: Path, newest: int, *, last: int, every: int | None) -> list[int]:
    """Return the iterations before `newest` to remove.

    Args:
        last: keep this many of the newest, `newest` included; 1 or more.
        every: also keep iterations that this divides.
    """
    assert last >= 1
    older = [iteration for iteration in iterations(run) if iteration < newest]
    return [i for i in older[: max(0, len(older) - (last - 1))] if not every or i % every]


def prune(run: Path, newest: int, *, last: int, every: int | None) -> list[int]:
    """Remove the checkpoints that `to_prune` names, after the commit of `newest`.

    Returns:
        the iterations removed. A checkpoint is renamed first, so that none is seen partly removed.
    """
    pruned = to_prune(run, newest, last=last, every=every)
    for iteration in pruned:
        aside = run / f".iter_{iteration:07d}.removed"
        iteration_folder(run, iteration).rename(aside)
        shutil.rmtree(aside)
    return pruned


def _tensors(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    spaces: dict[str, dict[str, Any]] = {}
    for record in records:
        entries = spaces.setdefault(record["namespace"], {})
        for piece in record["pieces"]:
            whole = piece.pop("whole")
            dtype = piece.pop("dtype")
            name = piece.pop("name")
            entry = entries.setdefault(name, {"shape": whole, "dtype": dtype, "pieces": []})
            entry["pieces"].append(piece)
    for space, entries in spaces.items():
        for name, entry in entries.items():
            written = sum(math.prod(piece["shape"]) for piece in entry["pieces"])
            assert written == math.prod(entry["shape"]), f"{space} {name}: {written} elements written"
    return spaces
