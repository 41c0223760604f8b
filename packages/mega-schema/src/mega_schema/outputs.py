"""Check that an output path can be written without losing anything: one rule for every program.

- An output is a path of this machine; a URL is refused.
- An output is not an input, and an output folder contains no input. Links, hard links and letter case count.
- An output folder is not inside a folder that its command reads: the next run would read this one's output.
- A non-empty folder or an existing file is replaced only if this toolkit wrote it.

Uses Python's standard library only, so that every command can check before slow imports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from mega_schema.dataset.dataset_info import sibling
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.files import COMPANION_FILES
from mega_schema.tokenizer.identity import IDENTITY
from mega_schema.urls import check_local, url_scheme

Kind = Literal["file", "folder"]
_MAX_NAMES = 3  # names of a folder's files in a message
_HEAD = 1 << 16  # bytes read to recognise a file
_IMAGE = b"\x89PNG\r\n\x1a\n"


def check_output(
    option: str,
    path: Path,
    kind: Kind,
    *,
    inputs: Iterable[Path] = (),
    read_folders: Iterable[Path] = (),
    is_ours: Callable[[Path], bool] = lambda path: False,
    instead: str = "",
) -> None:
    """Refuse an output path whose use would overwrite an input, or files that this toolkit did not write.

    Args:
        option: the command-line option that names the path; begins the message.
        inputs: files, or folders, that the command reads.
        read_folders: folders of `--input` in which the command would also read files that it writes.
        is_ours: whether an existing file, or a non-empty folder, was written by this toolkit and may be
            replaced.
        instead: the alternative that the hint proposes; "" proposes another path.

    Raises:
        ConfigError: the path is refused.
    """
    check_local(option, path)
    if outer := _find_reading_folder(path, read_folders):
        what, hint = "is in a folder that --input reads", "the next run would read what this one writes"
        raise ConfigError(option, what, found=path, wanted=f"a folder outside {outer}", hint=hint)
    if not path.exists():
        if path.is_symlink():
            raise ConfigError(option, "is a broken link", found=path, wanted=f"a new {kind}")
        if not (ancestor := next(parent for parent in (*path.parents, Path()) if parent.exists())).is_dir():
            raise ConfigError(option, "is below a file", found=ancestor, wanted="a folder")
        return
    if path.is_dir() != (kind == "folder"):
        found = "a folder" if path.is_dir() else "a file"
        raise ConfigError(option, f"is {found}", found=path, wanted=f"a {kind}")
    if overwritten := next(_find_overwritten(path, inputs), None):
        if kind == "file" or overwritten == path:
            raise ConfigError(
                option, "is one of the inputs", found=path, hint=instead or f"name another {kind}"
            )
        raise ConfigError(option, "contains an input", found=overwritten, hint="name another folder")
    if kind == "file" and not is_ours(path):
        what = "is a file that this command did not write"
        hint = f"{instead or 'name another file'}, or remove this file"
        raise ConfigError(option, what, found=path, hint=hint)
    if kind == "folder" and (names := _names(path)) and not is_ours(path):
        what = "contains files that this command did not write"
        hint = instead or "name a new or an empty folder"
        raise ConfigError(option, what, found=f"{path} with {names}", hint=hint)


def check_dataset_output(option: str, prefix: Path, *, inputs: Iterable[Path] = ()) -> bool:
    """Refuse the prefix of a dataset if one of its files is an input or does not belong to a dataset.

    Returns:
        whether a dataset with this prefix exists, which the command replaces.

    Raises:
        ConfigError: the prefix is refused.
    """
    check_local(option, prefix)
    input_paths = tuple(inputs)
    index = sibling(prefix, ".idx")
    has_leftovers = (
        any(prefix.parent.glob(f"{_escape_glob(prefix.name)}.*.tmp")) if prefix.parent.is_dir() else False
    )
    for suffix, is_ours in (
        (".idx", lambda path: True),
        # a process killed while it replaced a dataset leaves the payload without its index
        (".bin", lambda path: has_leftovers or index.exists() or _has_info(sibling(prefix, ".json"))),
        (".json", _has_info),
    ):
        path = sibling(prefix, suffix)
        check_output(option, path, "file", inputs=input_paths, is_ours=is_ours, instead="name another prefix")
    folder = sibling(prefix, ".tokenizer")
    check_output(
        option, folder, "folder", inputs=input_paths, is_ours=is_tokenizer, instead="name another prefix"
    )
    return index.exists()


def dataset_files(prefix: Path) -> list[Path]:
    """Return the files that a dataset may have."""
    return [sibling(prefix, suffix) for suffix in (".bin", ".idx", ".json")]


def is_tokenizer(folder: Path, besides: frozenset[str] = frozenset()) -> bool:
    """Whether a folder holds a tokenizer that this toolkit wrote, and nothing else.

    Args:
        besides: names of further files that it may have.
    """
    names = {path.name for path in folder.iterdir()} - besides
    return IDENTITY in names and names <= TOKENIZER_FILES and "sha256" in _object(folder / IDENTITY)


TOKENIZER_FILES = frozenset(
    {*COMPANION_FILES, IDENTITY, "tokenizer.json", "tokenizer.model", "merges.txt", "vocab.json", "vocab.txt"}
)


def is_image(path: Path) -> bool:
    """Whether a file is a PNG, or empty."""
    return _head(path)[: len(_IMAGE)] in (_IMAGE, b"")


def is_page(path: Path) -> bool:
    """Whether a file is a page of HTML, or empty."""
    head = _head(path)
    return not head or head.lstrip()[:15].lower() == b"<!doctype html>"


def has_keys(keys: Iterable[str]) -> Callable[[Path], bool]:
    """Return a predicate: whether the first object of a JSON or JSON lines file has exactly these keys."""
    wanted = frozenset(keys)
    return lambda path: not path.stat().st_size or _object(path).keys() == wanted


def _has_info(path: Path) -> bool:
    return {"tokenizer", "documents", "sources"} <= _object(path).keys()


def _object(path: Path) -> dict[str, object]:
    """Return the object in a JSON file, or on its first line; {} if there is none."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LINE)
            for text in (line, line + file.read(_LINE)):
                try:
                    values = json.loads(text)
                except ValueError:
                    continue
                return values if isinstance(values, dict) else {}
    except (OSError, RecursionError):
        return {}
    return {}


