"""A checkpoint of any format, opened: the hub between every two of them.

A reader makes a `Source` out of files, a writer makes files out of a `Source`; neither knows the other. What
goes between is a box of a parameter of ours, as it is stored, so that no value changes on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from mega_ckpt.name_maps.alias import Foreign, copy, runs
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.mapped_tensor import Stored, check_sums
from mega_ckpt.tensors.row_stream import Band, Bands, rows_at_once, slabs_of_rows
from mega_schema.arch import table
from mega_schema.checkpoint import DTYPES
from mega_schema.errors import FormatError
from mega_schema.shard import Shape, Slab, overlap
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer import Tokenizer

T = TypeVar("T")
Boxes = Callable[[str, str, Slab], np.ndarray]


UNTRAINED: Mapping[str, int] = MappingProxyType({"iteration": 0, "consumed_samples": 0, "optimizer_steps": 0})


@dataclass(frozen=True, slots=True)
class Source:
    """What a checkpoint holds, in our names.

    Attributes:
        where: the folder or file, to begin messages with.
        spaces: namespace -> parameter -> safetensors' name of its dtype; `MODEL`, and those of `OPTIMIZER`
            where the optimizer came along. A tied parameter is in none.
        box: a box of a parameter in a namespace, as it is stored, bfloat16 as its bits.
        trainer: as our trainer.json says it; {"iteration": 0, ...} where there was no training.
        run_config: the run's configuration as TOML.
        left: what is there and has no place in ours, a few words each.
        verify: reads every number of some namespaces, where checksums or copies tell whether they are sound;
            a FormatError where not.
        checked: a whole parameter of a namespace as it is stored, its checksums held against it on the way;
            None of a format without checksums.
        check: what `verify` does without reading numbers: all that is left to do for who reads `checked`.
    """

    where: Path
    spec: ModelSpec
    spaces: Mapping[str, Mapping[str, str]]
    box: Boxes
    trainer: Mapping[str, Any] = field(default_factory=lambda: UNTRAINED)
    tokenizer: Tokenizer | None = None
    run_config: str | None = None
    left: tuple[str, ...] = ()
    verify: Callable[[Collection[str]], object] = lambda _: None
    checked: Bands | None = None
    check: Callable[[], object] = lambda: None

    @property
    def iteration(self) -> int:
        return int(self.trainer["iteration"])

    def size(self, space: str) -> int:
        """Bytes of the numbers of a namespace, as they are stored."""
        rows = {row.name: row.size for row in table(self.spec)}
        return sum(rows[name] * DTYPES[dtype].itemsize for name, dtype in self.spaces[space].items())

    def cast(self, space: str, name: str, slab: Slab, dtype: str) -> np.ndarray:
        """A box in another dtype.

        Raises:
            FormatError: a finite number would become infinite.
        """
        have = self.spaces[space][name]
        return dtypes.cast(self.box(space, name, slab), have, dtype, f"{self.where}: {name}")

    def bands(self, space: str, name: str, shape: Shape, dtype: str) -> Iterator[Band]:
        """A whole parameter in another dtype, some rows at a time.

        Args:
            shape: of the parameter.

        Raises:
            FormatError: a finite number would become infinite.
        """
        have = self.spaces[space][name]
        if self.checked is None:
            for slab in slabs_of_rows(shape, rows_at_once(shape, have)):
                yield Band(slab.start[0], self.cast(space, name, slab, dtype))
            return
        for band in self.checked(space, name):
            yield Band(band.first, dtypes.cast(band.values, have, dtype, f"{self.where}: {name}"))

    def assembled(self, space: str, foreign: Foreign, dtype: str) -> np.ndarray:
        """A tensor as a foreign file has it; one is in memory at a time, and a few rows beside it."""
        return foreign.assembled(DTYPES[dtype], lambda slab: self.cast(space, foreign.ours, slab, dtype))

    def parts(self, space: str, foreign: Foreign, dtype: str) -> Iterator[Band]:
        """A tensor as a foreign file has it, which is not transposed, some of its rows at a time; padding is
        zero.
        """
        assert not foreign.transpose, foreign.name
        rest = foreign.shape[1:]
        ours = np.arange(foreign.shape[0])
        if foreign.order is not None:
            ours[np.asarray(foreign.order)] = np.arange(foreign.shape[0])
        step = rows_at_once(foreign.shape, dtype)
        for first in range(0, foreign.shape[0], step):
            rows = wanted = ours[first : first + step]
            out = np.zeros((len(rows), *rest), DTYPES[dtype])
            turned = foreign.order is not None and int(np.ptp(wanted)) < len(wanted)
            if turned:  # rows that are together, in another order: of Meta's queries, say
                rows = np.sort(wanted)
            for run, begin, count in runs(rows):
                for box in foreign.boxes:
                    met = overlap((run, *(0,) * len(rest)), (count, *rest), box.at, box.shape)
                    if met is not None:
                        start = tuple(a + b for a, b in zip(box.start, met.in_b, strict=True))
                        slab = Slab(start, met.shape, (begin + met.in_a[0], *met.in_a[1:]))
                        out[slab.in_local] = self.cast(space, foreign.ours, slab, dtype)
            yield Band(first, out[wanted - rows[0]] if turned else out)


def named_as(source: Source, spec: ModelSpec) -> Source:
    """The source with the names that another family has for the same parameters.

    A GPT with a gate, rotary positions and no biases is a Llama, and files do not say which it was: what the
    one calls `up`, gate and all, is the other's `gate_up`.
    """
    own = renamed({row.name: row.name for row in table(source.spec)}, spec)
    return replace(
        source,
        spaces={space: renamed(entries, spec) for space, entries in source.spaces.items()},
        box=lambda space, name, slab: source.box(space, own[name], slab),
        checked=None,
    )


def renamed(values: Mapping[str, T], spec: ModelSpec) -> dict[str, T]:
    """Values of parameters by the names of `spec`'s family, where it has such a parameter."""
    names = {_of_no_family(row.name): row.name for row in table(spec)}
    return {names.get(_of_no_family(name), name): value for name, value in values.items()}


