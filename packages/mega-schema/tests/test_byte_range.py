"""Byte ranges of files and their checksums, and the header of a safetensors file."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import pytest

from mega_schema.checkpoint.byte_range import crc32_of_range, read_range
from mega_schema.checkpoint.safetensors_header import build_header

SIZE = 200_000  # bytes; several blocks


@pytest.mark.parametrize(
    ("begin", "size"), [(0, SIZE), (0, 0), (1, 1 << 16), (7, (1 << 16) + 1), (SIZE - 5, 5), (SIZE - 5, 100)]
)
def test_the_checksum_of_a_range_is_that_of_its_bytes(begin: int, size: int, tmp_path: Path) -> None:
    values = random.Random(1).randbytes(SIZE)
    (tmp_path / "file").write_bytes(values)
    updates = list[int]()
    with (tmp_path / "file").open("rb") as file:
        crc = crc32_of_range(file, begin, size, updates.append)
        blocks = []
        for block in read_range(file, begin, size):
            file.seek(3)
            blocks.append(block)
    wanted = values[begin : begin + size]
    assert crc == zlib.crc32(wanted)
    assert b"".join(blocks) == wanted
    assert sum(updates) == len(wanted)


def test_a_safetensors_header_has_the_offset_of_each_tensor_in_the_file() -> None:
    tensors = [("a", "F32", (2, 3), 24), ("empty", "BF16", (0,), 0), ("b", "U8", (5,), 5)]
    header, offsets = build_header(tensors, {"format": "pt"})
    length = int.from_bytes(header[:8], "little")
    assert (len(header), len(header) % 8) == (8 + length, 0)
    assert [offset - len(header) for offset in offsets] == [0, 24, 24, 29]
    assert json.loads(header[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "empty": {"dtype": "BF16", "shape": [0], "data_offsets": [24, 24]},
        "b": {"dtype": "U8", "shape": [5], "data_offsets": [24, 29]},
    }
