"""A checkpoint written again as another layout would have written it: integer ranges, no model, no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mega_ckpt.checkpoint.verify import check, check_table
from mega_ckpt.checkpoint.writer import check_free, fill, saving, shares, taken
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.parallel_map import Progress, silent
from mega_ckpt.tensors.row_stream import Band, stored_bands
from mega_schema.checkpoint import Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.layout import Layout
from mega_schema.run_folder import TOKENIZER


def reshard(
    source: Checkpoint,
    run: Path,
    layout: Layout,
    *,
    optimizer: bool = True,
    dtype: str | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Path:
    """Write the checkpoint into `run` as `layout` would have; trainer state and tokenizer stay.

    A few megabytes of a tensor are in memory at a time, on every core. What is read is checked on the way: a
    copy of damaged bytes would carry checksums that call them sound.

    Args:
        layout: tp, pp and vp of the pieces; the optimizer's state is not cut over dp.
        optimizer, dtype: as for `writer.taken`.
        force: replace a checkpoint of this iteration.
        progress: of the bytes written.

    Returns:
        the new checkpoint's folder.

    Raises:
        LayoutError: the model cannot be cut this way.
        ConfigError: `run` is where the source is, or has this iteration already.
        FormatError: the source is damaged, or a weight is too large for the dtype.
    """
    check_table(source)
    stored = {
        space: {name: t.dtype for name, t in tensors.items()} for space, tensors in source.tensors.items()
    }
    made_from = taken(stored, optimizer=optimizer, dtype=dtype)
    # a layout that cannot be is refused before anything is written
    spaces = {space: shares(source.spec, layout, of.dtypes) for space, of in made_from.items()}
    if run.resolve() in (source.folder.resolve(), source.folder.resolve().parent):
        raise ConfigError("--save", "is where --load is", found=run, wanted="another folder")
    check_free(run, source.iteration, force=force)
    check(source)

    def bands(space: str, name: str) -> Iterator[Band]:
        origin, want = made_from[space].space, made_from[space].dtypes[name]
        have, where = stored[origin][name], f"{source.folder}: {origin} {name}"
        for band in stored_bands(source, origin, name):
            yield Band(band.first, dtypes.cast(band.values, have, want, where))

    tokenizer = source.folder / TOKENIZER
    with saving(run, source.iteration) as save:
        fill(save, spaces, bands, progress)
        return save.commit(
            source.spec,
            layout=layout,
            trainer=source.trainer,
            tokenizer=tokenizer if tokenizer.is_dir() else None,
            run_config=source.run_config,
            replace=force,
        )
