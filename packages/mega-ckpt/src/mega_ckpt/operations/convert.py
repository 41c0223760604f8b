"""Convert a checkpoint from one format to another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.formats import registry
from mega_ckpt.formats.interface import KEEP, ReadOptions, WriteOptions, WriteResult
from mega_ckpt.formats.registry import format_of, writer_of
from mega_ckpt.operations import compare_logits
from mega_ckpt.operations.compare_logits import LogitsDifference
from mega_ckpt.tensors.row_stream import RowChunk
from mega_schema.checkpoint.reader import MAIN, MODEL
from mega_schema.errors import ConfigError
from mega_schema.sharding import Slab


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """The result of a conversion.

    Attributes:
        dropped: descriptions of the data that was not written.
        seconds: duration of reading and writing, without the comparison of logits.
        logits: difference of the logits, if they were compared.
    """

    written: WriteResult
    dropped: tuple[str, ...]
    seconds: float
    logits: LogitsDifference | None = None


def convert(
    load: Path,
    save: Path,
    have: str,
    want: str,
    *,
    reading: ReadOptions | None = None,
    target: WriteOptions | None = None,
    check: int | None = 0,
) -> ConvertResult:
    """Read `load` in the format `have`, write `save` in the format `want`; both of `registry.NAMES`.

    Args:
        check: number of tokens whose logits are compared; 0: none; None: see `tokens_to_check`.

    Raises:
        ConfigError: the format `want` is read-only or does not support the model, or the output exists.
        FormatError: the source is damaged or not of the format `have`.
    """
    if load.resolve() == save.resolve():
        raise ConfigError("--save", "is the same folder as --load", found=save, wanted="another folder")
    start = time.monotonic()
    check_target, write = writer_of(want)
    target = target or WriteOptions()
    source = registry.read_source(have, load, reading or ReadOptions())
    if target.dtype != KEEP:
        source = _with_main_weights(source)
    check_target(source, save, target)
    tokens = compare_logits.tokens_to_check(check, want, source)
    if format_of(want).streams_rows and source.verified_chunks is not None:
        source.check_metadata()
    else:
        source.verify(_namespaces_to_read(source, want, target))
    written = write(source, save, target)
    seconds = time.monotonic() - start
    difference = None
    if tokens:
        reread = format_of(want).read(written.folder, ReadOptions(vocab=source.spec.vocab))
        read_side = compare_logits.LoadedSide(have, load, source)
        written_side = compare_logits.LoadedSide(want, written.folder, reread)
        difference = compare_logits.compare_logits(read_side, written_side, tokens)
    return ConvertResult(written, dropped_items(source, want, target, written), seconds, difference)


def _namespaces_to_read(source: CheckpointSource, want: str, target: WriteOptions) -> set[str]:
    """Return the namespaces whose values will be read."""
    if "optimizer" in format_of(want).stores and target.optimizer:
        return {*source.spaces}
    return {MODEL if target.dtype == KEEP or MAIN not in source.spaces else MAIN}


def _with_main_weights(source: CheckpointSource) -> CheckpointSource:
    """Replace the model's weights by the main weights, if there are any, to round from."""
    if MAIN not in source.spaces:
        return source
    spaces = {**source.spaces, MODEL: source.spaces[MAIN]}

    def box(space: str, name: str, slab: Slab) -> np.ndarray:
        return source.read_box(MAIN if space == MODEL else space, name, slab)

    checked = source.verified_chunks

    def verified_chunks(space: str, name: str) -> Iterator[RowChunk]:
        assert checked is not None
        return checked(MAIN if space == MODEL else space, name)

    return replace(source, spaces=spaces, read_box=box, verified_chunks=checked and verified_chunks)


def dropped_items(
    source: CheckpointSource, want: str, target: WriteOptions, written: WriteResult
) -> tuple[str, ...]:
    """Return descriptions of the data that the target format cannot store or the options exclude."""
    holds = format_of(want).stores
    dropped = list(source.dropped)
    if any(space != MODEL for space in source.spaces) and not ("optimizer" in holds and target.optimizer):
        dropped.append("the optimizer's state")
    if source.iteration and "schedule" not in holds:
        dropped.append(f"iteration {source.iteration:,} and the schedule")
    elif want != "mega" and "decoupled_lr_schedule" in source.trainer:
        dropped.append("the learning rate of embedding and output")
    if source.tokenizer is not None and not written.tokenizer:
        dropped.append("the tokenizer")
    if source.run_config is not None and "configuration" not in holds:
        dropped.append("the run's configuration")
    return tuple(dropped)
