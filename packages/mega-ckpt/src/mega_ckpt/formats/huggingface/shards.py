"""A model's safetensors files as Hugging Face has them: one, or several and an index; filled on all cores.

    model.safetensors                      where one is enough, else
    model-00001-of-00002.safetensors ...   cut between tensors, in their order
    model.safetensors.index.json           {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}

Every tensor has its place from the start. A parameter of ours is read once, from its first row to its last,
and its rows are written where they belong; a tensor that is transposed there waits in memory until it is
whole, one at a time.
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

from mega_ckpt.name_maps.alias import Foreign, copy, runs
from mega_ckpt.tensors import safetensors_io
from mega_ckpt.tensors.parallel_map import Progress, Told, each
from mega_ckpt.tensors.row_stream import Band, as_bytes
from mega_ckpt.tensors.safetensors_io import Announced
from mega_schema.checkpoint import DTYPES
from mega_schema.disk import begin_flush, on_disk, write_at, write_text

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of theirs, whole, and the dtype it is written in."""

    foreign: Foreign
    dtype: str

    @property
    def announced(self) -> Announced:
        return Announced(self.foreign.name, self.dtype, self.foreign.shape)


def write(
    folder: Path,
    weights: Sequence[Weight],
    bands: Callable[[str, str], Iterator[Band]],
    most: int,
    progress: Progress,
) -> None:
    """Write the files of a model.

    Args:
        bands: of a parameter of ours in a dtype; called by several threads.
        most: bytes of the tensors of one file; one tensor alone may be more.
        progress: of the bytes written.

    Raises:
        MegaError: the disk is full, or would not write for another reason.
    """
    shards = _cut(weights, most)
    names = [WEIGHTS] if len(shards) == 1 else [_numbered(i, len(shards)) for i in range(len(shards))]
    size = sum(weight.announced.bytes for weight in weights)
    places: dict[str, list[_Place]] = {}
    one_whole = threading.Lock()

    def parameter(ours: str, told: Told) -> None:
        turned = any(place.weight.foreign.transpose for place in places[ours])
        with one_whole if turned else contextlib.nullcontext():
            for band in bands(ours, places[ours][0].weight.dtype):
                for place in places[ours]:
                    told(place.put(band))

    with on_disk(folder), contextlib.ExitStack() as opened:
        files = [opened.enter_context((folder / name).open("wb", buffering=0)) for name in names]
        for file, shard in zip(files, shards, strict=True):
            header, begins = safetensors_io.header([weight.announced for weight in shard], {"format": "pt"})
            write_at(file.fileno(), memoryview(header), 0)
            for weight, begin in zip(shard, begins, strict=True):
                places.setdefault(weight.foreign.ours, []).append(_Place(file.fileno(), begin, weight))
        with progress(size) as told:
            each(list(places), parameter, told)
        for file in files:
            os.fsync(file.fileno())
    if len(shards) > 1:
        where = {w.foreign.name: name for name, shard in zip(names, shards, strict=True) for w in shard}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _cut(weights: Sequence[Weight], most: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    room = most
    for weight in weights:
        if shards[-1] and weight.announced.bytes > room:
            shards.append([])
            room = most
        shards[-1].append(weight)
        room -= weight.announced.bytes
    return shards


def _numbered(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


class _Place:
    """Where a tensor lies in a file, as it is filled from bands of the parameter of ours."""

    def __init__(self, descriptor: int, begin: int, weight: Weight) -> None:
        self.weight, self._descriptor, self._begin = weight, descriptor, begin
        (self._box,) = weight.foreign.boxes
        self._whole: np.ndarray | None = None

    def put(self, band: Band) -> int:
        """Take what the tensor has of a band; returns the bytes."""
        foreign, start, rows = self.weight.foreign, self._box.start[0], self._box.shape[0]
        first = max(band.first, start)
        past = min(band.first + len(band.values), start + rows)
        if first >= past:
            return 0
        values = band.values[first - band.first : past - band.first]
        at = first - start
        if foreign.transpose:
            self._turned(values, at, last=past == start + rows)
        elif foreign.order is None:
            self._write(values, at)
        else:
            order = np.asarray(foreign.order[at : at + len(values)])
            for row, begin, count in runs(order):
                self._write(values[begin : begin + count], row)
        return values.nbytes

    def _turned(self, values: np.ndarray, at: int, *, last: bool) -> None:
        foreign = self.weight.foreign
        if self._whole is None:
            self._whole = np.empty(foreign.shape, DTYPES[self.weight.dtype])
        assert foreign.order is None
        copy(self._whole[:, at : at + len(values)], values.T)
        if last:
            self._write(self._whole, 0)
            self._whole = None

    def _write(self, values: np.ndarray, row: int) -> None:
        """Rows that follow each other, and the first of them in the file."""
        taken = as_bytes(values)
        at = self._begin + row * (len(taken) // len(values))
        write_at(self._descriptor, taken, at)
        begin_flush(self._descriptor, at, len(taken))
