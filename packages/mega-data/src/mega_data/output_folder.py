"""The output folder of clean, dedup and extract: published whole, and written by one run at a time.

    OUTPUT/.unfinished/...     files of a run in progress
    OUTPUT/.mega-data.json     the command, and the names of the files of the finished run
    OUTPUT/a.jsonl, ...        the files of a finished run

A run writes below `.unfinished`. When all its tasks are finished, its files are moved into the folder. A run
that ends at a wrong line leaves no partial file under a final name. The next run reuses the finished shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import orjson

from mega_data.jsonl_shards import find_inputs, output_name, read_lines
from mega_data.readers.adapters import Adapter
from mega_data.readers.file_tree import scanned_folders
from mega_data.readers.inputs import DROPPED, QUARANTINE, REPORT, InputFile
from mega_data.task_stages import FAILED, PLAN, REMOVED, finish_removal, remove_folder
from mega_schema.atomic_io import full_disk_errors, sync_folder, write_text
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.file_lock import lock_file
from mega_schema.outputs import check_output

MARKER = ".mega-data.json"
KEYS_FOLDER = "dedup-keys"  # band keys of the kept documents
UNFINISHED = ".unfinished"
WORK = ".work"
FORMAT = 1
_MAX_NAMES = 3  # of files in a message
INDEX_CACHE = "index-cache"  # of mega-train, beside the datasets that it reads
REPORT_PAGE = "report.html"
PAGE_KEYS = ("id", "url", "title", "text")  # of a line of `extract`
_OWN_NAMES = frozenset(
    {
        MARKER,
        UNFINISHED,
        WORK,
        f"{WORK}{REMOVED}",
        f"{UNFINISHED}{REMOVED}",
        DROPPED,
        INDEX_CACHE,
        KEYS_FOLDER,
        QUARANTINE,
        REPORT,
        REPORT_PAGE,
    }
)


def find_checked_inputs(
    inputs: Iterable[str], output: Path, work: Path | None, suffix: str, adapter: Adapter | None = None
) -> list[InputFile]:
    """Return the files that --input names; refuse files in the output or work folder.

    Args:
        suffix: suffix of the format of the output files, see `output_formats`.
        adapter: converts the rows of all files.

    Raises:
        ConfigError: there is no file, or a folder is refused.
    """
    words = [str(word) for word in inputs]
    items = find_inputs(words, adapter)
    files = [item.path for item in items]
    check_folder(output, work, files, scanned_folders(words, files))
    check_stale(output, (output_name(path, suffix) for path in files))
    return items


def check_folder(
    output: Path, work: Path | None, inputs: Sequence[Path], read_folders: Sequence[Path] = ()
) -> None:
    """Refuse an output or work folder that contains an input, or files of other programs.

    Args:
        read_folders: folders in which the command would read its own output.

    Raises:
        ConfigError: one of them is refused.
    """
    check = partial(check_output, kind="folder", inputs=inputs, read_folders=read_folders)
    check("--output", output, is_ours=lambda _: True)
    if foreign := _foreign_names(output):
        names = ", ".join(foreign[:_MAX_NAMES])
        names += f" and {len(foreign) - _MAX_NAMES:,} more" if len(foreign) > _MAX_NAMES else ""
        what = "contains files that this command did not write"
        found, hint = f"{output} with {names}", "name a new or an empty folder"
        raise ConfigError("--output", what, found=found, hint=hint)
    check_work_folder(output, work, inputs, read_folders)


def check_work_folder(
    output: Path, work: Path | None, inputs: Sequence[Path], read_folders: Sequence[Path] = ()
) -> None:
    """Refuse the folder of --work-dir if it has an input or other files, or is --output; see `check_folder`.

    Raises:
        ConfigError: it is refused.
    """
    if work is None:
        return
    check_output(
        "--work-dir", work, "folder", inputs=inputs, read_folders=read_folders, is_ours=_is_work_folder
    )
    if work.resolve() == output.resolve():
        hint = "name another folder, or leave --work-dir out"
        raise ConfigError("--work-dir", "is --output", found=work, hint=hint)


def check_file(option: str, output: Path, inputs: Sequence[Path]) -> None:
    """Refuse an output file that is an input, or that `extract` did not write.

    Raises:
        ConfigError: the file is refused.
    """
    check_output(option, output, "file", inputs=inputs, is_ours=_is_extracted)


def _is_extracted(path: Path) -> bool:
    """Return whether a file, in any output format, is empty or begins with a page."""
    try:
        line = next(read_lines(path), None)
        return line is None or tuple(orjson.loads(line)) == PAGE_KEYS
    except (MegaError, ValueError, TypeError):
        return False


def is_own_folder(folder: Path) -> bool:
    """Return whether one of the commands wrote, or is writing, everything in a folder."""
    return not _foreign_names(folder)


def _foreign_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    names = {path.name for path in folder.iterdir() if not path.name.startswith(MARKER)}
    return sorted(names - _OWN_NAMES - _published_names(folder))


def _published_names(folder: Path) -> set[str]:
    """Return the names of the files that a finished run published in a folder."""
    try:
        values = json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return set()
    files = values.get("files") if isinstance(values, dict) else None
    return {str(name) for name in files} if isinstance(files, list) else set()


@contextmanager
def lock_folder(folder: Path, *, shared: bool) -> Iterator[None]:
    """Lock a folder against other runs; create it if needed.

    Args:
        shared: other processes may run other parts of the same run at the same time.

    Raises:
        ConfigError: another run holds it.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            lock_file(descriptor, folder, shared=shared)
        except BlockingIOError:
            hint = "wait for it to end, or name another folder"
            raise ConfigError("--output", "another run writes there", found=folder, hint=hint) from None
        yield
    finally:
        os.close(descriptor)
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # if it is empty


