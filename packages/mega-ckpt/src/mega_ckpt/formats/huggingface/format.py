"""Read and write Hugging Face folders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from mega_ckpt.checkpoint import output_dir
from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource, check_width, gather_boxes, match_tensors
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.huggingface import config_json
from mega_ckpt.formats.huggingface import folder as hf_folder
from mega_ckpt.formats.huggingface import shards as hf_shards
from mega_ckpt.formats.huggingface.dropped_items import dropped_items
from mega_ckpt.formats.huggingface.names import aliases
from mega_ckpt.formats.huggingface.shards import WeightToWrite
from mega_ckpt.formats.huggingface.tokenizer import TOKENIZER_CONFIG
from mega_ckpt.formats.interface import KEEP, Format, ReadOptions, WriteOptions, WriteResult
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.row_stream import RowChunk
from mega_schema.arch import table
from mega_schema.checkpoint.reader import DTYPES, MODEL
from mega_schema.params import count_params
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer

_EMBEDDING, _TOKEN_TYPES = "embed.weight", "token_type.weight"


def read(load: Path, reading: ReadOptions) -> CheckpointSource:
    """Open the folder and check its headers against its config.

    Raises:
        FormatError: a file is missing or damaged, or the model is not supported.
    """
    folder = hf_folder.open_hf_folder(load)
    check_width(load, folder.spec, sum(math.prod(entry.shape) for entry in folder.entries.values()))
    rows = {row.name: row for row in table(folder.spec)}
    expected = [alias.unsharded_tensor(rows[alias.ours]) for alias in aliases(folder.spec)]
    spaces, box, verify = gather_boxes(
        load, folder.spec, {MODEL: match_tensors(load, expected, folder.entries)}
    )
    tokenizer = _tokenizer(load, reading, folder.spec)
    dropped = reading.dropped_tokenizer(hf_folder.has_tokenizer(load))
    dropped = (*dropped, *dropped_items(load, folder.config, tokenizer))
    return CheckpointSource(
        load, folder.spec, spaces, box, tokenizer=tokenizer, dropped=dropped, verify=verify
    )


def _tokenizer(load: Path, reading: ReadOptions, spec: ModelSpec) -> Tokenizer | None:
    """Load the tokenizer of --tokenizer, or the folder's."""
    if reading.no_tokenizer:
        return None
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, spec)
    return hf_folder.read_tokenizer(load, spec)


def check_target(source: CheckpointSource, folder: Path, target: WriteOptions) -> None:
    """Refuse a model that no class supports, and an output folder that exists."""
    config_json.from_spec(_with_token_types(source.spec), source.path)
    output_dir.check_output_dir(
        folder, mark=hf_folder.CONFIG, what="a model", force=target.force, inputs=[source.path]
    )


def _with_token_types(spec: ModelSpec) -> ModelSpec:
    """Return the model with one token type if it is an encoder without token types.

    Hugging Face's classes of BERT have at least one. Its embedding is zero, so the model computes the same.
    The class with rotary positions, ModernBERT, has none.
    """
    if spec.causal or spec.token_types is not None or spec.positions == "rope":
        return spec
    return replace(spec, token_types=1)


def write(source: CheckpointSource, folder: Path, target: WriteOptions) -> WriteResult:
    """Write a folder that `transformers` loads."""
    spec = _with_token_types(source.spec)
    config = config_json.from_spec(spec, source.path)
    rows = {row.name: row for row in table(spec)}
    stored = source.spaces[MODEL]
    stored = {_TOKEN_TYPES: stored[_EMBEDDING], **stored} if spec != source.spec else stored
    kinds = stored if target.dtype == KEEP else dict.fromkeys(stored, dtypes.NAMES[target.dtype])
    weights = [
        WeightToWrite(alias.unsharded_tensor(rows[alias.ours]), kinds[alias.ours]) for alias in aliases(spec)
    ]
    written_dtypes = {weight.dtype for weight in weights}

    def read_rows(name: str, dtype: str) -> Iterator[RowChunk]:
        if name not in source.spaces[MODEL]:
            return iter([RowChunk(0, np.zeros(rows[name].shape, DTYPES[dtype]))])
        return source.row_chunks(MODEL, name, rows[name].shape, dtype)

    hf_folder.write_folder(
        folder,
        spec,
        config,
        lambda new: hf_shards.write_weights(new, weights, read_rows, target.shard, target.progress),
        dtype=written_dtypes.pop() if len(written_dtypes) == 1 else "F32",
        tokenizer=source.tokenizer,
    )
    has_files = (folder / TOKENIZER_CONFIG).exists()
    size = sum(weight.header.bytes for weight in weights)
    return WriteResult(folder, count_params(rows.values()), size, has_files)


FORMAT = Format(read, check_target, write, streams_rows=True)
