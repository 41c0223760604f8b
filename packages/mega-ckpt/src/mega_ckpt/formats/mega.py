"""Our own checkpoint, between other formats: docs/formats/checkpoint.md."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from mega_ckpt import dtypes
from mega_ckpt.formats import KEEP, Format, Reading, Target, Written
from mega_ckpt.reshard import shares
from mega_ckpt.saving import check_free, saving
from mega_ckpt.source import Source
from mega_ckpt.verify import verify
from mega_schema.arch import table
from mega_schema.checkpoint import MODEL, Box, Checkpoint
from mega_schema.params import count
from mega_schema.run_folder import RUN_CONFIG, TOKENIZER
from mega_schema.tokenizer import open_folder


def read(load: Path, reading: Reading) -> Source:
    """The checkpoint, by its manifest.

    Raises:
        FormatError: there is none, or it is not whole.
    """
    found = Checkpoint.open(load)
    tokenizer, run_config = found.folder / TOKENIZER, found.folder / RUN_CONFIG
    return Source(
        found.folder,
        found.spec,
        {space: {name: t.dtype for name, t in tensors.items()} for space, tensors in found.tensors.items()},
        found.read_raw,
        {"iteration": found.iteration, **found.trainer},
        open_folder(tokenizer) if tokenizer.is_dir() else None,
        run_config.read_text("utf-8") if run_config.is_file() else None,
        verify=lambda: verify(found),
    )


def free(source: Source, run: Path, target: Target) -> None:
    """Refuse a layout that the model cannot have, and a run that has this iteration already."""
    shares(source.spec, target.layout, source.spaces[MODEL])
    check_free(run, source.iteration, overwrite=target.force)


def write(source: Source, run: Path, target: Target) -> Written:
    """A checkpoint in the run's folder `run`."""
    written = 0
    with tempfile.TemporaryDirectory() as scratch, saving(run, source.iteration) as save:
        tokenizer = Path(scratch) / TOKENIZER if source.tokenizer else None
        if source.tokenizer and tokenizer:
            source.tokenizer.save(tokenizer)
        for space, stored in source.spaces.items():
            if space != MODEL and not target.optimizer:
                continue
            keep = space != MODEL or target.dtype == KEEP
            kinds = dict(stored) if keep else dict.fromkeys(stored, dtypes.NAMES[target.dtype])

            def values(box: Box, space: str = space) -> np.ndarray:
                return source.cast(space, box.name, box.slab, box.dtype)

            for share in shares(source.spec, target.layout, kinds):
                save.write(space, share.rank, share.boxes, values)
                written += sum(box.bytes for box in share.boxes)
        folder = save.commit(
            source.spec,
            layout=target.layout,
            trainer=source.trainer,
            tokenizer=tokenizer,
            run_config=source.run_config,
        )
    return Written(folder, count(table(source.spec)), written, tokenizer is not None)


FORMAT = Format(read, free, write, frozenset({"optimizer", "schedule", "tokenizer", "configuration"}))
