"""Our own checkpoint, between other formats: docs/formats/checkpoint.md."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mega_ckpt.checkpoint.checkpoint_source import Source
from mega_ckpt.checkpoint.verify import check, verify
from mega_ckpt.checkpoint.writer import check_free, fill, saving, shares, taken
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.interface import KEEP, Format, Reading, Target, Written
from mega_ckpt.tensors.row_stream import Band, stored_bands
from mega_schema.arch import table
from mega_schema.checkpoint import MODEL, Checkpoint
from mega_schema.errors import FormatError
from mega_schema.params import count
from mega_schema.run_folder import TOKENIZER, TRAINER
from mega_schema.tokenizer import Tokenizer, open_folder


def read(load: Path, reading: Reading) -> Source:
    """The checkpoint, by its manifest.

    Raises:
        FormatError: there is none, it is not whole, or trainer.json is not one that a training wrote.
    """
    found = Checkpoint.open(load)
    courses = found.trainer.get("courses")
    if courses is not None and not isinstance(courses, dict):
        where, kind = f"{found.folder / TRAINER}: courses", type(courses).__name__
        raise FormatError(where, "is not what a training writes", found=kind, wanted="a JSON object")
    has_tokenizer = (found.folder / TOKENIZER).is_dir()
    return Source(
        found.folder,
        found.spec,
        {space: {name: t.dtype for name, t in tensors.items()} for space, tensors in found.tensors.items()},
        found.read_raw,
        {**found.trainer, "iteration": found.iteration},
        _tokenizer(found, reading, has=has_tokenizer),
        found.run_config,
        reading.left_tokenizer(has_tokenizer),
        verify=lambda spaces: verify(found, spaces=spaces),
        checked=partial(stored_bands, found),
        check=lambda: check(found),
    )


def _tokenizer(found: Checkpoint, reading: Reading, *, has: bool) -> Tokenizer | None:
    """The one that was named, or the checkpoint's."""
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, found.spec)
    return open_folder(found.folder / TOKENIZER) if has and not reading.no_tokenizer else None


def free(source: Source, run: Path, target: Target) -> None:
    """Refuse a layout that the model cannot have, and a run that has this iteration already."""
    shares(source.spec, target.layout, source.spaces[MODEL])
    check_free(run, source.iteration, force=target.force)


def write(source: Source, run: Path, target: Target) -> Written:
    """A checkpoint in the run's folder `run`."""
    dtype = None if target.dtype == KEEP else target.dtype
    made_from = taken(source.spaces, optimizer=target.optimizer, dtype=dtype)
    spaces = {space: shares(source.spec, target.layout, of.dtypes) for space, of in made_from.items()}

    shape = {row.name: row.shape for row in table(source.spec)}

    def bands(space: str, name: str) -> Iterator[Band]:
        made = made_from[space]
        return source.bands(made.space, name, shape[name], made.dtypes[name])

    with tempfile.TemporaryDirectory() as scratch, saving(run, source.iteration) as save:
        tokenizer = Path(scratch) / TOKENIZER if source.tokenizer else None
        if source.tokenizer and tokenizer:
            source.tokenizer.save(tokenizer)
        written = fill(save, spaces, bands, target.progress)
        folder = save.commit(
            source.spec,
            layout=target.layout,
            trainer=source.trainer,
            tokenizer=tokenizer,
            run_config=source.run_config,
            replace=target.force,
        )
    return Written(folder, count(table(source.spec)), written, tokenizer is not None)


FORMAT = Format(read, free, write, frozenset({"optimizer", "schedule", "configuration"}), in_bands=True)
