"""Rewrite a checkpoint for another layout, without a model or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mega_ckpt.checkpoint.verify import check_metadata, check_table
from mega_ckpt.checkpoint.writer import (
    check_run_folder,
    namespaces_to_write,
    rank_shares,
    saving_checkpoint,
    write_shares,
)
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.parallel_map import Progress, no_progress
from mega_ckpt.tensors.row_stream import RowChunk, stream_rows
from mega_schema.checkpoint.checkpoint_dir import TOKENIZER
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.parallel_layout import Layout


def reshard(
    source: Checkpoint,
    run: Path,
    layout: Layout,
    *,
    optimizer: bool = True,
    dtype: str | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> Path:
    """Write the checkpoint into `run` with the files of `layout`; trainer state and tokenizer are copied.

    Every core has a few megabytes of a tensor in memory. Checksums are verified while reading: a copy of
    damaged bytes would get valid checksums.

    Args:
        layout: tp, pp and vp of the pieces; the optimizer's state is not split over dp.
        optimizer, dtype: as for `writer.namespaces_to_write`.
        force: replace a checkpoint of this iteration.
        progress: called with the bytes written.

    Returns:
        the new checkpoint's folder.

    Raises:
        LayoutError: the model cannot be split this way.
        ConfigError: `run` is the source, or has this iteration already.
        FormatError: the source is damaged, or a weight is too large for the dtype.
    """
    check_table(source)
    stored = {
        space: {name: t.dtype for name, t in tensors.items()} for space, tensors in source.tensors.items()
    }
    made_from = namespaces_to_write(stored, optimizer=optimizer, dtype=dtype)
    # refuse an impossible layout before writing
    spaces = {space: rank_shares(source.spec, layout, plan.dtypes) for space, plan in made_from.items()}
    if run.resolve() in (source.folder.resolve(), source.folder.resolve().parent):
        raise ConfigError("--save", "is the same folder as --load", found=run, wanted="another folder")
    check_run_folder(run, source.iteration, force=force)
    check_metadata(source)

    def read_rows(space: str, name: str) -> Iterator[RowChunk]:
        origin = made_from[space].space
        target_dtype = made_from[space].dtypes[name]
        stored_dtype = stored[origin][name]
        where = f"{source.folder}: {origin} {name}"
        for chunk in stream_rows(source, origin, name):
            yield RowChunk(chunk.first, dtypes.cast(chunk.values, stored_dtype, target_dtype, where))

    tokenizer = source.folder / TOKENIZER
    with saving_checkpoint(run, source.iteration) as save:
        write_shares(save, spaces, read_rows, progress)
        return save.commit(
            source.spec,
            layout=layout,
            trainer=source.trainer,
            tokenizer=tokenizer if tokenizer.is_dir() else None,
            run_config=source.run_config,
            replace=force,
        )
