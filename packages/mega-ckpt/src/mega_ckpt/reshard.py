"""A checkpoint written again as another layout would have written it: integer ranges, no model, no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mega_ckpt import dtypes
from mega_ckpt.bands import Band, stored_bands
from mega_ckpt.saving import check_free, fill, saving, shares
from mega_ckpt.threads import Progress, silent
from mega_ckpt.verify import check_companions, check_cover, check_headers, check_table
from mega_schema.checkpoint import MAIN, MODEL, Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.layout import Layout
from mega_schema.run_folder import RUN_CONFIG, TOKENIZER


@dataclass(frozen=True, slots=True)
class Taken:
    """Where the values of a namespace come from, and the dtype they get; None keeps theirs."""

    space: str
    dtype: str | None = None


def plan(source: Checkpoint, *, optimizer: bool = True, dtype: str | None = None) -> dict[str, Taken]:
    """The namespaces to write, and what each is made from.

    With a dtype, the weights are rounded once, from the float32 ones that the optimizer keeps where there are
    such. Beside narrower weights the optimizer's state keeps the float32 ones; beside float32 ones, which are
    the same numbers, it does not.

    Args:
        optimizer: carry its namespaces too.
        dtype: of the weights, a key of `dtypes.NAMES`; None writes every namespace as it is.
    """
    others = [space for space in source.tensors if space not in (MODEL, MAIN)] if optimizer else []
    has_main = MAIN in source.tensors
    if dtype is None:
        kept = [MODEL, MAIN] if optimizer and has_main else [MODEL]
        return {space: Taken(space) for space in [*kept, *others]}
    precise, wanted = MAIN if has_main else MODEL, dtypes.NAMES[dtype]
    found = {MODEL: Taken(precise, wanted)}
    if wanted != "F32" and (others or (optimizer and has_main)):
        found[MAIN] = Taken(precise, "F32")
    return found | {space: Taken(space) for space in others}


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
        optimizer, dtype: as for `plan`.
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
    made_from = plan(source, optimizer=optimizer, dtype=dtype)
    kinds = {space: _kinds(source, taken) for space, taken in made_from.items()}
    # a layout that cannot be is refused before anything is written
    spaces = {space: shares(source.spec, layout, of) for space, of in kinds.items()}
    if run.resolve() in (source.folder.resolve(), source.folder.resolve().parent):
        raise ConfigError("--save", "is where --load is", found=run, wanted="another folder")
    check_free(run, source.iteration, force=force)
    for check in (check_cover, check_headers, check_companions):
        check(source)

    def bands(space: str, name: str) -> Iterator[Band]:
        taken, want = made_from[space].space, kinds[space][name]
        have, where = source.tensors[taken][name].dtype, f"{source.folder}: {taken} {name}"
        for band in stored_bands(source, taken, name):
            yield Band(band.first, dtypes.cast(band.values, have, want, where))

    tokenizer, run_config = source.folder / TOKENIZER, source.folder / RUN_CONFIG
    with saving(run, source.iteration) as save:
        fill(save, spaces, bands, progress)
        return save.commit(
            source.spec,
            layout=layout,
            trainer=source.trainer,
            tokenizer=tokenizer if tokenizer.is_dir() else None,
            run_config=run_config.read_text("utf-8") if run_config.is_file() else None,
        )


def _kinds(source: Checkpoint, taken: Taken) -> Mapping[str, str]:
    return {name: taken.dtype or tensor.dtype for name, tensor in source.tensors[taken.space].items()}
