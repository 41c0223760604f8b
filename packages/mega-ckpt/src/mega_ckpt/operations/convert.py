"""A checkpoint of one format written as another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import Source
from mega_ckpt.formats import registry
from mega_ckpt.formats.interface import KEEP, Reading, Target, Written
from mega_ckpt.formats.registry import format_of, writing
from mega_ckpt.operations import compare_logits
from mega_ckpt.operations.compare_logits import Difference
from mega_ckpt.tensors.row_stream import Band
from mega_schema.checkpoint import MAIN, MODEL
from mega_schema.errors import ConfigError
from mega_schema.shard import Slab


@dataclass(frozen=True, slots=True)
class Converted:
    """What came of it.

    Attributes:
        left: what of the source was not written, a few words each.
        seconds: of reading and writing, without the check of the logits.
        logits: how far what was written is from what was read, where that was checked.
    """

    written: Written
    left: tuple[str, ...]
    seconds: float
    logits: Difference | None = None


def convert(
    load: Path,
    save: Path,
    have: str,
    want: str,
    *,
    reading: Reading | None = None,
    target: Target | None = None,
    check: int | None = 0,
) -> Converted:
    """Read `load` as the format `have`, write `save` as `want`; names of `registry.NAMES`.

    Args:
        check: tokens whose logits are compared, both sides run; 0: none; None: as `logits.wanted` says.

    Raises:
        ConfigError: the format that is wanted is read only, has not what the model has, or something is
            there already.
        FormatError: what is read is damaged or is not of that format.
    """
    if load.resolve() == save.resolve():
        raise ConfigError("--save", "is where --load is", found=save, wanted="another folder")
    begun = time.monotonic()
    (free, write), target = writing(want), target or Target()
    source = registry.read(have, load, reading or Reading())
    if target.dtype != KEEP:
        source = _precise(source)
    free(source, save, target)
    tokens = compare_logits.wanted(check, want, source)
    if format_of(want).in_bands and source.checked is not None:
        source.check()
    else:
        source.verify(_read(source, want, target))
    written = write(source, save, target)
    seconds = time.monotonic() - begun
    found = None
    if tokens:
        back = format_of(want).read(written.folder, Reading(vocab=source.spec.vocab))
        one, other = compare_logits.Side(have, load, source), compare_logits.Side(want, written.folder, back)
        found = compare_logits.compare(one, other, tokens)
    return Converted(written, left(source, want, target, written), seconds, found)


def _read(source: Source, want: str, target: Target) -> set[str]:
    """The namespaces whose numbers are going to be read."""
    if "optimizer" in format_of(want).holds and target.optimizer:
        return {*source.spaces}
    return {MODEL if target.dtype == KEEP or MAIN not in source.spaces else MAIN}


def _precise(source: Source) -> Source:
    """The source with the optimizer's float32 weights as the model's, where it has them: to round from."""
    if MAIN not in source.spaces:
        return source
    spaces = {**source.spaces, MODEL: source.spaces[MAIN]}

    def box(space: str, name: str, slab: Slab) -> np.ndarray:
        return source.box(MAIN if space == MODEL else space, name, slab)

    checked = source.checked

    def whole(space: str, name: str) -> Iterator[Band]:
        assert checked is not None
        return checked(MAIN if space == MODEL else space, name)

    return replace(source, spaces=spaces, box=box, checked=checked and whole)


def left(source: Source, want: str, target: Target, written: Written) -> tuple[str, ...]:
    """What the source holds and the format that is wanted has no place for, or was told to leave."""
    holds = format_of(want).holds
    lost = list(source.left)
    if any(space != MODEL for space in source.spaces) and not ("optimizer" in holds and target.optimizer):
        lost.append("the optimizer's state")
    if source.iteration and "schedule" not in holds:
        lost.append(f"iteration {source.iteration:,} and the schedule")
    elif want != "mega" and "decoupled_learning_rate" in (source.trainer.get("courses") or {}):
        lost.append("the learning rate of embedding and output")
    if source.tokenizer is not None and not written.tokenizer:
        lost.append("the tokenizer")
    if source.run_config is not None and "configuration" not in holds:
        lost.append("the run's configuration")
    return tuple(lost)
