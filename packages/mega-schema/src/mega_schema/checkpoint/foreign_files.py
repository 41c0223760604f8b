"""Read small files of another program's checkpoint, which is untrusted: check links and sizes first.

Their content is copied into our output, which users publish: a link out of the folder would publish a private
file. Weight files are not checked here: they are read only as numbers of a known shape, and are often links.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mega_schema.errors import FormatError

MAX_COMPANION_BYTES: Final = 16_000_000  # of a file that is copied unchanged
MAX_JSON_BYTES: Final = 100_000_000  # of a config.json, of an index
MAX_TOKENIZER_BYTES: Final = 300_000_000


def check_foreign(path: Path, max_bytes: int) -> None:
    """Refuse a file that is too large, or a link to anywhere but the Hub's cache.

    Args:
        max_bytes: maximum size.

    Raises:
        FormatError: the file is refused.
    """
    folder, real = path.parent.resolve(), path.resolve()
    # the Hub's cache: snapshots/REVISION/file -> ../../blobs/SHA
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not (real.is_relative_to(folder) or real.parent == blobs):
        hint = f"cp --remove-destination {real} {path}, if its text may be copied and published"
        raise FormatError(path, "is a link out of its folder", found=real, wanted="a file", hint=hint)
    if path.is_file() and (size := path.stat().st_size) > max_bytes:
        raise FormatError(path, "size in bytes", found=size, wanted=f"at most {max_bytes}")


def read_foreign(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file that `check_foreign` accepts.

    Raises:
        FormatError: `check_foreign` refuses it, or it is not a regular file: reading a pipe would never end.
        OSError: it is missing, or cannot be read.
    """
    check_foreign(path, max_bytes)
    if path.exists() and not path.is_file():
        raise FormatError(path, "is not a file")
    return path.read_bytes()
