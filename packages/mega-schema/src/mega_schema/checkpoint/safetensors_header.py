"""Build the header of a safetensors file.

    u64 little endian   length of the header
    header              JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__"
    values              of every tensor in C order, little endian, end to end; offsets count from here

Uses Python's standard library only: the process that writes checkpoints imports this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_ALIGNMENT = 8  # bytes; the header is padded, so that the values begin at a multiple


def build_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Return the first bytes of a file, and the offset in the file of each tensor and of the end.

    Args:
        tensors: name, dtype, shape and size in bytes of each.
        metadata: of the whole file.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets = [0]
    for name, dtype, shape, size in tensors:
        end = offsets[-1] + size
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offsets[-1], end]}
        offsets.append(end)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + offset for offset in offsets]
