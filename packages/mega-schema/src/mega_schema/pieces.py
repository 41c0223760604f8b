"""One rank's pieces of one namespace, as a safetensors file. Of Python's own library alone, as `disk` is."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_schema.disk import write_text
from mega_schema.run_folder import FORMAT, PIECES

CHUNK = 1 << 24  # bytes between two signs of life
_FLUSH = 1 << 28  # bytes that may wait to reach the disk: a flush at the end alone would be long and silent


def piece_key(name: str, whole: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> str:
    """What a piece is called in its file: a part has its place, since a rank may hold several of a tensor."""
    if tuple(shape) == tuple(whole):
        return name
    return f"{name}[{','.join(f'{s}:{s + n}' for s, n in zip(start, shape, strict=True))}]"


def write(
    folder: Path,
    namespace: str,
    rank: int,
    boxes: Sequence[Mapping[str, Any]],
    payload: Callable[[int], memoryview],
) -> Iterator[int]:
    """Write a rank's boxes of a namespace, and beside them the list of what was written.

    Args:
        boxes: of each its name, whole (the tensor's shape), dtype, start, shape and bytes.
        payload: the bytes of box number i; asked for one at a time and in order.

    Yields:
        bytes written since the last time, CHUNK at most.

    Raises:
        OSError: the disk is full, or would not write for another reason.
    """
    if not boxes:
        return
    name = f"{namespace}-{rank:05d}"
    file = folder / f"{name}.safetensors"
    records, waiting = [], 0
    with file.open("wb") as out:
        out.write(_header(boxes))
        for number, box in enumerate(boxes):
            at, checksum, values = out.tell(), 0, payload(number)
            assert len(values) == box["bytes"], f"{box['name']}: {len(values)} bytes for {box['bytes']}"
            for begin in range(0, len(values), CHUNK):
                chunk = values[begin : begin + CHUNK]
                checksum = zlib.crc32(chunk, checksum)
                out.write(chunk)
                if (waiting := waiting + len(chunk)) >= _FLUSH:
                    out.flush()
                    os.fsync(out.fileno())
                    waiting = 0
                yield len(chunk)
            place = {"file": file.name, "offset": at, "crc32": checksum}
            records.append({key: box[key] for key in _KEYS} | place)
        out.flush()
        os.fsync(out.fileno())
    told = {"namespace": namespace, "file": file.name, "size": file.stat().st_size, "pieces": records}
    write_text(folder / f"{name}{PIECES}", json.dumps(told))


_KEYS = ("name", "whole", "dtype", "start", "shape", "bytes")


def _header(boxes: Sequence[Mapping[str, Any]]) -> bytes:
    """safetensors' header: the length of a JSON text as u64, and the text, padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": f"mega {FORMAT}"}}
    at = 0
    for box in boxes:
        key = piece_key(box["name"], box["whole"], box["start"], box["shape"])
        entries[key] = {
            "dtype": box["dtype"],
            "shape": box["shape"],
            "data_offsets": [at, at + box["bytes"]],
        }
        at += box["bytes"]
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
