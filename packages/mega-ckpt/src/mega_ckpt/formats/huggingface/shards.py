"""Write a model's safetensors files as Hugging Face does: one, or several with an index.

    model.safetensors if one is enough, else
    model-00001-of-00002.safetensors ...   split between tensors, in their order
    model.safetensors.index.json           {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}

Every tensor has its final byte range before writing starts. A parameter is read once, from its first row to
its last, and its rows are written to their offsets; a transposed tensor is assembled in memory, one at a
time.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mega_ckpt.name_maps.alias import ForeignTensor, consecutive_ranges, copy_values
from mega_ckpt.tensors import safetensors_io
from mega_ckpt.tensors.parallel_map import Progress, UpdateProgress, parallel_map
from mega_ckpt.tensors.row_stream import RowChunk, as_bytes
from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_schema.atomic_io import begin_flush, disk_errors, write_at, write_text
from mega_schema.checkpoint.reader import DTYPES

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WeightToWrite:
    """A whole foreign tensor and the dtype it is written in."""

    foreign: ForeignTensor
    dtype: str

    @property
    def header(self) -> TensorHeader:
        return TensorHeader(self.foreign.name, self.dtype, self.foreign.shape)


def write_weights(
    folder: Path,
    weights: Sequence[WeightToWrite],
    read_rows: Callable[[str, str], Iterator[RowChunk]],
    most: int,
    progress: Progress,
) -> None:
    """Write the weight files of a model.

    Args:
        read_rows: streams a parameter in a dtype; called by several threads.
        most: maximum bytes of the tensors of one file; a single tensor may exceed it.
        progress: called with the bytes written.

    Raises:
        MegaError: the disk is full, or refused the write for another reason.
    """
    shards = _split_into_files(weights, most)
    names = [WEIGHTS] if len(shards) == 1 else [_file_name(i, len(shards)) for i in range(len(shards))]
    size = sum(weight.header.bytes for weight in weights)
    slots: dict[str, list[_TensorSlot]] = {}
    one_whole = threading.Lock()

    def parameter(name: str, update: UpdateProgress) -> None:
        transposed = any(slot.weight.foreign.transpose for slot in slots[name])
        with one_whole if transposed else contextlib.nullcontext():
            for chunk in read_rows(name, slots[name][0].weight.dtype):
                for slot in slots[name]:
                    update(slot.put(chunk))

    with disk_errors(folder), contextlib.ExitStack() as opened:
        files = [opened.enter_context((folder / name).open("wb", buffering=0)) for name in names]
        for file, shard in zip(files, shards, strict=True):
            header, begins = safetensors_io.build_header(
                [weight.header for weight in shard], {"format": "pt"}
            )
            write_at(file.fileno(), memoryview(header), 0)
            for weight, begin in zip(shard, begins, strict=True):
                slots.setdefault(weight.foreign.ours, []).append(_TensorSlot(file.fileno(), begin, weight))
        with progress(size) as update:
            parallel_map(list(slots), parameter, update)
        for file in files:
            os.fsync(file.fileno())
    if len(shards) > 1:
        where = {w.foreign.name: name for name, shard in zip(names, shards, strict=True) for w in shard}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _split_into_files(weights: Sequence[WeightToWrite], most: int) -> list[list[WeightToWrite]]:
    shards: list[list[WeightToWrite]] = [[]]
    room = most
    for weight in weights:
        if shards[-1] and weight.header.bytes > room:
            shards.append([])
            room = most
        shards[-1].append(weight)
        room -= weight.header.bytes
    return shards


def _file_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


class _TensorSlot:
    """The byte range of a tensor in a file, filled from row chunks of a parameter."""

    def __init__(self, descriptor: int, begin: int, weight: WeightToWrite) -> None:
        self.weight = weight
        self._descriptor = descriptor
        self._begin = begin
        (self._box,) = weight.foreign.boxes
        self._whole: np.ndarray | None = None

    def put(self, chunk: RowChunk) -> int:
        """Write the part of a chunk that belongs to the tensor; return its bytes."""
        foreign = self.weight.foreign
        start = self._box.start[0]
        rows = self._box.shape[0]
        first = max(chunk.first, start)
        past = min(chunk.first + len(chunk.values), start + rows)
        if first >= past:
            return 0
        values = chunk.values[first - chunk.first : past - chunk.first]
        row_offset = first - start
        if foreign.transpose:
            self._write_transposed(values, row_offset, last=past == start + rows)
        elif foreign.order is None:
            self._write(values, row_offset)
        else:
            order = np.asarray(foreign.order[row_offset : row_offset + len(values)])
            for row, begin, count in consecutive_ranges(order):
                self._write(values[begin : begin + count], row)
        return values.nbytes

    def _write_transposed(self, values: np.ndarray, row_offset: int, *, last: bool) -> None:
        foreign = self.weight.foreign
        if self._whole is None:
            self._whole = np.empty(foreign.shape, DTYPES[self.weight.dtype])
        assert foreign.order is None
        copy_values(self._whole[:, row_offset : row_offset + len(values)], values.T)
        if last:
            self._write(self._whole, 0)
            self._whole = None

    def _write(self, values: np.ndarray, row: int) -> None:
        """Write consecutive rows, the first at `row`."""
        data = as_bytes(values)
        offset = self._begin + row * (len(data) // len(values))
        write_at(self._descriptor, data, offset)
        begin_flush(self._descriptor, offset, len(data))
