"""BigScience's Megatron-DeepSpeed: a file for every layer and rank of tp, with Megatron's names in it."""

from __future__ import annotations

from collections.abc import Iterator

from mega_ckpt.formats.megatron.names import LEGACY, name, pad_vocab, rank_order
from mega_ckpt.name_maps.alias import Alias, Foreign
from mega_schema.arch import table
from mega_schema.params import Param
from mega_schema.spec import ModelSpec

_FIRST, _LAYERS, _LAST = 1, 3, 4  # files before the first layer's, and after the last one's: others are empty


def of_rank(spec: ModelSpec, rank: int, tp: int, rows: int) -> Iterator[tuple[int, Foreign]]:
    """Every tensor of rank `rank` of `tp`, with the number of the file that it is in.

    Args:
        rows: of a rank's share of the vocabulary, padding included.

    Raises:
        ConfigError, LayoutError: the model cannot be cut so.
    """
    heads, halves = rank_order(spec, tp, 3.0), _halves(spec, tp)
    for row in table(spec):
        if row.tied_to is None:
            order = heads if ".qkv." in row.name else halves if ".up." in row.name else None
            yield (
                _file(spec, row),
                Alias(_name(row), row.name, order=order).of_rank(pad_vocab(row, rows), rank, tp),
            )


def files(spec: ModelSpec) -> list[int]:
    """Numbers of the files that a rank has."""
    return sorted({_file(spec, row) for row in table(spec) if row.tied_to is None})


def _file(spec: ModelSpec, row: Param) -> int:
    if row.stage == "first":
        return _FIRST
    return spec.layers + _LAST if row.stage == "last" else _LAYERS + int(row.stage)


def _name(row: Param) -> str:
    """Megatron's, without the modules that the file stands for."""
    _, _, module = name(LEGACY, row.name).partition("language_model.")
    if row.stage == "first":
        return module.removeprefix("embedding.")
    if row.stage == "last":
        return module.rpartition(".")[2]
    return module.split(".", 3)[3]


def _halves(spec: ModelSpec, tp: int) -> tuple[int, ...] | None:
    """Rows of a gated feed-forward: what is multiplied is first there, its gate second."""
    share = spec.ffn // tp
    return (*range(share, 2 * share), *range(share)) if spec.gated else None
