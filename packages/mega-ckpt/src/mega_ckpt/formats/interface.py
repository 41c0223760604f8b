"""The interface of a checkpoint format: a reader and, for most formats, a writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.tensors.parallel_map import Progress, no_progress
from mega_schema.parallel_layout import WHOLE, Layout
from mega_schema.spec import ModelSpec

KEEP = "keep"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """User input for files that do not describe everything.

    Attributes:
        vocab: the true vocabulary, of a format that stores a padded one (--true-vocab-size).
        tokenizer: folder of a tokenizer, in the place of what the files have (--tokenizer).
        model: the model spec, for files without one (--model).
        no_tokenizer: do not read the tokenizer (--no-tokenizer).
    """

    vocab: int | None = None
    tokenizer: Path | None = None
    model: ModelSpec | None = None
    no_tokenizer: bool = False

    def dropped_tokenizer(self, has: bool) -> tuple[str, ...]:
        """Return the entry of `CheckpointSource.dropped` for a tokenizer that is not read.

        Args:
            has: the files that are read have one.
        """
        if has and self.no_tokenizer:
            return ("the tokenizer",)
        return ("the tokenizer of --load",) if has and self.tokenizer is not None else ()


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How files are written.

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
    progress: Progress = no_progress


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What was written: folder, parameters (a tied one once), tensor bytes, and whether a tokenizer."""

    folder: Path
    parameters: int
    bytes: int
    tokenizer: bool


CheckTarget = Callable[[CheckpointSource, Path, WriteOptions], None]
Write = Callable[[CheckpointSource, Path, WriteOptions], WriteResult]


@dataclass(frozen=True, slots=True)
class Format:
    """The reader and writer of a format.

    Attributes:
        read: opens a folder or file; checks everything that needs no tensor data.
        check_target: refuses, before values are read, a model that the format does not support, an invalid
            layout and an output that exists: ConfigError or LayoutError. None for a read-only format.
        write: called after `check_target`.
        stores: what the format stores beside weights: "optimizer", "schedule", "configuration". Whether it
            stored a tokenizer is in `WriteResult`, as that depends on the tokenizer.
        streams_rows: `write` reads values only by `CheckpointSource.row_chunks`, which verifies checksums.
    """

    read: Callable[[Path, ReadOptions], CheckpointSource]
    check_target: CheckTarget | None = None
    write: Write | None = None
    stores: frozenset[str] = frozenset()
    streams_rows: bool = False
