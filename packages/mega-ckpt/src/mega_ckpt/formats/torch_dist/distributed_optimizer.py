"""Read the bucketed state of Megatron core's distributed optimizer, which it saves by default.

    optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(…).bucket_idx_1.exp_avg

The first number is the model-parallel rank, tp fastest; the second is the model chunk. A bucket is a vector
of the chunk's parameters from the last module to the first, each at a multiple of 64. It ends after a whole
parameter, so its length determines the parameters in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_ckpt.checkpoint.checkpoint_source import MatchedTensors, gather_boxes
from mega_ckpt.formats.megatron.names import COPY, Names, chunk_tensors, core_names
from mega_ckpt.formats.megatron.optimizer import Spaces
from mega_ckpt.formats.torch_dist.dcp_reader import DcpTensor
from mega_ckpt.name_maps.alias import ForeignTensor, whole_slab
from mega_ckpt.name_maps.boxes import select_box
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.mapped_tensor import DTYPE_BYTES, MappedTensor
from mega_schema.arch import table
from mega_schema.checkpoint.flat_ranges import range_boxes
from mega_schema.checkpoint.reader import MAIN, MODEL, OPTIMIZER
from mega_schema.errors import MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec

KINDS: Mapping[str, str] = MappingProxyType(
    dict(zip(("param", "exp_avg", "exp_avg_sq"), OPTIMIZER, strict=True))
)
_KEY = re.compile(
    r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.(\w+)"
)
_ALIGN = 64


class UnknownLayoutError(Exception):
    """The buckets do not contain these parameters."""


def read_optimizer(
    where: Path,
    spec: ModelSpec,
    tensors: Mapping[str, DcpTensor],
    args: Mapping[str, Any],
    padded: int,
    weights: MatchedTensors,
) -> Mapping[str, MatchedTensors]:
    """Return the state by namespace; {} if the buckets do not contain these parameters.

    TransformerEngine has another module order; the right order is the one whose main weights match the
    model's.

    Args:
        tensors: tensors of the optimizer.
        args: training arguments.
        padded: vocabulary rows over all ranks.
        weights: weights of the model.
    """
    sizes = (args.get(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline", "virtual_pipeline"))
    tp, pp, vp = (size if type(size) is int and size > 0 else 1 for size in sizes)
    for names in core_names(spec):
        try:
            namespaces = optimizer_namespaces(tensors, spec, names, Layout(tp=tp, pp=pp, vp=vp), padded // tp)
            if weights_match(where, spec, weights, namespaces[MAIN]):
                if {stored.dtype for _, stored in weights} == {"F32"}:  # then both module orders are equal
                    del namespaces[MAIN]
                return namespaces
        except (UnknownLayoutError, MegaError):
            continue
    return {}


def weights_match(where: Path, spec: ModelSpec, weights: MatchedTensors, main: MatchedTensors) -> bool:
    """Return whether the main weights round to the model's weights; compares the first and last rows.

    The last row alone does not show that an embedding is shifted, as the padding repeats it.

    Raises:
        FormatError: a parameter is not covered, or its tensors have several dtypes.
    """
    kinds, box, _ = gather_boxes(where, spec, {MODEL: weights, MAIN: main})
    shapes = {row.name: row.shape for row in table(spec)}
    for name, kind in kinds[MODEL].items():
        rows, *row_shape = shapes[name]
        zero = (0,) * len(row_shape)
        ends = [Slab((row, *zero), (1, *row_shape), (0, *zero)) for row in (0, rows - 1)]
        for slab in ends if row_shape else [whole_slab((rows,))]:
            values = box(MAIN, name, slab)
            rounded = values if kind == "F32" else dtypes.round_float32(values, kind)
            if rounded.tobytes() != box(MODEL, name, slab).tobytes():
                return False
    return True


def optimizer_namespaces(
    tensors: Mapping[str, DcpTensor], spec: ModelSpec, names: Names, layout: Layout, rows: int
) -> Spaces:
    """Map the buckets to the optimizer's namespaces, each parameter as flat ranges.

    Args:
        names: naming scheme, which defines the module order.
        layout: layout of the ranks that wrote the buckets.
        rows: vocabulary rows of one rank, padding included.

    Raises:
        UnknownLayoutError: a bucket is missing, or contains other parameters.
        ConfigError: the names have none for a part of the model.
        LayoutError: the model cannot be split this way.
    """
    vectors: dict[tuple[int, int, str], dict[int, DcpTensor]] = {}
    for name, whole in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None or match[4] not in KINDS or len(whole.shape) != 1:
            raise UnknownLayoutError
        vectors.setdefault((int(match[1]), int(match[2]), match[4]), {})[int(match[3])] = whole
    replicated = {row.name for row in table(spec) if row.split is None}
    namespaces: Spaces = {space: [] for space in KINDS.values()}
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            for chunk in range(layout.vp):
                tensors_of_chunk = list(
                    chunk_tensors(spec, names, layout, tp=tp, pp=pp, chunk=chunk, rows=rows)
                )[::-1]
                for kind, space in KINDS.items():
                    buckets = vectors.pop((tp + layout.tp * pp, chunk, kind), {})
                    for foreign, bucket, begin in _locate_tensors(tensors_of_chunk, buckets):
                        copy = foreign.ours == "embed.weight" and foreign.name == names[COPY].format(
                            kind="weight"
                        )
                        if not copy and (tp == 0 or foreign.ours not in replicated):
                            namespaces[space] += _tensor_ranges(foreign, bucket, begin)
    if vectors:
        raise UnknownLayoutError
    return namespaces


def _locate_tensors(
    expected: Sequence[ForeignTensor], buckets: Mapping[int, DcpTensor]
) -> Iterator[tuple[ForeignTensor, DcpTensor, int]]:
    """Yield every tensor with its bucket and its offset in the bucket."""
    placed = 0
    for number in range(len(buckets)):
        if number not in buckets:
            raise UnknownLayoutError
        (length,) = buckets[number].shape
        end = 0
        for foreign in expected[placed:]:
            begin = _align(end)
            size = math.prod(foreign.shape)
            if begin + size > length:
                break
            yield foreign, buckets[number], begin
            placed, end = placed + 1, begin + size
        if length not in (end, _align(end)):
            raise UnknownLayoutError
    if placed != len(expected):
        raise UnknownLayoutError


def _align(place: int) -> int:
    return -(-place // _ALIGN) * _ALIGN


def _tensor_ranges(
    foreign: ForeignTensor, bucket: DcpTensor, begin: int
) -> Iterator[tuple[ForeignTensor, MappedTensor]]:
    end = begin + math.prod(foreign.shape)
    for piece in bucket.pieces:
        (first,) = piece.start
        (count,) = piece.shape
        stored = piece.stored
        if stored.dtype != "F32" or stored.strides is not None:
            raise UnknownLayoutError
        low = max(first, begin)
        high = min(first + count, end)
        offset = stored.offset + DTYPE_BYTES["F32"] * (low - first)
        for start, extent in range_boxes(foreign.shape, low - begin, high - begin):
            values = replace(stored, shape=extent, offset=offset)
            yield select_box(foreign, start, extent), values
            offset += values.bytes
