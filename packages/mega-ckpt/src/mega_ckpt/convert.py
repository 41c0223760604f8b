"""Weights between a Hugging Face folder and a checkpoint of ours, one tensor in memory at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mega_ckpt import config_json, dtypes, huggingface, safetensors
from mega_ckpt.layouts import Alias, by_parameter, gather, whole_slab
from mega_ckpt.layouts.huggingface import aliases
from mega_ckpt.saving import check_free, saving
from mega_ckpt.stored import Stored
from mega_ckpt.verify import verify
from mega_schema.arch import table
from mega_schema.checkpoint import MODEL, Box, Checkpoint
from mega_schema.errors import FormatError
from mega_schema.layout import WHOLE
from mega_schema.params import Param, count
from mega_schema.run_folder import TOKENIZER
from mega_schema.tokenizer import open_folder

KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written: where, how many parameters (a tied one once), bytes of weights."""

    folder: Path
    parameters: int
    bytes: int
    tokenizer: bool


def from_hugging_face(load: Path, run: Path, *, dtype: str = KEEP, overwrite: bool = False) -> Converted:
    """Make a checkpoint of iteration 0 from a Hugging Face folder; the tokenizer comes along if there is one.

    Args:
        dtype: of the weights: "keep", or a key of `dtypes.NAMES`.
        overwrite: replace the checkpoint of iteration 0 in `run`.

    Raises:
        ConfigError: the model has something ours has not, or `run` has an iteration 0 already.
        FormatError: a file is missing or damaged; a tensor is missing, unknown, or has another shape.
    """
    source = huggingface.open_folder(load)
    spec, entries = source.spec, dict(source.entries)
    rows = [row for row in table(spec) if row.tied_to is None]
    parts = by_parameter(aliases(spec))
    _check(load, rows, parts, entries)
    stored = {row.name: _common_dtype(load, parts[row.name], entries) for row in rows}
    wanted = stored if dtype == KEEP else dict.fromkeys(stored, dtypes.NAMES[dtype])
    by_name = {row.name: row for row in rows}
    whole = [Box(row.name, row.shape, whole_slab(row.shape), wanted[row.name]) for row in rows]
    check_free(run, 0, overwrite=overwrite)

    def values(box: Box) -> np.ndarray:
        array = gather(by_name[box.name], parts[box.name], lambda name: entries[name].values())
        return dtypes.cast(array, stored[box.name], box.dtype, f"{load}: {box.name}")

    with tempfile.TemporaryDirectory() as scratch, saving(run, 0) as save:
        tokenizer = huggingface.tokenizer_of(load, spec, Path(scratch) / TOKENIZER)
        save.write(MODEL, 0, whole, values)
        trainer = {"iteration": 0, "consumed_samples": 0, "optimizer_steps": 0}
        folder = save.commit(spec, layout=WHOLE, trainer=trainer, tokenizer=tokenizer)
    return Converted(folder, count(rows), sum(box.bytes for box in whole), tokenizer is not None)


def to_hugging_face(load: Path, folder: Path, *, dtype: str = KEEP, overwrite: bool = False) -> Converted:
    """Make a folder that `transformers` loads from a checkpoint: weights, config, tokenizer if there is one.

    Only the model's weights are read, as they are stored; the optimizer's float32 copy is not.

    Args:
        dtype: of the weights: "keep", or a key of `dtypes.NAMES`.
        overwrite: replace `folder`, where that is a model's folder.

    Raises:
        ConfigError: the model has something Hugging Face's class has not, or `folder` is there already.
        FormatError: the checkpoint is damaged.
    """
    source = Checkpoint.open(load)
    spec = source.spec
    config = config_json.from_spec(spec, source.folder)
    huggingface.check_free(folder, overwrite=overwrite)
    verify(source)
    rows = {row.name: row for row in table(spec)}
    stored = {name: tensor.dtype for name, tensor in source.tensors[MODEL].items()}
    known = {alias.foreign: alias for alias in aliases(spec)}
    announced = [
        safetensors.Announced(
            name,
            stored[alias.ours] if dtype == KEEP else dtypes.NAMES[dtype],
            alias.foreign_shape(rows[alias.ours]),
        )
        for name, alias in known.items()
    ]

    def values(tensor: safetensors.Announced) -> np.ndarray:
        alias = known[tensor.name]
        array = alias.to_foreign(source.read_raw(MODEL, alias.ours, alias.slab(rows[alias.ours])))
        return dtypes.cast(array, stored[alias.ours], tensor.dtype, f"{source.folder}: {alias.ours}")

    tokenizer_folder = source.folder / TOKENIZER
    tokenizer = open_folder(tokenizer_folder) if tokenizer_folder.is_dir() else None
    huggingface.write_folder(
        folder, spec, config, announced, values, tokenizer=tokenizer, overwrite=overwrite
    )
    has_files = (folder / huggingface.TOKENIZER_JSON).exists()
    return Converted(folder, count(rows.values()), sum(t.bytes for t in announced), has_files)


def _check(
    load: Path,
    rows: Sequence[Param],
    parts: Mapping[str, Sequence[Alias]],
    entries: Mapping[str, Stored],
) -> None:
    """Every tensor of the list is there with its shape, and no other."""
    known = set()
    for row in rows:
        for alias in parts[row.name]:
            known.add(alias.foreign)
            entry = entries.get(alias.foreign)
            if entry is None:
                raise FormatError(load, "has no tensor", wanted=alias.foreign)
            if entry.shape != alias.foreign_shape(row):
                where = f"{entry.file}: {alias.foreign}"
                raise FormatError(where, "shape", found=entry.shape, wanted=alias.foreign_shape(row))
            if entry.dtype not in dtypes.FLOATS:
                where = f"{entry.file}: {alias.foreign}"
                raise FormatError(where, "dtype", found=entry.dtype, wanted=" | ".join(dtypes.FLOATS))
    for name in entries:
        if name not in known:
            raise FormatError(load, "has a tensor that the model has not", found=name)


def _common_dtype(load: Path, parts: Sequence[Alias], entries: Mapping[str, Stored]) -> str:
    """The dtype of a parameter of ours, which all the tensors it is made of have to share."""
    found = {entries[alias.foreign].dtype for alias in parts}
    if len(found) > 1:
        names = ", ".join(alias.foreign for alias in parts)
        raise FormatError(f"{load}: {names}", "dtypes differ", found=sorted(found), wanted="one dtype")
    return found.pop()
