"""Tensor names of BigScience's Megatron-DeepSpeed: one file per layer and tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator

from mega_ckpt.formats.megatron.names import LEGACY, foreign_name, pad_vocab, rank_order
from mega_ckpt.name_maps.alias import ForeignTensor, TensorAlias
from mega_schema.arch import table
from mega_schema.params import Param
from mega_schema.spec import ModelSpec

_FIRST, _LAYERS, _LAST = 1, 3, 4  # files before the first layer's, and after the last one's: others are empty


def rank_tensors(spec: ModelSpec, rank: int, tp: int, rows: int) -> Iterator[tuple[int, ForeignTensor]]:
    """Yield every tensor of rank `rank` of `tp`, with the number of its file.

    Args:
        rows: of a rank's shard of the vocabulary, padding included.

    Raises:
        ConfigError, LayoutError: the model cannot be split this way.
    """
    heads = rank_order(spec, tp, 3.0)
    halves = _halves(spec, tp)
    for row in table(spec):
        if row.tied_to is None:
            order = None
            if ".qkv." in row.name:
                order = heads
            elif ".gate_up." in row.name:
                order = halves
            yield (
                _file(spec, row),
                TensorAlias(_name(row), row.name, order=order).rank_shard(pad_vocab(row, rows), rank, tp),
            )


def layer_files(spec: ModelSpec) -> list[int]:
    """Return the file numbers of a rank."""
    return sorted({_file(spec, row) for row in table(spec) if row.tied_to is None})


def _file(spec: ModelSpec, row: Param) -> int:
    if row.stage == "first":
        return _FIRST
    return spec.layers + _LAST if row.stage == "last" else _LAYERS + int(row.stage)


def _name(row: Param) -> str:
    """Return Megatron's name without the modules that the file number implies."""
    _, _, module = foreign_name(LEGACY, row.name).partition("language_model.")
    if row.stage == "first":
        return module.removeprefix("embedding.")
    if row.stage == "last":
        return module.rpartition(".")[2]
    return module.split(".", 3)[3]


def _halves(spec: ModelSpec, tp: int) -> tuple[int, ...]:
    """Return the row order of a gated feed-forward, stored with the up projection before the gate."""
    width = spec.ffn // tp
    return (*range(width, 2 * width), *range(width))
