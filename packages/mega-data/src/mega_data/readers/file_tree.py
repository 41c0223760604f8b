"""Resolve the words of `--input` to files: each file once, in a fixed order, through links, without loops.

    a file, a pipe      itself
    a folder            the readable files below it, sorted by path; linked folders included
    a URL               a remote file, the files below a remote folder, or the matches of a glob
    a glob              the matches, sorted by path; `**` crosses linked folders; a matched folder as above

A linked folder that leads back to a folder already read, and a file with two names, are read once and logged.
A broken link is an error: its file system is not mounted, or its file was moved.
"""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import orjson

from mega_data.readers.blocks import QUARANTINE_KEYS
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_schema.outputs import TOKENIZER_FILES
from mega_schema.remote_files import REMOTE_SCHEMES, check_libraries, find_remote_files, is_remote
from mega_schema.urls import check_host, check_local

log = logging.getLogger("mega.data")

# names that clean and dedup write next to the kept documents
DROPPED, QUARANTINE, REPORT = "dropped", "quarantine", "report.json"
_NOT_KEPT = frozenset({DROPPED, QUARANTINE, REPORT})
UPLOADING: Final = ".mega-data.uploading"  # in a remote folder whose files are not all uploaded
_WORK_FOLDERS = (".unfinished", ".work", ".dropped")
_MAX_SHOWN: Final = 3  # names in one log line


class FileResolver:
    """Resolve words to files, each file once over all words.

    Args:
        is_readable: whether a file of a folder is an input; a file that a word or a glob names always is.
        wanted: description of valid words, for the error message.
    """

    def __init__(self, is_readable: Callable[[Path], bool], wanted: str) -> None:
        self._is_readable = is_readable
        self._wanted = wanted
        self._seen = set[str]()
        self._repeats = list[Path]()

    def resolve(self, word: str) -> list[Path]:
        """Return the files that a word names and no earlier word named.

        Raises:
            ConfigError: it names no file, a link is broken, or a folder contains several splits of a Hugging
                Face dataset.
        """
        paths = self._resolve_url(word) if is_remote(word) else _resolve_word(word, self._is_readable)
        if not paths:
            raise ConfigError("--input", "no files there", found=word, wanted=self._wanted)
        return [path for path in paths if self._is_new(path)]

    def _resolve_url(self, word: str) -> list[Path]:
        check_host("--input", word)
        check_libraries("--input", word, install_hint("mega-data", "remote"))
        return [*find_remote_files(word, self._is_readable_below)]

    def _is_readable_below(self, name: str) -> bool:
        """Return whether a file in a remote folder is an input: those that `_list_folder` takes.

        Raises:
            ConfigError: the folder is not complete.
        """
        if name.rpartition("/")[2] == UPLOADING:
            hint = "wait for the run that writes it, or run that command again"
            raise ConfigError("--input", "a folder that is being uploaded", found=name, hint=hint)
        path = Path(name)
        names = path.parts
        is_hidden = any(part.startswith(".") for part in names)
        return not is_hidden and not _NOT_KEPT.intersection(names) and self._is_readable(path)

    def log_repeats(self) -> None:
        """Log the files that were named more than once."""
        if self._repeats:
            count = _format_count(len(self._repeats))
            names = _format_paths(self._repeats)
            log.warning("--input: %s named more than once, read once: %s", count, names)

    def _is_new(self, path: Path) -> bool:
        real = str(path) if is_remote(path) else os.path.realpath(path)
        if real in self._seen:
            self._repeats.append(path)
            return False
        self._seen.add(real)
        return True


def scanned_folders(words: Iterable[str], files: Iterable[Path]) -> list[Path]:
    """Return the folders in which the words would find new files and folders too.

    Args:
        files: files that the words name; their parents include the linked folders that were read.
    """
    roots = [folder for word in words if not is_remote(word) for folder in _scan_roots(word)]
    parents = dict.fromkeys(file.parent for file in files)
    return [*roots, *(folder for folder in parents if any(root in folder.parents for root in roots))]


def _scan_roots(word: str) -> list[Path]:
    path = Path(word)
    if path.is_dir():
        return [path]
    if path.exists() or not glob.has_magic(word):
        return []
    fixed_parts = path.parts.index("**") if "**" in path.parts else len(path.parts)
    patterns = [Path(*path.parts[:fixed_parts])] if fixed_parts else [Path()]
    if path.name == "*":
        patterns.append(path.parent)
    matches = [Path(match) for pattern in patterns for match in glob.glob(str(pattern))]  # noqa: PTH207
    return [folder for folder in matches if folder.is_dir()]


def is_pipe(path: Path) -> bool:
    """Return whether the path is a pipe, as from `<(zcat a.gz)`: its bytes can be read once."""
    return path.is_fifo()


def _resolve_word(word: str, is_readable: Callable[[Path], bool]) -> list[Path]:
    check_local("--input", word, tuple(REMOTE_SCHEMES))
    path = Path(word)
    if path.is_file() or is_pipe(path):
        return [path]
    if path.is_dir():
        return _read_folder(path, is_readable)
    _refuse_dangling(path)
    return _resolve_glob(word, is_readable)