def staging_folder(output: Path) -> Path:
    """Return the folder that the tasks write to before files are published."""
    return output / UNFINISHED


def write_marker(folder: Path, command: str, files: Sequence[str] | None = None) -> None:
    """Record in a folder the command that wrote its files.

    Args:
        files: names of the files of a finished run; None keeps the list of the run before.
    """
    files = sorted(_published_names(folder)) if files is None else sorted(files)
    finish_removal(folder / WORK)
    temporary = folder / f"{MARKER}.{uuid4().hex}"  # elements of a job array start at the same time
    write_text(temporary, json.dumps({"format": FORMAT, "command": command, "files": files}))
    temporary.replace(folder / MARKER)


def has_finished_run(folder: Path) -> bool:
    """Return whether a folder has the files of a finished run."""
    return any((folder / name).exists() for name in _published_names(folder))


def check_stale(output: Path, names: Iterable[str]) -> None:
    """Refuse an output folder in which files of an earlier run would remain.

    Args:
        names: names of the files that this run writes.

    Raises:
        ConfigError: there are such files.
    """
    stale = sorted(
        name for name in _published_names(output) - _OWN_NAMES - set(names) if (output / name).exists()
    )
    if stale:
        hint = f"rm -r {output}, or name another folder"
        found = f"{output / stale[0]}" + (f" and {len(stale) - 1:,} more" if len(stale) > 1 else "")
        raise ConfigError(
            "--output", "contains files of an earlier run of other inputs", found=found, hint=hint
        )


def _is_work_folder(folder: Path) -> bool:
    """Return whether a folder is a work folder, or array elements are creating its plan."""
    others = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return not others or (folder / PLAN).is_file()


def publish(output: Path, command: str, work: Path) -> None:
    """Move the files of a finished run to their names; remove those of an earlier run.

    If the process is killed, the next one continues: a marker in `work` records that publishing began.
    """
    staging = staging_folder(output)
    started_marker = work / ".publishing"
    with full_disk_errors(output):
        if not started_marker.exists():
            for name in (DROPPED, KEYS_FOLDER, QUARANTINE, REPORT, REPORT_PAGE):
                _remove(output / name)
            started_marker.touch()
        for leftover in sorted(staging.rglob(".*.partial")):  # of a killed process, also in dropped/
            _remove(leftover)
        for path in sorted(staging.iterdir()) if staging.is_dir() else ():
            if path.is_dir():
                _remove(output / path.name)
            if not path.name.startswith("."):  # a temporary file of a killed process
                path.replace(output / path.name)
        write_marker(output, command, list_written(output))
        sync_folder(output)
    remove_folder(staging)


def list_written(output: Path) -> list[str]:
    """Return the names of the files in an output folder, and of the tokenizers of its datasets."""
    return [
        path.name
        for path in output.iterdir()
        if (path.is_file() or path.suffix == ".tokenizer") and not path.name.startswith(".")
    ]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def keep_finished_tasks(folder: Path, output: Path, *, whole_run: bool) -> Iterator[None]:
    """After a wrong line, keep the finished tasks for the next run, if there are any.

    Args:
        folder: the run's work folder.
        whole_run: this process does all of the run, and the work folder is the default one.
    """
    try:
        yield
    except FormatError:
        if whole_run and next(folder.glob("**/done/*/*.json"), None) is None:
            for leftover in (folder, staging_folder(output)):
                remove_folder(leftover)
            if output.is_dir() and [path.name for path in output.iterdir()] == [MARKER]:
                (output / MARKER).unlink()
        elif whole_run:
            (folder / FAILED).touch()
        raise
