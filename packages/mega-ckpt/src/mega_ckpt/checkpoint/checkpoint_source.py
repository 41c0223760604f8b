"""An open checkpoint of any format: the interface between readers and writers.

A reader turns files into a `CheckpointSource`, a writer turns a `CheckpointSource` into files; neither knows
the other. They exchange boxes of Mega's parameters in the stored dtype, so no value changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_ckpt.name_maps.alias import ForeignTensor, consecutive_ranges, copy_values
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.mapped_tensor import MappedTensor, verify_checksums
from mega_ckpt.tensors.row_stream import ReadRows, RowChunk, row_slabs, rows_per_chunk
from mega_schema.arch import table
from mega_schema.checkpoint.reader import DTYPES
from mega_schema.errors import FormatError
from mega_schema.sharding import Shape, Slab, overlap
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer

ReadBox = Callable[[str, str, Slab], np.ndarray]


UNTRAINED: Mapping[str, int] = MappingProxyType({"iteration": 0, "consumed_samples": 0, "optimizer_steps": 0})


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """The content of a checkpoint under Mega's parameter names.

    Attributes:
        path: the folder or file, with which messages begin.
        spaces: namespace -> parameter -> safetensors' name of its dtype; `MODEL`, and those of `OPTIMIZER` if
            the optimizer's state was read. Tied parameters are in no namespace.
        read_box: reads a box of a parameter in a namespace, in the stored dtype; bfloat16 as uint16 bits.
        trainer: the content of trainer.json; {"iteration": 0, ...} if there was no training.
        run_config: the run's configuration as TOML.
        dropped: descriptions of the data that a Mega checkpoint cannot store.
        verify: verifies the values of some namespaces by checksums or replicas; raises a FormatError.
        verified_chunks: streams a whole parameter in the stored dtype and verifies its checksums;
            None for a format without checksums.
        check_metadata: validates everything but the tensor data. Enough if the data is read through
            `verified_chunks`.
    """

    path: Path
    spec: ModelSpec
    spaces: Mapping[str, Mapping[str, str]]
    read_box: ReadBox
    trainer: Mapping[str, Any] = field(default_factory=lambda: UNTRAINED)
    tokenizer: Tokenizer | None = None
    run_config: str | None = None
    dropped: tuple[str, ...] = ()
    verify: Callable[[Collection[str]], object] = lambda _: None
    verified_chunks: ReadRows | None = None
    check_metadata: Callable[[], object] = lambda: None

    @property
    def iteration(self) -> int:
        return int(self.trainer["iteration"])

    def size(self, space: str) -> int:
        """Return the stored bytes of a namespace."""
        rows = {row.name: row.size for row in table(self.spec)}
        return sum(rows[name] * DTYPES[dtype].itemsize for name, dtype in self.spaces[space].items())

    def cast(self, space: str, name: str, slab: Slab, dtype: str) -> np.ndarray:
        """Read a box in another dtype.

        Raises:
            FormatError: a finite number would become infinite.
        """
        stored_dtype = self.spaces[space][name]
        return dtypes.cast(self.read_box(space, name, slab), stored_dtype, dtype, f"{self.path}: {name}")

    def row_chunks(self, space: str, name: str, shape: Shape, dtype: str) -> Iterator[RowChunk]:
        """Read a whole parameter in another dtype, some rows at a time.

        Args:
            shape: of the parameter.

        Raises:
            FormatError: a finite number would become infinite.
        """
        stored_dtype = self.spaces[space][name]
        if self.verified_chunks is None:
            for slab in row_slabs(shape, rows_per_chunk(shape, stored_dtype)):
                yield RowChunk(slab.start[0], self.cast(space, name, slab, dtype))
            return
        for chunk in self.verified_chunks(space, name):
            values = dtypes.cast(chunk.values, stored_dtype, dtype, f"{self.path}: {name}")
            yield RowChunk(chunk.first, values)

    def assemble(self, space: str, foreign: ForeignTensor, dtype: str) -> np.ndarray:
        """Build a tensor as a foreign file stores it; needs memory for one tensor and a few rows."""
        return foreign.assemble(DTYPES[dtype], lambda slab: self.cast(space, foreign.ours, slab, dtype))

    def foreign_chunks(self, space: str, foreign: ForeignTensor, dtype: str) -> Iterator[RowChunk]:
        """Read a tensor that is not transposed as a foreign file stores it, some rows at a time.

        Padding is zero.
        """
        assert not foreign.transpose, foreign.name
        row_shape = foreign.shape[1:]
        row_numbers = np.arange(foreign.shape[0])
        if foreign.order is not None:
            row_numbers[np.asarray(foreign.order)] = np.arange(foreign.shape[0])
        step = rows_per_chunk(foreign.shape, dtype)
        for first in range(0, foreign.shape[0], step):
            rows = wanted = row_numbers[first : first + step]
            out = np.zeros((len(rows), *row_shape), DTYPES[dtype])
            permuted = foreign.order is not None and int(np.ptp(wanted)) < len(wanted)
            if permuted:  # contiguous rows in another order, such as Meta's queries
                rows = np.sort(wanted)
            for row, begin, count in consecutive_ranges(rows):
                for box in foreign.boxes:
                    common = overlap(
                        (row, *(0,) * len(row_shape)), (count, *row_shape), box.local_start, box.shape
                    )
                    if common is not None:
                        start = tuple(a + b for a, b in zip(box.start, common.in_b, strict=True))
                        slab = Slab(start, common.shape, (begin + common.in_a[0], *common.in_a[1:]))
                        out[slab.in_local] = self.cast(space, foreign.ours, slab, dtype)
            yield RowChunk(first, out[wanted - rows[0]] if permuted else out)


def check_width(where: object, spec: ModelSpec, numbers: int) -> None:
    """Refuse more attention heads than the stored tensors can contain, before row orders are built.

    Args:
        where: the file or folder, to begin messages with.
        numbers: number of stored elements, all tensors together.

    Raises:
        FormatError: one layer's Q, K and V have more elements.
    """
    rows = spec.q_rows + 2 * spec.kv_rows
    if rows * spec.hidden > numbers:
        raise FormatError(
            where,
            "numbers in all tensors",
            found=numbers,
            wanted=f"{rows} x {spec.hidden} or more, for Q, K and V of a layer",
        )


MatchedTensors = Sequence[tuple[ForeignTensor, MappedTensor]]


def match_tensors(
    where: object, expected: Iterable[ForeignTensor], stored: Mapping[str, MappedTensor]
) -> MatchedTensors:
    """Pair every expected tensor with the stored tensor of that name.

    Args:
        where: the folder or file, to begin messages with.

    Raises:
        FormatError: a tensor is missing, unknown, of another shape, or not floating-point.
    """
    matches = []
    for foreign in expected:
        tensor = stored.get(foreign.name)
        if tensor is None:
            raise FormatError(where, "has no tensor", wanted=foreign.name)
        where_tensor = f"{tensor.file}: {foreign.name}"
        if tensor.shape != foreign.shape:
            raise FormatError(where_tensor, "shape", found=tensor.shape, wanted=foreign.shape)
        if tensor.dtype not in dtypes.FLOATS:
            raise FormatError(where_tensor, "dtype", found=tensor.dtype, wanted=" | ".join(dtypes.FLOATS))
        matches.append((foreign, tensor))
    known = {foreign.name for foreign, _ in matches}
    for name in stored:
        if name not in known:
            raise FormatError(where, "has a tensor that is not in the model", found=name)
    return matches


def gather_boxes(
    where: Path, spec: ModelSpec, spaces: Mapping[str, MatchedTensors]
) -> tuple[dict[str, Any], ReadBox, Callable[[Collection[str]], None]]:
    """Build the `spaces`, `read_box` and `verify` of a source from foreign tensors.

    Raises:
        FormatError: a parameter is not covered, or its tensors have several dtypes.
    """
    rows = {row.name: row for row in table(spec) if row.tied_to is None}
    parts: dict[str, dict[str, list[tuple[ForeignTensor, MappedTensor]]]] = {}
    for space, matches in spaces.items():
        for foreign, stored in matches:
            parts.setdefault(space, {}).setdefault(foreign.ours, []).append((foreign, stored))
    dtype: dict[str, dict[str, str]] = {}
    for space, by_name in parts.items():
        for name, row in rows.items():
            members = by_name.get(name, [])
            covered = sum(math.prod(box.shape) for foreign, _ in members for box in foreign.boxes)
            if covered != row.size:
                raise FormatError(f"{where}: {space} {name}", "numbers", found=covered, wanted=row.size)
            kinds = {stored.dtype for _, stored in members}
            if len(kinds) > 1:
                names = ", ".join(foreign.name for foreign, _ in members)
                raise FormatError(f"{where}: {names}", "dtypes differ", found=sorted(kinds))
            dtype.setdefault(space, {})[name] = kinds.pop()

    def box(space: str, name: str, slab: Slab) -> np.ndarray:
        out = np.empty(slab.shape, DTYPES[dtype[space][name]])
        for foreign, stored in parts[space][name]:
            for have in foreign.boxes:
                common = overlap(slab.start, slab.shape, have.start, have.shape)
                if common is not None:
                    begin = [a + b for a, b in zip(have.local_start, common.in_b, strict=True)]
                    index = tuple(slice(b, b + n) for b, n in zip(begin, common.shape, strict=True))
                    copy_values(out[common.a], foreign.select(stored.values(), index))
        return out

    def verify(wanted: Collection[str]) -> None:
        verify_checksums(stored for space in wanted for _, stored in spaces[space])

    return dtype, box, verify
