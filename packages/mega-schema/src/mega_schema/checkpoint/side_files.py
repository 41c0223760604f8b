"""Checksums of a checkpoint's small files: trainer.json, run.toml, the tokenizer's files, and the manifest.

The manifest records the size and the SHA-256 of each side file; `manifest.sha256` holds the digest of the
manifest, in the format of `sha256sum -c`. They detect damage and edits, not forgery: nothing is signed. Uses
Python's standard library only.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mega_schema.atomic_io import atomic_write, write_text
from mega_schema.errors import CorruptFileError

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
TOKENIZER = "tokenizer"
RUN_CONFIG = "run.toml"
DIGEST = "manifest.sha256"
MAX_BYTES = 1 << 30  # of one side file; real ones are far smaller
OTHER_ITERATION = "load another iteration: --load RUN/iter_NNNNNNN"


def describe_side_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size in bytes and SHA-256 of every side file, by its path in the checkpoint's folder.

    Raises:
        CorruptFileError: one is a link, or not a regular file.
    """
    records = {}
    for name in _list_side_files(folder):
        content = read_regular(folder / name)
        records[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return records


def check_side_files(folder: Path, recorded: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare every side file with its record.

    Raises:
        CorruptFileError: one is missing, not recorded, or was changed.
    """
    for name, wanted in recorded.items():
        if not _is_side_file(name):
            raise CorruptFileError(folder / MANIFEST, "name outside the checkpoint", found=name)
        content = read_regular(folder / name)
        actual = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        if actual != dict(wanted):
            word = "bytes" if actual["bytes"] != wanted.get("bytes") else "sha256"
            raise CorruptFileError(
                folder / name,
                f"differs from what was written: {word}",
                found=actual[word],
                wanted=wanted.get(word),
                hint=_edit_hint(folder, name, content),
            )
    for name in (TRAINER, *_list_side_files(folder)):
        if name not in recorded:
            raise CorruptFileError(
                folder / name, "has no checksum in the manifest", hint=_accept_hint(folder)
            )


def check_manifest(folder: Path, content: bytes) -> bool:
    """Compare the manifest with its digest.

    Returns:
        whether there is a digest. It is required from format 2 on; the manifest states its format.

    Raises:
        CorruptFileError: the manifest was changed.
    """
    file = folder / DIGEST
    if not file.exists():
        return False
    recorded = read_regular(file)
    if recorded != digest_line(content).encode():
        raise CorruptFileError(
            folder / MANIFEST,
            "differs from what was written: sha256",
            found=hashlib.sha256(content).hexdigest(),
            wanted=recorded[:64].decode("ascii", "replace"),
            hint=_edit_hint(folder, MANIFEST, content),
        )
    return True


def digest_line(manifest: bytes) -> str:
    """Return the content of `manifest.sha256`."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"


def write_manifest(folder: Path, text: str) -> None:
    """Write a manifest and its digest, and flush both."""
    write_text(folder / MANIFEST, text)
    write_text(folder / DIGEST, digest_line(text.encode()))


def replace_manifest(folder: Path, text: str) -> None:
    """Replace a manifest and its digest, and flush both."""
    for name, content in ((MANIFEST, text), (DIGEST, digest_line(text.encode()))):
        with atomic_write(folder / name) as new:
            write_text(new, content)


def rewrite_checksums(folder: Path, format: int) -> None:
    """Record the side files and the manifest as they are now.

    Args:
        format: new version of the checkpoint format in the manifest.
    """
    manifest = json.loads(read_regular(folder / MANIFEST))
    header = {"format": format, "side_files": describe_side_files(folder)}
    replace_manifest(folder, json.dumps(manifest | header))


def read_regular(path: Path) -> bytes:
    """Return the bytes of a regular file, not a link or a pipe, of plausible size.

    Raises:
        CorruptFileError: it is not one, or is missing.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        wanted = "a file of a checkpoint"
        raise CorruptFileError(path, "missing", wanted=wanted, hint=OTHER_ITERATION) from None
    check_regular(path, status.st_mode)
    if status.st_size > MAX_BYTES:
        raise CorruptFileError(path, "size in bytes", found=status.st_size, wanted=f"at most {MAX_BYTES}")
    return path.read_bytes()


def check_regular(path: Path, mode: int) -> None:
    """Refuse a link, a pipe or a device in place of a checkpoint's file.

    Args:
        mode: of `os.lstat`.

    Raises:
        CorruptFileError: the file is refused.
    """
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder"}
    kind = kinds.get(stat.S_IFMT(mode), "a special file")
    hint = "cp -rL FOLDER NEW copies files in the place of links" if kind == "a link" else ""
    raise CorruptFileError(path, "is not a regular file", found=kind, wanted="a regular file", hint=hint)


def _list_side_files(folder: Path) -> Iterator[str]:
    """Yield the paths of the side files. Hidden files, which systems leave in any folder, do not count."""
    yield from (
        name for name in (TRAINER, RUN_CONFIG) if (folder / name).is_symlink() or (folder / name).exists()
    )
    for path in sorted((folder / TOKENIZER).rglob("*")):
        name = path.relative_to(folder)
        if (path.is_symlink() or not path.is_dir()) and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix()


def _is_side_file(name: str) -> bool:
    parts = PurePosixPath(name).parts
    inside = len(parts) > 1 and parts[0] == TOKENIZER and ".." not in parts
    return name in (TRAINER, RUN_CONFIG) or inside


def _edit_hint(folder: Path, name: str, content: bytes) -> str:
    """Return what to do about a changed file: an edit can be accepted if the file is still readable."""
    if not content:
        return f"{name} is empty: restore it, or {OTHER_ITERATION}"
    try:
        if name.endswith(".json"):
            json.loads(content)
    except (ValueError, RecursionError):
        return f"{name} is not JSON: restore it, or {OTHER_ITERATION}"
    return _accept_hint(folder)


def _accept_hint(folder: Path) -> str:
    return f"if the edit was meant: mega-ckpt verify {folder} --accept"
