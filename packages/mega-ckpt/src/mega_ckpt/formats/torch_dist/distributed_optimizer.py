"""The state of Megatron core's distributed optimizer as it saves it by default: in buckets.

    optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(…).bucket_idx_1.exp_avg

The first number is of the rank of tensor and pipeline, tensor's first; the second of the chunk of the model.
A bucket is a vector: parameters of the chunk from the last module to the first, each at a multiple of 64. It
ends behind a parameter, so its length tells which are in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_ckpt.checkpoint.checkpoint_source import Found, gathered
from mega_ckpt.formats.megatron.names import COPY, CORE, CORE_FUSED, Names, of_chunk
from mega_ckpt.formats.torch_dist.dcp_reader import Whole
from mega_ckpt.name_maps.alias import Foreign, whole_slab
from mega_ckpt.name_maps.boxes import boxes_of_run, part_of
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.mapped_tensor import WIDTHS, Stored
from mega_schema.arch import table
from mega_schema.checkpoint import MAIN, MODEL, OPTIMIZER
from mega_schema.errors import MegaError
from mega_schema.layout import Layout
from mega_schema.shard import Slab
from mega_schema.spec import ModelSpec

KINDS: Mapping[str, str] = MappingProxyType(
    dict(zip(("param", "exp_avg", "exp_avg_sq"), OPTIMIZER, strict=True))
)
_KEY = re.compile(
    r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.(\w+)"
)
_ALIGN = 64

Spaces = dict[str, list[tuple[Foreign, Stored]]]


class UnknownError(Exception):
    """The buckets are not of these parameters."""


def read(
    where: Path,
    spec: ModelSpec,
    tensors: Mapping[str, Whole],
    args: Mapping[str, Any],
    padded: int,
    weights: Found,
) -> Mapping[str, Found]:
    """The state by namespace; none where the buckets are not of these parameters.

    Modules of TransformerEngine come in an order of their own; the right one has the model's weights in it.

    Args:
        tensors: of the optimizer.
        args: of the training.
        padded: rows of the vocabulary, all ranks together.
        weights: of the model.
    """
    sizes = (args.get(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline", "virtual_pipeline"))
    tp, pp, vp = (size if type(size) is int and size > 0 else 1 for size in sizes)
    for names in (CORE, CORE_FUSED):
        try:
            found = spaces(tensors, spec, names, Layout(tp=tp, pp=pp, vp=vp), padded // tp)
            if agree(where, spec, weights, found[MAIN]):
                if {stored.dtype for _, stored in weights} == {"F32"}:  # then the two are one
                    del found[MAIN]
                return found
        except (UnknownError, MegaError):
            continue
    return {}


def agree(where: Path, spec: ModelSpec, weights: Found, main: Found) -> bool:
    """Whether float32 weights of an optimizer are the model's: of each the last row.

    Raises:
        FormatError: a parameter is not covered, or is made of tensors of several dtypes.
    """
    kinds, box, _ = gathered(where, spec, {MODEL: weights, MAIN: main})
    shapes = {row.name: row.shape for row in table(spec)}
    for name, kind in kinds[MODEL].items():
        rows, *rest = shapes[name]
        zero = (0,) * len(rest)
        slab = Slab((rows - 1, *zero), (1, *rest), (0, *zero)) if rest else whole_slab((rows,))
        found = box(MAIN, name, slab)
        rounded = found if kind == "F32" else dtypes.rounded(found, kind)
        if rounded.tobytes() != box(MODEL, name, slab).tobytes():
            return False
    return True


def spaces(tensors: Mapping[str, Whole], spec: ModelSpec, names: Names, layout: Layout, rows: int) -> Spaces:
    """The optimizer's namespaces, each parameter as the runs of numbers that ranks wrote.

    Args:
        names: whose order is that of the modules.
        layout: of the ranks that wrote them.
        rows: of a rank's share of the vocabulary, padding included.

    Raises:
        UnknownError: a bucket is missing, or holds other parameters.
        ConfigError: the names have none for a part of the model.
        LayoutError: the model cannot be cut so.
    """
    vectors: dict[tuple[int, int, str], dict[int, Whole]] = {}
    for name, whole in tensors.items():
        found = _KEY.fullmatch(name)
        if found is None or found[4] not in KINDS or len(whole.shape) != 1:
            raise UnknownError
        vectors.setdefault((int(found[1]), int(found[2]), found[4]), {})[int(found[3])] = whole
    whole_everywhere = {row.name for row in table(spec) if row.split is None}
    made: Spaces = {space: [] for space in KINDS.values()}
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            for chunk in range(layout.vp):
                every = list(of_chunk(spec, names, layout, tp=tp, pp=pp, chunk=chunk, rows=rows))[::-1]
                for kind, space in KINDS.items():
                    buckets = vectors.pop((tp + layout.tp * pp, chunk, kind), {})
                    for foreign, bucket, begin in _placed(every, buckets):
                        copy = foreign.ours == "embed.weight" and foreign.name == names[COPY].format(
                            kind="weight"
                        )
                        if not copy and (tp == 0 or foreign.ours not in whole_everywhere):
                            made[space] += _runs(foreign, bucket, begin)
    if vectors:
        raise UnknownError
    return made


def _placed(every: Sequence[Foreign], buckets: Mapping[int, Whole]) -> Iterator[tuple[Foreign, Whole, int]]:
    """Every tensor, the bucket that it is in, and where it begins."""
    done = 0
    for number in range(len(buckets)):
        if number not in buckets:
            raise UnknownError
        (length,), end = buckets[number].shape, 0
        for foreign in every[done:]:
            begin, size = _aligned(end), math.prod(foreign.shape)
            if begin + size > length:
                break
            yield foreign, buckets[number], begin
            done, end = done + 1, begin + size
        if length not in (end, _aligned(end)):
            raise UnknownError
    if done != len(every):
        raise UnknownError


def _aligned(place: int) -> int:
    return -(-place // _ALIGN) * _ALIGN


def _runs(foreign: Foreign, bucket: Whole, begin: int) -> Iterator[tuple[Foreign, Stored]]:
    end = begin + math.prod(foreign.shape)
    for piece in bucket.pieces:
        (first,), (count,), stored = piece.start, piece.shape, piece.stored
        if stored.dtype != "F32" or stored.strides is not None:
            raise UnknownError
        low, high = max(first, begin), min(first + count, end)
        offset = stored.offset + WIDTHS["F32"] * (low - first)
        for start, extent in boxes_of_run(foreign.shape, low - begin, high - begin):
            run = replace(stored, shape=extent, offset=offset)
            yield part_of(foreign, start, extent), run
            offset += run.bytes
