"""Verify the values of a checkpoint against the CRC-32 of each piece in the manifest."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mega_schema.checkpoint.reader import Checkpoint, TensorPiece
from mega_schema.checkpoint.side_files import OTHER_ITERATION
from mega_schema.errors import CorruptFileError

_BLOCK = 1 << 20  # bytes; fits a core's cache, so that the checksum does not read from memory again
_MAX_THREADS = 8  # of which each reads from the disk; zlib releases Python's lock


def verify_namespace(checkpoint: Checkpoint, namespace: str) -> int:
    """Read every piece of a namespace and compare its checksum with the recorded one.

    Returns:
        the bytes that were read.

    Raises:
        CorruptFileError: values differ from those that were written, or a file is shorter.
    """
    pieces = [(name, piece) for space, name, _, piece in checkpoint.pieces() if space == namespace]
    pieces.sort(key=lambda named: (named[1].file, named[1].offset))
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(_compute_crc32, checkpoint.folder / piece.file, piece) for _, piece in pieces]
        try:
            for (name, piece), job in zip(pieces, jobs, strict=True):
                if (crc := job.result()) != piece.crc32:
                    raise CorruptFileError(
                        f"{checkpoint.folder / piece.file}: {namespace} {name}",
                        "values are not those that were written: crc32",
                        found=f"{crc:08x}",
                        wanted=f"{piece.crc32:08x}",
                        hint=f"copy the file again, or {OTHER_ITERATION}",
                    )
        finally:
            pool.shutdown(cancel_futures=True)
    return sum(piece.bytes for _, piece in pieces)


def _compute_crc32(path: Path, piece: TensorPiece) -> int:
    """Return the CRC-32 of a piece's bytes, up to the end of the file."""
    block = memoryview(bytearray(min(_BLOCK, piece.bytes)))
    crc = 0
    remaining = piece.bytes
    with path.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        while remaining and (count := file.readinto(block[: min(len(block), remaining)])):
            crc = zlib.crc32(block[:count], crc)
            remaining -= count
    return crc
