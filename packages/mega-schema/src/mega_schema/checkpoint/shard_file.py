"""Write one rank's pieces of one namespace as a safetensors file. Uses Python's standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from mega_schema.atomic_io import begin_flush, write_at, write_text
from mega_schema.checkpoint.checkpoint_dir import PIECE_FORMAT, PIECE_LIST_SUFFIX
from mega_schema.checkpoint.safetensors_header import build_header

CHUNK = 1 << 24  # bytes between two progress reports
# Bytes per write: they are still in the processor's cache after their checksum. For megabytes the system
# looks for large pages, which in a virtual machine the host may have to find first.
_SLICE = 1 << 18
FLUSH = 1 << 28  # bytes between two flushes: a single flush at the end would be long and without progress


class BoxRecord(TypedDict):
    """A box that a rank writes.

    Attributes:
        name, whole, dtype: name, shape and stored dtype of the tensor.
        start, shape: first index and extent of the box.
        bytes: of its values.
        buffer_offset: offset of its values in the writer's buffer, once it is assigned.
    """

    name: str
    whole: Sequence[int]
    dtype: str
    start: Sequence[int]
    shape: Sequence[int]
    bytes: int
    buffer_offset: NotRequired[int]


def piece_key(name: str, whole: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> str:
    """Return the key of a piece in its file.

    A part of a tensor has its range in the key, as a rank may hold several parts.
    """
    if tuple(shape) == tuple(whole):
        return name
    return f"{name}[{','.join(f'{s}:{s + n}' for s, n in zip(start, shape, strict=True))}]"


class ShardFileWriter:
    """A writer of one rank's file of a namespace; the offset of every box is known before writing starts.

    Boxes may be written in any order and by several threads, each box by one of them and from start to end.

    Attributes:
        name: of the file.
    """

    def __init__(self, folder: Path, namespace: str, rank: int, boxes: Sequence[BoxRecord]) -> None:
        """Create the file and compute the offset of every box.

        Args:
            boxes: for each its name, whole (the tensor's shape), dtype, start, shape and bytes.
        """
        stem = f"{namespace}-{rank:05d}"
        self.name = f"{stem}.safetensors"
        self._namespace = namespace
        self._list_path = folder / f"{stem}{PIECE_LIST_SUFFIX}"
        self._boxes = boxes
        header, offsets = build_header(map(_header_entry, boxes), {"format": f"mega {PIECE_FORMAT}"})
        self._written = [0] * len(boxes)
        self._checksums = [0] * len(boxes)
        self._offsets = offsets[:-1]
        self._size = offsets[-1]
        self._file = (folder / self.name).open("wb", buffering=0)
        write_at(self._file.fileno(), memoryview(header), 0)

    def write(self, number: int, values: memoryview) -> None:
        """Write the next bytes of box `number`.

        Raises:
            OSError: the disk is full, or refused the write for another reason.
        """
        descriptor = self._file.fileno()
        offset = self._offsets[number] + self._written[number]
        for begin in range(0, len(values), _SLICE):
            chunk = values[begin : begin + _SLICE]
            self._checksums[number] = zlib.crc32(chunk, self._checksums[number])
            write_at(descriptor, chunk, offset + begin)
        begin_flush(descriptor, offset, len(values))
        self._written[number] += len(values)

    def flush(self) -> None:
        """Flush all bytes written so far to the disk."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Flush the file, and write the list of its pieces beside it."""
        for box, written in zip(self._boxes, self._written, strict=True):
            assert written == box["bytes"], f"{box['name']}: {written} bytes for {box['bytes']}"
        self.flush()
        self._file.close()
        placed_boxes = zip(self._boxes, self._offsets, self._checksums, strict=True)
        records = [
            {key: value for key, value in box.items() if key != "buffer_offset"}
            | {"file": self.name, "offset": offset, "crc32": checksum}
            for box, offset, checksum in placed_boxes
        ]
        listing = {"namespace": self._namespace, "file": self.name, "size": self._size, "pieces": records}
        write_text(self._list_path, json.dumps(listing))

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()


def write_shard_file(
    folder: Path,
    namespace: str,
    rank: int,
    boxes: Sequence[BoxRecord],
    payload: Callable[[int], memoryview],
) -> Iterator[int]:
    """Write a rank's boxes of a namespace, and beside them the list of pieces.

    Args:
        payload: returns the bytes of box number i; called for one at a time and in order.

    Yields:
        bytes written since the last time, CHUNK at most.

    Raises:
        OSError: the disk is full, or refused the write for another reason.
    """
    if not boxes:
        return
    file = ShardFileWriter(folder, namespace, rank, boxes)
    waiting = 0
    with contextlib.closing(file):
        for number in range(len(boxes)):
            values = payload(number)
            for begin in range(0, len(values), CHUNK):
                chunk = values[begin : begin + CHUNK]
                file.write(number, chunk)
                if (waiting := waiting + len(chunk)) >= FLUSH:
                    file.flush()
                    waiting = 0
                yield len(chunk)
        file.finish()


def _header_entry(box: BoxRecord) -> tuple[str, str, Sequence[int], int]:
    key = piece_key(box["name"], box["whole"], box["start"], box["shape"])
    return key, box["dtype"], box["shape"], box["bytes"]
