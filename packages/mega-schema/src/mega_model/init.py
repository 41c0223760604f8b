"""Initial values of the weights.

A value depends on the seed, the parameter's name and the global index, never on the rank. Every layout starts
from the same numbers: parity tests need no checkpoint, and a change of layout does not change the loss curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from hashlib import blake2b

import torch
from torch import Tensor

from mega_schema.params import Param
from mega_schema.sharding import Slab

ReadSlab = Callable[[str, Slab], Tensor]

_STREAM = 1 << 16  # values per random generator, approximately: whole rows of the first dimension


def initial_values(rows: Iterable[Param], seed: int) -> ReadSlab:
    """Return a source for `build.fill_weights`: the initial values of any box of any parameter, float32."""
    table = {row.name: row for row in rows}

    def read(name: str, slab: Slab) -> Tensor:
        return _box(table[name], slab, seed)

    return read


def _box(row: Param, slab: Slab, seed: int) -> Tensor:
    if row.init.kind in ("ones", "zeros"):
        return torch.full(slab.shape, 1.0 if row.init.kind == "ones" else 0.0)
    rows = max(1, _STREAM // max(1, row.size // row.shape[0]))
    first = slab.start[0]
    last = slab.start[0] + slab.shape[0]
    parts = []
    for stream in range(first // rows, -(-last // rows)):
        begin = stream * rows
        end = min((stream + 1) * rows, row.shape[0])
        key = blake2b(f"{seed}/{row.name}/{stream}".encode(), digest_size=8).digest()
        rng = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        values = _draw(torch.empty((end - begin, *row.shape[1:])), row, rng)
        inside = slice(max(first, begin) - begin, min(last, end) - begin)
        parts.append(values[(inside, *slab.in_global[1:])])
    return torch.cat(parts)


def _draw(values: Tensor, row: Param, rng: torch.Generator) -> Tensor:
    if row.init.kind == "normal":
        return values.normal_(std=row.init.std, generator=rng)
    bound = math.sqrt(3) * row.init.std
    return values.uniform_(-bound, bound, generator=rng)
