"""Compare the tensors of two checkpoints of any formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.tensors.dtypes import as_float64
from mega_ckpt.tensors.parallel_map import Progress, UpdateProgress, no_progress, parallel_map
from mega_ckpt.tensors.row_stream import CHUNK_BYTES, row_slabs
from mega_schema.arch import table
from mega_schema.checkpoint.reader import DTYPES, MODEL
from mega_schema.sharding import Shape
from mega_schema.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that differs.

    Attributes:
        what: "missing", "shape", "dtype" or "values"; the first that applies.
        a, b: shape or dtype on each side; None if it has no such tensor.
        differing, elements: number of elements that differ, and of all; 0 if they were not compared.
        absolute, relative: the largest |a - b|, and the largest |a - b| / max(|a|, |b|), over elements that
            are finite in both.
    """

    space: str
    name: str
    what: str
    a: str | None
    b: str | None
    differing: int = 0
    elements: int = 0
    absolute: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True, slots=True)
class DiffResult:
    """The result of comparing two checkpoints.

    Attributes:
        tensors: number of tensors that both have, with equal shapes.
        differences: the tensors that differ, in the order of the model's parameters.
        only_a, only_b: namespaces of only one checkpoint, which are not compared.
    """

    tensors: int
    differences: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        differences = [asdict(difference) for difference in self.differences]
        return {
            "same": self.is_same,
            "tensors": self.tensors,
            "differences": differences,
            "not_compared": {"a": list(self.only_a), "b": list(self.only_b)},
        }


def diff_checkpoints(
    a: CheckpointSource, b: CheckpointSource, *, optimizer: bool = True, progress: Progress = no_progress
) -> DiffResult:
    """Compare every tensor of two checkpoints as numbers: NaN is equal to NaN, -0 to 0.

    Args:
        optimizer: also compare optimizer namespaces that both have.
        progress: called with the bytes read of `a`.

    Raises:
        FormatError: a checkpoint is damaged.
    """
    shapes_a, shapes_b = _shapes(a.spec), _shapes(b.spec)
    differences: list[TensorDifference] = []
    shared: list[tuple[str, str, Shape]] = []
    spaces = [space for space in a.spaces if space in b.spaces and (optimizer or space == MODEL)]
    for space in spaces:
        for name in dict.fromkeys([*a.spaces[space], *b.spaces[space]]):
            kinds = a.spaces[space].get(name), b.spaces[space].get(name)
            shape = shapes_a.get(name)
            other_shape = shapes_b.get(name)
            if None in kinds:
                differences.append(TensorDifference(space, name, "missing", *kinds))
            elif shape is None or other_shape is None or shape != other_shape:
                differences.append(
                    TensorDifference(space, name, "shape", _shape_text(shape), _shape_text(other_shape))
                )
            else:
                shared.append((space, name, shape))

    for source in (a, b):
        source.verify(spaces)

    def tensor(job: tuple[str, str, Shape], update: UpdateProgress) -> None:
        difference = _compare_tensor(a, b, *job, update)
        if difference is not None:
            differences.append(difference)

    sizes = (math.prod(shape) * DTYPES[a.spaces[space][name]].itemsize for space, name, shape in shared)
    with progress(sum(sizes)) as update:
        parallel_map(shared, tensor, update)
    order = {key: number for number, key in enumerate(_tensor_order(a, b, spaces))}
    return DiffResult(
        len(shared),
        tuple(sorted(differences, key=lambda entry: order[entry.space, entry.name])),
        tuple(space for space in a.spaces if space not in b.spaces),
        tuple(space for space in b.spaces if space not in a.spaces),
    )


def _compare_tensor(
    a: CheckpointSource, b: CheckpointSource, space: str, name: str, shape: Shape, update: UpdateProgress
) -> TensorDifference | None:
    kinds = a.spaces[space][name], b.spaces[space][name]
    row = math.prod(shape[1:]) * max(DTYPES[kind].itemsize for kind in kinds)
    differing, absolute, relative = 0, 0.0, 0.0
    for slab in row_slabs(shape, max(1, CHUNK_BYTES // max(1, row))):
        values_a, values_b = (source.read_box(space, name, slab) for source in (a, b))
        update(values_a.nbytes)
        if kinds[0] == kinds[1] and values_a.tobytes() == values_b.tobytes():
            continue
        x, y = as_float64(values_a, kinds[0]), as_float64(values_b, kinds[1])
        differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
        differing += int(np.count_nonzero(differs))
        differs &= np.isfinite(x) & np.isfinite(y)
        if differs.any():
            x, y = x[differs], y[differs]
            apart = np.abs(x - y)
            absolute = max(absolute, float(apart.max()))
            relative = max(relative, float((apart / np.maximum(np.abs(x), np.abs(y))).max()))
    if not differing and kinds[0] == kinds[1]:
        return None
    what = "dtype" if kinds[0] != kinds[1] else "values"
    return TensorDifference(space, name, what, *kinds, differing, math.prod(shape), absolute, relative)


def _shapes(spec: ModelSpec) -> dict[str, Shape]:
    return {row.name: row.shape for row in table(spec)}


def _shape_text(shape: Shape | None) -> str | None:
    return None if shape is None else " x ".join(map(str, shape))


def _tensor_order(a: CheckpointSource, b: CheckpointSource, spaces: Sequence[str]) -> list[tuple[str, str]]:
    return [(s, n) for s in spaces for n in dict.fromkeys([*a.spaces[s], *b.spaces[s]])]
