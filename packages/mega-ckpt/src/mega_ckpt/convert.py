"""A checkpoint of one format written as another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mega_ckpt.formats import Reading, Target, Written, format_of, writing
from mega_ckpt.source import Source
from mega_schema.checkpoint import MODEL
from mega_schema.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written, and what of the source was not: a few words each."""

    written: Written
    left: tuple[str, ...]


def convert(
    load: Path,
    save: Path,
    have: str,
    want: str,
    *,
    reading: Reading | None = None,
    target: Target | None = None,
) -> Converted:
    """Read `load` as the format `have`, write `save` as `want`; names of `format_names.NAMES`.

    Raises:
        ConfigError: the format that is wanted is read only, has not what the model has, or something is
            there already.
        FormatError: what is read is damaged or is not of that format.
    """
    if load.resolve() == save.resolve():
        raise ConfigError("--save", "is where --load is", found=save, wanted="another folder")
    (free, write), target = writing(want), target or Target()
    source = format_of(have).read(load, reading or Reading())
    free(source, save, target)
    source.verify()
    return Converted(write(source, save, target), left(source, want, target))


def left(source: Source, want: str, target: Target) -> tuple[str, ...]:
    """What the source holds and the format that is wanted has no place for, or was told to leave."""
    holds = format_of(want).holds
    lost = list(source.left)
    if any(space != MODEL for space in source.spaces) and not ("optimizer" in holds and target.optimizer):
        lost.append("the optimizer's state")
    if source.iteration and "schedule" not in holds:
        lost.append(f"iteration {source.iteration:,} and the schedule")
    if source.tokenizer is not None and "tokenizer" not in holds:
        lost.append("the tokenizer")
    if source.run_config is not None and "configuration" not in holds:
        lost.append("the run's configuration")
    return tuple(lost)