_LINE = 64 << 20  # maximum bytes of a line; a longer one is ignored


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD)


def _names(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _find_overwritten(output: Path, inputs: Iterable[Path]) -> Iterator[Path]:
    """Yield the inputs that are the output or are inside it, by their own name or by their link's target."""
    output_id = _file_id(output)
    inside = dict[Path, bool]()

    def holds(folder: Path) -> bool:
        if folder not in inside:
            inside[folder] = _file_id(folder) == output_id or (
                folder != folder.parent and holds(folder.parent)
            )
        return inside[folder]

    folders = dict[Path, Path]()  # resolve each folder once: a corpus has many files in few folders
    for path in inputs:
        if url_scheme(path):
            continue
        folder = folders.setdefault(path.parent, path.parent)
        if folder is path.parent:
            folders[path.parent] = folder = path.parent.resolve()
        if (
            _file_id(path) == output_id
            or holds(folder)
            or (path.is_symlink() and holds(path.resolve().parent))
        ):
            yield output if _file_id(path) == output_id else path


def _find_reading_folder(output: Path, folders: Iterable[Path]) -> Path | None:
    """Return the first of `folders` that contains the output, or None.

    None also if a hidden folder is between.
    """
    folders_by_id = {_file_id(folder): folder for folder in folders}
    parent = output.resolve()
    while folders_by_id and parent != parent.parent and not parent.name.startswith("."):
        parent = parent.parent
        if (file_id := _file_id(parent)) and file_id in folders_by_id:
            return folders_by_id[file_id]
    return None


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode, which identify a file under any name; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _escape_glob(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
