"""A run's folder: what things in it are called, and how a checkpoint comes into it and goes.

docs/formats/checkpoint.md is the specification. Of Python's own library alone, as `disk` is: the process
that writes in the background imports it. Every function that writes may raise OSError; who talks to a person
puts `on_disk` around it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_schema.disk import replacing, sync_folder, write_text

FORMAT = 1
MANIFEST, TRAINER, TOKENIZER, RUN_CONFIG = "manifest.json", "trainer.json", "tokenizer", "run.toml"
LATEST = "latest_checkpointed_iteration.txt"
PIECES = ".pieces"  # ending of the lists in which ranks tell what they wrote; they go with the commit
_ITERATION = re.compile(r"iter_(\d{7,19})")


def iteration_folder(run: Path, iteration: int) -> Path:
    """Where a run keeps the checkpoint of an iteration."""
    return run / f"iter_{iteration:07d}"


def partial_folder(run: Path, iteration: int) -> Path:
    """Where one is written."""
    return run / f".iter_{iteration:07d}.partial"


def replaced_folder(run: Path, iteration: int) -> Path:
    """Where a checkpoint waits while one of the same iteration takes its place."""
    return run / f".iter_{iteration:07d}.replaced"


def iterations(run: Path) -> list[int]:
    """The iterations whose checkpoint a run has, ascending. Folders that hold none of ours do not count."""
    names = (_ITERATION.fullmatch(path.parent.name) for path in run.glob(f"iter_*/{MANIFEST}"))
    return sorted(int(name[1]) for name in names if name)


def begin(run: Path, iteration: int) -> None:
    """Make room for a checkpoint. What an earlier save or removal left half-done is cleared away."""
    run.mkdir(parents=True, exist_ok=True)
    for left in run.glob(".iter_*.replaced"):
        final = run / left.stem.removeprefix(".")
        if final.exists():
            shutil.rmtree(left)
        else:
            left.rename(final)
    for ending in ("partial", "removed"):
        for left in run.glob(f".iter_*.{ending}"):
            shutil.rmtree(left)
    partial_folder(run, iteration).mkdir()


def commit(
    run: Path, iteration: int, described: Mapping[str, Any], texts: Mapping[str, str], tokenizer: Path | None
) -> Path:
    """Put together what the ranks wrote, and make it the run's latest checkpoint.

    Args:
        described: what the manifest says beside files and tensors.
        texts: other files of the checkpoint.
        tokenizer: folder whose files travel with it.

    Returns:
        the checkpoint's folder under its final name.

    Raises:
        OSError: it could not be written, or a file is shorter than its rank wrote it.
    """
    folder = partial_folder(run, iteration)
    parts = sorted(folder.glob(f"*{PIECES}"))
    records = [json.loads(part.read_bytes()) for part in parts]
    files = {record["file"]: record["size"] for record in records}
    for name, size in files.items():
        if (found := (folder / name).stat().st_size) != size:
            raise OSError(errno.EIO, f"{name} has {found} bytes where {size} were written")
    manifest = {
        "format": FORMAT,
        "iteration": iteration,
        **described,
        "files": files,
        "tensors": _tensors(records),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    if tokenizer is not None:
        shutil.copytree(tokenizer, folder / TOKENIZER)
        for copied in (folder / TOKENIZER).iterdir():
            with copied.open("rb") as file:
                os.fsync(file.fileno())
    for part in parts:
        part.unlink()
    write_text(folder / MANIFEST, json.dumps(manifest))
    sync_folder(folder)
    final = iteration_folder(run, iteration)
    if final.exists():
        # a folder cannot be renamed onto another; between the two renames `latest` finds the replaced one
        replaced = replaced_folder(run, iteration)
        final.rename(replaced)
        folder.rename(final)
        shutil.rmtree(replaced)
    else:
        folder.rename(final)
    sync_folder(run)
    with replacing(run / LATEST) as tracker:
        tracker.write_text(f"{iteration}\n", "utf-8")
    return final


def discard(run: Path, iteration: int) -> None:
    """Remove what was written of a checkpoint that will not be."""
    shutil.rmtree(partial_folder(run, iteration), ignore_errors=True)


def outdated(run: Path, newest: int, *, last: int, every: int | None) -> list[int]:
    """Iterations of a run that are not to be kept, of those before `newest`.

    Args:
        last: so many of the newest stay, `newest` among them; 1 or more.
        every: those whose iteration this divides stay too.
    """
    assert last >= 1
    older = [iteration for iteration in iterations(run) if iteration < newest]
    return [i for i in older[: max(0, len(older) - (last - 1))] if not every or i % every]


def prune(run: Path, newest: int, *, last: int, every: int | None) -> list[int]:
    """Remove the checkpoints that are `outdated` beside the one just committed, `newest`.

    Returns:
        the iterations removed. A checkpoint goes under another name first, so that none is seen half removed.
    """
    gone = outdated(run, newest, last=last, every=every)
    for iteration in gone:
        aside = run / f".iter_{iteration:07d}.removed"
        iteration_folder(run, iteration).rename(aside)
        shutil.rmtree(aside)
    return gone


def _tensors(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    spaces: dict[str, dict[str, Any]] = {}
    for record in records:
        entries = spaces.setdefault(record["namespace"], {})
        for piece in record["pieces"]:
            whole, dtype, name = piece.pop("whole"), piece.pop("dtype"), piece.pop("name")
            entry = entries.setdefault(name, {"shape": whole, "dtype": dtype, "pieces": []})
            entry["pieces"].append(piece)
    for space, entries in spaces.items():
        for name, entry in entries.items():
            written = sum(math.prod(piece["shape"]) for piece in entry["pieces"])
            assert written == math.prod(entry["shape"]), f"{space} {name}: {written} elements written"
    return spaces