def _resolve_glob(word: str, is_readable: Callable[[Path], bool]) -> list[Path]:
    parts = Path(word).parts
    if "**" in parts:
        fixed_parts = parts.index("**")
        bases = glob.glob(str(Path(*parts[:fixed_parts]))) if fixed_parts else ["."]  # noqa: PTH207 - pathlib's skips hidden files differently
        paths = list[Path]()
        for base in filter(Path.is_dir, map(Path, sorted(bases))):
            tree = _walk(base)
            paths += [p for p in tree.files if _matches(p.relative_to(base).parts, parts[fixed_parts:])]
            _log_skipped(base, tree, [])
        return sorted(paths)
    paths = list[Path]()
    for path in sorted(map(Path, glob.glob(word))):  # noqa: PTH207
        _refuse_dangling(path)
        if path.is_dir():
            paths += [] if _is_work_folder(path) else _read_folder(path, is_readable)
        elif path.is_file() and not _is_own_output(path, _names(path.parent)):
            paths.append(path)
    return paths


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(parts[index:], patterns[1:]) for index in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _read_folder(folder: Path, is_readable: Callable[[Path], bool]) -> list[Path]:
    tree = _walk(folder)
    files = sorted(path for path in tree.files if path in tree.saved_files or is_readable(path))
    _log_skipped(
        folder, tree, [path for path in tree.files if path not in tree.saved_files and not is_readable(path)]
    )
    return files


@dataclass(slots=True)
class _Tree:
    """The files below a folder.

    Attributes:
        saved_files: files of datasets that Hugging Face's `save_to_disk` wrote.
        own_outputs: files and folders that mega-data wrote and that are not text.
        repeated_folders: linked folders that lead to a folder read before.
    """

    files: list[Path] = field(default_factory=list)
    saved_files: set[Path] = field(default_factory=set)
    not_kept: set[str] = field(default_factory=set)
    own_outputs: list[Path] = field(default_factory=list)
    repeated_folders: list[Path] = field(default_factory=list)
    visited: set[tuple[int, int]] = field(default_factory=set)


def _walk(folder: Path) -> _Tree:
    """Collect all files below a folder except hidden ones and mega-data's outputs without documents."""
    tree = _Tree()
    pending = [folder]
    while pending:
        current = pending.pop()
        stat = current.stat()
        if (stat.st_dev, stat.st_ino) in tree.visited:
            tree.repeated_folders.append(current)
            continue
        tree.visited.add((stat.st_dev, stat.st_ino))
        pending += reversed(_list_folder(current, tree))
    return tree


def _list_folder(folder: Path, tree: _Tree) -> list[Path]:
    """Add the files of one folder to the tree; return its folders."""
    try:
        names = _names(folder)
    except OSError as error:
        raise ConfigError(
            "--input", "a folder cannot be listed", found=f"{folder}: {error.strerror}"
        ) from None
    if "dataset_dict.json" in names:
        splits = sorted(name for name in names if (folder / name / "state.json").exists())
        hint = f"--input {folder / (splits[0] if splits else 'train')}"
        found = f"{folder}: {', '.join(splits) or 'dataset_dict.json'}"
        raise ConfigError("--input", "contains several splits of a dataset", found=found, hint=hint)
    if "state.json" in names and (arrow := sorted(folder.glob("*.arrow"))):
        tree.files += arrow
        tree.saved_files |= set(arrow)
        return []
    folders = list[Path]()
    for path in (folder / name for name in sorted(names) if not name.startswith(".")):
        if path.name in _NOT_KEPT:
            tree.not_kept.add(path.name)
        elif path.is_dir():
            (tree.own_outputs if _is_work_folder(path) else folders).append(path)
        elif path.is_file():
            (tree.own_outputs if _is_own_output(path, names) else tree.files).append(path)
        else:
            _refuse_dangling(path)
    return folders


def _names(folder: Path) -> frozenset[str]:
    return frozenset(path.name for path in folder.iterdir())


def _is_work_folder(path: Path) -> bool:
    return path.suffix in _WORK_FOLDERS


def _is_own_output(path: Path, names: frozenset[str]) -> bool:
    """Return whether a file is part of a dataset or tokenizer of mega-data, given the names in its folder."""
    if path.suffix in (".bin", ".idx", ".json") and {f"{path.stem}.bin", f"{path.stem}.idx"} <= names:
        return True
    if path.name in TOKENIZER_FILES and "identity.json" in names:
        return True
    return path.name.endswith("_quarantine.jsonl") and _is_quarantine(path)


def _is_quarantine(path: Path) -> bool:
    with path.open("rb") as file:
        line = file.readline(1 << 24)
    try:
        return set(orjson.loads(line)) == set(QUARANTINE_KEYS)
    except (ValueError, TypeError):
        return False


def _refuse_dangling(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        hint = f"is its file system mounted? else: rm {path}"
        raise ConfigError("--input", "a broken link", found=f"{path} -> {path.readlink()}", hint=hint)


def _log_skipped(folder: Path, tree: _Tree, unread: Sequence[Path]) -> None:
    if tree.not_kept:
        log.warning(
            "%s: read without %s: documents that were not kept", folder, " and ".join(sorted(tree.not_kept))
        )
    if tree.own_outputs:
        log.warning("%s: read without outputs of mega-data: %s", folder, _format_paths(tree.own_outputs))
    if tree.repeated_folders:
        log.warning(
            "%s: linked folders lead to folders already read: %s",
            folder,
            _format_paths(tree.repeated_folders),
        )
    if unread:
        endings = Counter(path.suffix or "no ending" for path in unread)
        counts = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(_MAX_SHOWN))
        log.warning("%s: skipped %s of other formats: %s", folder, _format_count(len(unread)), counts)


def _format_count(count: int) -> str:
    return f"{count:,} file{'s' * (count != 1)}"


def _format_paths(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _MAX_SHOWN:,} more" if len(paths) > _MAX_SHOWN else ""
    return ", ".join(str(path) for path in paths[:_MAX_SHOWN]) + more
