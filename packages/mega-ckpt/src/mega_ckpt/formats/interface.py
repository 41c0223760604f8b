"""The interface of a checkpoint format: a reader and, for most formats, a writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mega_ckpt.checkpoint.checkpoint_source import Source
from mega_ckpt.tensors.parallel_map import Progress, silent
from mega_schema.layout import WHOLE, Layout
from mega_schema.spec import ModelSpec

KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a person adds to files that do not say everything.

    Attributes:
        vocab: the true vocabulary, of a format that stores a padded one (--true-vocab-size).
        tokenizer: folder of a tokenizer, in the place of what the files have (--tokenizer).
        model: what the model is, for files that do not say it (--model).
        no_tokenizer: do not read the tokenizer (--no-tokenizer).
    """

    vocab: int | None = None
    tokenizer: Path | None = None
    model: ModelSpec | None = None
    no_tokenizer: bool = False

    def left_tokenizer(self, has: bool) -> tuple[str, ...]:
        """What `Source.left` says of a tokenizer that is not read.

        Args:
            has: the files that are read have one.
        """
        if has and self.no_tokenizer:
            return ("the tokenizer",)
        return ("the tokenizer of --load",) if has and self.tokenizer is not None else ()


@dataclass(frozen=True, slots=True)
class Target:
    """How files are to be written.

    Attributes:
        dtype: of the weights: "keep", or a key of `dtypes.NAMES`.
        layout: tp, pp and vp of a format that is cut.
        optimizer: carry the optimizer's state where the format has a place for it.
        force: replace what is there.
        shard: most bytes of one file, of a format that has several.
        progress: of the bytes written.
    """

    dtype: str = KEEP
    layout: Layout = WHOLE
    optimizer: bool = True
    force: bool = False
    shard: int = 5_000_000_000
    progress: Progress = silent


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: where, parameters (a tied one once), bytes of numbers, and whether a tokenizer."""

    folder: Path
    parameters: int
    bytes: int
    tokenizer: bool


Free = Callable[[Source, Path, Target], None]
Write = Callable[[Source, Path, Target], Written]


@dataclass(frozen=True, slots=True)
class Format:
    """How a format is read and written.

    Attributes:
        read: opens a folder or file; checks everything that can be told without reading all numbers.
        free: refuses, before numbers are read, a model that the format has not, a layout that cannot be, and
            a place that is taken: with a ConfigError or LayoutError. None where the format is read only.
        write: called after `free`.
        holds: what beside weights has a place there: "optimizer", "schedule", "configuration"; of a tokenizer
            `Written` says it, for not every one has.
        in_bands: `write` reads numbers by `Source.bands` alone, which checks them on the way where it can.
    """

    read: Callable[[Path, Reading], Source]
    free: Free | None = None
    write: Write | None = None
    holds: frozenset[str] = frozenset()
    in_bands: bool = False
