"""Locate the pickle and the storages in a file of `torch.save`, old or new.

Since torch 1.6 the file is a zip with uncompressed members:

    NAME/data.pkl       the pickle, in which a tensor refers to its storage by key
    NAME/data/KEY       the data of a storage, little endian
    NAME/byteorder      "little" or "big", since torch 2.1
    NAME/version        version of the format, in decimal

Older files are five pickles and the storages, one after another: a magic number, 1001, a dict
with "little_endian", the pickle itself, the keys; then, per key, a u64 element count and the data.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mega_ckpt.tensors.storage import DAMAGED, Span, Storage, read_blocks
from mega_schema.errors import FormatError

MAGIC = 0x1950A86A20F9469CFC6C
_LATEST = 10  # newest version of the zip format
RESAVE_HINT = (
    "torch.save(torch.load(file), new) with the torch that wrote it, or a later one, writes a current file"
)
_LONGEST = 1 << 26  # maximum bytes of a zip directory: some hundred thousand members
_ZIP_ERRORS = (
    EOFError,
    zipfile.BadZipFile,
    struct.error,
    NotImplementedError,
    ValueError,
    LookupError,
    OverflowError,
)


@dataclass(frozen=True, slots=True)
class Archive:
    """A file of torch 1.6 or later.

    Attributes:
        crc: CRC-32 of the pickle; 0 if torch wrote none.
        storages: by key.
    """

    pickle: Span
    crc: int
    storages: Mapping[str, Storage]


def is_zip(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a zip."""
    return head.startswith(b"PK\x03\x04")


def is_legacy(head: bytes) -> bool:
    """Return whether a file that begins with `head` is from before torch 1.6."""
    return MAGIC.to_bytes(10, "little") in head[:32]


def is_tar(head: bytes) -> bool:
    """Return whether a file that begins with `head` is from before torch 0.2."""
    return head[257:262] == b"ustar"


class FileSlice(io.RawIOBase):
    """A byte range of a file as a file."""

    def __init__(self, file: BinaryIO, span: Span) -> None:
        self._file = file
        self._span = span
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        position = offset + (0, self._position, self._span.bytes)[whence]
        if position < 0:
            raise ValueError(f"seek to {position}")
        self._position = position
        return position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        if len(view) > _LONGEST:
            raise ValueError(f"a directory of {len(view)} bytes")
        count = max(0, min(len(view), self._span.bytes - self._position))
        self._file.seek(self._span.begin + self._position)
        data = self._file.read(count)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def read_archive(path: Path, file: BinaryIO, whole: Span) -> Archive:
    """Read the zip directory in a byte range of a file.

    Raises:
        FormatError: it is not a complete zip file of torch.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(FileSlice(file, whole))) as archive:
            return _archive(path, file, whole, archive)
    except _ZIP_ERRORS as error:
        raise FormatError(path, "is not a complete zip", found=error, hint=DAMAGED) from error


def _archive(path: Path, file: BinaryIO, whole: Span, archive: zipfile.ZipFile) -> Archive:
    members = {info.filename: info for info in archive.infolist()}
    if len(members) != len(archive.infolist()):
        raise FormatError(path, "has two members of one name")
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise FormatError(
            path,
            "is a zip without a pickle of torch",
            found=f"{len(pickles)} members NAME/data.pkl",
            wanted="one",
        )
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in members:
        raise FormatError(
            path,
            "is a TorchScript program, and weights are needed",
            hint="torch.save(model.state_dict(), file)",
        )
    for name, info in members.items():
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.flag_bits & 1
            or info.compress_size != info.file_size
        ):
            raise FormatError(f"{path}: {name}", "is compressed or encrypted", hint=RESAVE_HINT)
    if (order := _read_word(file, whole, members.get(f"{root}byteorder"), b"little")) != b"little":
        raise FormatError(f"{path}: {root}byteorder", "of the numbers", found=order, wanted=b"little")
    version = _read_word(file, whole, members.get(f"{root}version"), b"3").strip()
    if not version.isdigit() or int(version) > _LATEST:
        raise FormatError(f"{path}: {root}version", "of the file", found=version, wanted=f"{_LATEST} or less")
    prefix = f"{root}data/"
    storages = {}
    for name, info in members.items():
        if name.startswith(prefix) and not name.endswith("/"):
            span = _member_span(file, whole, info)
            key = name.removeprefix(prefix)
            storages[key] = Storage(span.begin, span.bytes, key, info.CRC)
    pickle = members[pickles[0]]
    return Archive(_member_span(file, whole, pickle), pickle.CRC, storages)


def _read_word(file: BinaryIO, whole: Span, info: zipfile.ZipInfo | None, otherwise: bytes) -> bytes:
    """Read a member that consists of one word."""
    if info is None:
        return otherwise
    span = _member_span(file, whole, info)
    file.seek(span.begin)
    return file.read(min(32, span.bytes))


def _member_span(file: BinaryIO, whole: Span, info: zipfile.ZipInfo) -> Span:
    """Return the byte range of a member's data, after a local header of variable length."""
    form = struct.Struct("<4s22xHH")
    if info.header_offset < 0:
        raise zipfile.BadZipFile(f"{info.orig_filename} at byte {info.header_offset}")
    file.seek(whole.begin + info.header_offset)
    magic, name, extra = form.unpack(file.read(form.size))
    written = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    if magic != b"PK\x03\x04" or file.read(name) != written:
        raise zipfile.BadZipFile(f"no {info.orig_filename} at byte {info.header_offset}")
    span = Span(whole.begin + info.header_offset + form.size + name + extra, info.file_size)
    if span.end > whole.end:
        raise zipfile.BadZipFile(
            f"{info.orig_filename} ends at byte {span.end - whole.begin} of {whole.bytes}"
        )
    return span


def read_pickle_blocks(path: Path, file: BinaryIO, archive: Archive) -> Iterator[bytes]:
    """Yield the bytes of a zip's pickle and verify its checksum.

    Raises:
        FormatError: after the last block, if the checksum does not match.
    """
    crc = 0
    for block in read_blocks(file, archive.pickle):
        crc = zlib.crc32(block, crc)
        yield block
    if crc != archive.crc != 0:
        raise FormatError(
            f"{path}: data.pkl", "checksum (crc32)", found=f"{crc:08x}", wanted=f"{archive.crc:08x}"
        )