def _of_no_family(name: str) -> str:
    return name.replace(".gate_up.", ".up.")


def check_width(where: object, spec: ModelSpec, numbers: int) -> None:
    """Refuse heads that the stored numbers cannot fill, before a list of their rows is made.

    Args:
        where: the file or folder, to begin messages with.
        numbers: how many are stored, all tensors together.

    Raises:
        FormatError: one layer's Q, K and V are more than that.
    """
    rows = spec.q_rows + 2 * spec.kv_rows
    if rows * spec.hidden > numbers:
        raise FormatError(
            where,
            "numbers in all tensors",
            found=numbers,
            wanted=f"{rows} x {spec.hidden} or more, for Q, K and V of a layer",
        )


Found = Sequence[tuple[Foreign, Stored]]


def matched(where: object, expected: Iterable[Foreign], stored: Mapping[str, Stored]) -> Found:
    """Every expected tensor with the one that is there under its name.

    Args:
        where: the folder or file, to begin messages with.

    Raises:
        FormatError: a tensor is missing, unknown, of another shape, or not of floating point.
    """
    found = []
    for foreign in expected:
        there = stored.get(foreign.name)
        if there is None:
            raise FormatError(where, "has no tensor", wanted=foreign.name)
        at = f"{there.file}: {foreign.name}"
        if there.shape != foreign.shape:
            raise FormatError(at, "shape", found=there.shape, wanted=foreign.shape)
        if there.dtype not in dtypes.FLOATS:
            raise FormatError(at, "dtype", found=there.dtype, wanted=" | ".join(dtypes.FLOATS))
        found.append((foreign, there))
    known = {foreign.name for foreign, _ in found}
    for name in stored:
        if name not in known:
            raise FormatError(where, "has a tensor that the model has not", found=name)
    return found


def gathered(
    where: Path, spec: ModelSpec, spaces: Mapping[str, Found]
) -> tuple[dict[str, Any], Boxes, Callable[[Collection[str]], None]]:
    """The `spaces`, the `box` and the `verify` of a Source whose numbers lie in foreign tensors.

    Raises:
        FormatError: a parameter is not covered, or is made of tensors of several dtypes.
    """
    rows = {row.name: row for row in table(spec) if row.tied_to is None}
    parts: dict[str, dict[str, list[tuple[Foreign, Stored]]]] = {}
    for space, found in spaces.items():
        for foreign, stored in found:
            parts.setdefault(space, {}).setdefault(foreign.ours, []).append((foreign, stored))
    dtype: dict[str, dict[str, str]] = {}
    for space, mine in parts.items():
        for name, row in rows.items():
            made = mine.get(name, [])
            covered = sum(math.prod(box.shape) for foreign, _ in made for box in foreign.boxes)
            if covered != row.size:
                raise FormatError(f"{where}: {space} {name}", "numbers", found=covered, wanted=row.size)
            kinds = {stored.dtype for _, stored in made}
            if len(kinds) > 1:
                names = ", ".join(foreign.name for foreign, _ in made)
                raise FormatError(f"{where}: {names}", "dtypes differ", found=sorted(kinds))
            dtype.setdefault(space, {})[name] = kinds.pop()

    def box(space: str, name: str, slab: Slab) -> np.ndarray:
        out = np.empty(slab.shape, DTYPES[dtype[space][name]])
        for foreign, stored in parts[space][name]:
            for have in foreign.boxes:
                met = overlap(slab.start, slab.shape, have.start, have.shape)
                if met is not None:
                    begin = [at + first for at, first in zip(have.at, met.in_b, strict=True)]
                    at = tuple(slice(b, b + n) for b, n in zip(begin, met.shape, strict=True))
                    copy(out[met.a], foreign.part(stored.values(), at))
        return out

    def verify(wanted: Collection[str]) -> None:
        check_sums(stored for space in wanted for _, stored in spaces[space])

    return dtype, box, verify
