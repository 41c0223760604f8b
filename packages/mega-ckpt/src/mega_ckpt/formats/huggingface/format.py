"""A Hugging Face folder, read and written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from mega_ckpt.checkpoint import output_dir
from mega_ckpt.checkpoint.checkpoint_source import Source, check_width, gathered, matched
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.huggingface import config_json
from mega_ckpt.formats.huggingface import folder as hf_folder
from mega_ckpt.formats.huggingface import shards as hf_shards
from mega_ckpt.formats.huggingface.dropped_items import left_behind
from mega_ckpt.formats.huggingface.names import aliases
from mega_ckpt.formats.huggingface.shards import Weight
from mega_ckpt.formats.huggingface.tokenizer import TOKENIZER_CONFIG
from mega_ckpt.formats.interface import KEEP, Format, Reading, Target, Written
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.row_stream import Band
from mega_schema.arch import table
from mega_schema.checkpoint import MODEL
from mega_schema.params import count
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer import Tokenizer


def read(load: Path, reading: Reading) -> Source:
    """The folder, its headers read and held against its config.

    Raises:
        FormatError: a file is missing or damaged, or the model has something ours has not.
    """
    found = hf_folder.open_folder(load)
    check_width(load, found.spec, sum(math.prod(entry.shape) for entry in found.entries.values()))
    rows = {row.name: row for row in table(found.spec)}
    expected = [alias.whole(rows[alias.ours]) for alias in aliases(found.spec)]
    spaces, box, verify = gathered(load, found.spec, {MODEL: matched(load, expected, found.entries)})
    tokenizer = _tokenizer(load, reading, found.spec)
    left = reading.left_tokenizer(hf_folder.has_tokenizer(load))
    left = (*left, *left_behind(load, found.config, tokenizer))
    return Source(load, found.spec, spaces, box, tokenizer=tokenizer, left=left, verify=verify)


def _tokenizer(load: Path, reading: Reading, spec: ModelSpec) -> Tokenizer | None:
    """The one that was named, or the folder's."""
    if reading.no_tokenizer:
        return None
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, spec)
    return hf_folder.tokenizer_of(load, spec)


def free(source: Source, folder: Path, target: Target) -> None:
    """Refuse a model that none of the classes has, and a folder that is there."""
    config_json.from_spec(source.spec, source.where)
    output_dir.check_free(
        folder, mark=hf_folder.CONFIG, what="a model", force=target.force, inputs=[source.where]
    )


def write(source: Source, folder: Path, target: Target) -> Written:
    """A folder that `transformers` loads."""
    config = config_json.from_spec(source.spec, source.where)
    rows, stored = {row.name: row for row in table(source.spec)}, source.spaces[MODEL]
    kinds = stored if target.dtype == KEEP else dict.fromkeys(stored, dtypes.NAMES[target.dtype])
    weights = [Weight(alias.whole(rows[alias.ours]), kinds[alias.ours]) for alias in aliases(source.spec)]
    each = {weight.dtype for weight in weights}

    def bands(name: str, dtype: str) -> Iterator[Band]:
        return source.bands(MODEL, name, rows[name].shape, dtype)

    hf_folder.write_folder(
        folder,
        source.spec,
        config,
        lambda new: hf_shards.write(new, weights, bands, target.shard, target.progress),
        dtype=each.pop() if len(each) == 1 else "F32",
        tokenizer=source.tokenizer,
    )
    has_files = (folder / TOKENIZER_CONFIG).exists()
    size = sum(weight.announced.bytes for weight in weights)
    return Written(folder, count(rows.values()), size, has_files)


FORMAT = Format(read, free, write, in_bands=True)
