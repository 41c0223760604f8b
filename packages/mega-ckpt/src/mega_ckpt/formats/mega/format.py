"""Read and write Mega checkpoints: docs/formats/checkpoint.md."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.checkpoint.verify import check_metadata, verify
from mega_ckpt.checkpoint.writer import (
    check_run_folder,
    namespaces_to_write,
    rank_shares,
    saving_checkpoint,
    write_shares,
)
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.interface import KEEP, Format, ReadOptions, WriteOptions, WriteResult
from mega_ckpt.tensors.row_stream import RowChunk, stream_rows
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import TOKENIZER, TRAINER
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.errors import FormatError
from mega_schema.params import count_params
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer_folder


def read(load: Path, reading: ReadOptions) -> CheckpointSource:
    """Open the checkpoint by its manifest.

    Raises:
        FormatError: there is no checkpoint, it is incomplete, or trainer.json is not one of mega-train.
    """
    checkpoint = Checkpoint.open(load)
    for key in ("lr_schedule", "wd_schedule", "decoupled_lr_schedule"):
        schedule = checkpoint.trainer.get(key)
        if schedule is not None and not isinstance(schedule, dict):
            where = f"{checkpoint.folder / TRAINER}: {key}"
            kind = type(schedule).__name__
            raise FormatError(where, "is not what mega-train writes", found=kind, wanted="a JSON object")
    has_tokenizer = (checkpoint.folder / TOKENIZER).is_dir()
    return CheckpointSource(
        checkpoint.folder,
        checkpoint.spec,
        {
            space: {name: t.dtype for name, t in tensors.items()}
            for space, tensors in checkpoint.tensors.items()
        },
        checkpoint.read_raw,
        {**checkpoint.trainer, "iteration": checkpoint.iteration},
        _tokenizer(checkpoint, reading, has=has_tokenizer),
        checkpoint.run_config,
        reading.dropped_tokenizer(has_tokenizer),
        verify=lambda spaces: verify(checkpoint, spaces=spaces),
        verified_chunks=partial(stream_rows, checkpoint),
        check_metadata=lambda: check_metadata(checkpoint),
    )


def _tokenizer(checkpoint: Checkpoint, reading: ReadOptions, *, has: bool) -> Tokenizer | None:
    """Load the tokenizer of --tokenizer, or the checkpoint's."""
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, checkpoint.spec)
    return open_tokenizer_folder(checkpoint.folder / TOKENIZER) if has and not reading.no_tokenizer else None


def check_target(source: CheckpointSource, run: Path, target: WriteOptions) -> None:
    """Refuse a layout that the model does not support, or a run that has this iteration."""
    rank_shares(source.spec, target.layout, source.spaces[MODEL])
    check_run_folder(run, source.iteration, force=target.force)


def write(source: CheckpointSource, run: Path, target: WriteOptions) -> WriteResult:
    """Write a checkpoint into the run's folder `run`."""
    dtype = None if target.dtype == KEEP else target.dtype
    plans = namespaces_to_write(source.spaces, optimizer=target.optimizer, dtype=dtype)
    spaces = {space: rank_shares(source.spec, target.layout, plan.dtypes) for space, plan in plans.items()}

    shape = {row.name: row.shape for row in table(source.spec)}

    def read_rows(space: str, name: str) -> Iterator[RowChunk]:
        plan = plans[space]
        return source.row_chunks(plan.space, name, shape[name], plan.dtypes[name])

    with tempfile.TemporaryDirectory() as scratch, saving_checkpoint(run, source.iteration) as save:
        tokenizer = Path(scratch) / TOKENIZER if source.tokenizer else None
        if source.tokenizer and tokenizer:
            source.tokenizer.save(tokenizer)
        written = write_shares(save, spaces, read_rows, target.progress)
        folder = save.commit(
            source.spec,
            layout=target.layout,
            trainer=source.trainer,
            tokenizer=tokenizer,
            run_config=source.run_config,
            replace=target.force,
        )
    return WriteResult(folder, count_params(table(source.spec)), written, tokenizer is not None)


FORMAT = Format(
    read, check_target, write, frozenset({"optimizer", "schedule", "configuration"}), streams_rows=True
)
