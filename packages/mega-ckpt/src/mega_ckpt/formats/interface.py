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
    """Options of a reader, for files that do not describe everything.

    Attributes:
        vocab: the true vocabulary size, for a format that stores a padded one (--true-vocab-size).
        tokenizer: folder of a tokenizer, instead of that of the files (--tokenizer).
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
            has: whether the files contain a tokenizer.
        """
        if has and self.no_tokenizer:
            return ("the tokenizer",)
        return ("the tokenizer of --load",) if has and self.tokenizer is not None else ()


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a writer.

    Attributes:
        dtype: of the weights: "keep", or a key of `dtypes.NAMES`.
        layout: tp, pp and vp, for a format of one file per rank.
        optimizer: write the optimizer's state if the format supports it.
        force: replace existing output.
        shard: maximum bytes of one file, for a format with several files.
        progress: called with the bytes written.
    """

    dtype: str = KEEP
    layout: Layout = WHOLE
    optimizer: bool = True
    force: bool = False
    shard: int = 5_000_000_000
    progress: Progress = no_progress


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of a write: folder, parameter count (tied ones once), tensor bytes, tokenizer or not."""

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
            layout or an existing output: ConfigError or LayoutError. None for a read-only format.
        write: called after `check_target`.
        stores: what the format stores beside weights: "optimizer", "schedule", "configuration". Whether it
            stored a tokenizer is in `WriteResult`, as that depends on the tokenizer.
        streams_rows: whether `write` reads values only by `CheckpointSource.row_chunks`, which verifies
            checksums.
    """

    read: Callable[[Path, ReadOptions], CheckpointSource]
    check_target: CheckTarget | None = None
    write: Write | None = None
    stores: frozenset[str] = frozenset()
    streams_rows: bool = False
