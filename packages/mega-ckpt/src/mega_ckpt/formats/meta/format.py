"""Read and write Meta's Llama folders.

params.json                  sizes
consolidated.00.pth, ...     a dictionary of tensors for each tensor-parallel rank
tokenizer.model              a SentencePiece model, or from Llama 3 on a tiktoken vocabulary
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mega_ckpt.checkpoint import output_dir
from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource, gather_boxes, match_tensors
from mega_ckpt.checkpoint.merge_ranks import merge_ranks
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.interface import KEEP, Format, ReadOptions, WriteOptions, WriteResult
from mega_ckpt.formats.meta import params as meta_params
from mega_ckpt.formats.meta import tokenizer as llama3_tokenizer
from mega_ckpt.formats.meta.names import part_tensors
from mega_ckpt.formats.user_overrides import NO_TOKENIZER
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.mapped_tensor import MappedTensor, tensors_equal
from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_ckpt.torch_files import zip_writer
from mega_ckpt.torch_files.pickle_reader import Unpickler
from mega_schema.arch import table
from mega_schema.atomic_io import disk_errors
from mega_schema.checkpoint.foreign_files import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    check_foreign,
    read_foreign,
)
from mega_schema.checkpoint.reader import MODEL
from mega_schema.dataset.atomic_dataset import atomic_folder
from mega_schema.errors import ConfigError, FormatError, LayoutError
from mega_schema.params import count_params
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

PARAMS, PART, TOKENIZER = "params.json", "consolidated.{:02d}.pth", "tokenizer.model"
_HEAD, _EMBEDDING = "output.weight", "tok_embeddings.weight"
_ANGLES = "rope.freqs"  # a table of Llama 1 and 2, which is computed


def read(load: Path, reading: ReadOptions) -> CheckpointSource:
    """Read the folder and compare the replicated tensors of its parts.

    Raises:
        FormatError: a part is missing, damaged or of another model.
    """
    params = _params(load / PARAMS)
    files = _files(load)
    with Unpickler() as unpickler:
        parts = [_tensors(file, unpickler.open(file).tree) for file in files]
    shapes = {name: stored.shape for name, stored in parts[0].items()}
    with_head = _HEAD in parts[0]
    tied = all(
        _HEAD not in part or tensors_equal(part[_EMBEDDING], part[_HEAD])
        for part in parts
        if _EMBEDDING in part
    )
    spec, by_rows = meta_params.to_spec(params, load / PARAMS, shapes, len(parts), tied=tied)
    try:
        expected = [
            [f for f in part_tensors(spec, rank, len(parts), by_rows=by_rows) if with_head or f.name != _HEAD]
            for rank in range(len(parts))
        ]
    except LayoutError as error:
        raise FormatError(load, f"cannot be in {len(parts)} parts: {error}") from None
    tensors = merge_ranks(
        match_tensors(*part) for part in zip(files, expected, parts, strict=True)
    ).require_equal()
    spaces, box, verify = gather_boxes(load, spec, {MODEL: tensors})
    return CheckpointSource(load, spec, spaces, box, tokenizer=_tokenizer(load, reading, spec), verify=verify)


def check_target(source: CheckpointSource, folder: Path, target: WriteOptions) -> None:
    """Refuse a model or a split that Meta's program does not support, or a folder that exists."""
    params = meta_params.from_spec(source.spec, source.path)
    layout = target.layout
    if layout.pp > 1 or layout.vp > 1:
        raise ConfigError("--pp", "Meta's parts are of every layer", found=layout.pp, wanted=1)
    if params["vocab_size"] % layout.tp:
        found = f"{source.spec.vocab} rows over tp={layout.tp}"
        raise LayoutError("--tp", "the vocabulary cannot be split evenly", found=found, wanted="a divisor")
    for _ in part_tensors(source.spec, 0, layout.tp, by_rows=True):
        pass
    output_dir.check_output_dir(folder, mark=PARAMS, what="a model", force=target.force, inputs=[source.path])


def write(source: CheckpointSource, folder: Path, target: WriteOptions) -> WriteResult:
    """Write a folder that Meta's program loads with as many ranks as there are parts."""
    spec = source.spec
    stored = source.spaces[MODEL]

    def header_of(foreign: ForeignTensor) -> TensorHeader:
        tied = spec.tied and foreign.name == _HEAD  # a second copy of the same values
        stored_dtype = stored["embed.weight" if tied else foreign.ours]
        dtype = stored_dtype if target.dtype == KEEP else dtypes.NAMES[target.dtype]
        return TensorHeader(_EMBEDDING if tied else foreign.name, dtype, foreign.shape)

    parts = [
        {foreign.name: foreign for foreign in part_tensors(spec, rank, target.layout.tp, by_rows=True)}
        for rank in range(target.layout.tp)
    ]
    trees = [{name: header_of(foreign) for name, foreign in part.items()} for part in parts]
    size = sum(tensor.bytes for tree in trees for tensor in set(tree.values()))
    with (
        disk_errors(folder),
        atomic_folder(folder, output_dir.contains_file(PARAMS)) as new,
        target.progress(size) as update,
    ):
        for rank, (part, tree) in enumerate(zip(parts, trees, strict=True)):

            def values(
                tensor: TensorHeader, part: Mapping[str, ForeignTensor] = part
            ) -> Iterable[np.ndarray]:
                return (
                    chunk.values for chunk in source.foreign_chunks(MODEL, part[tensor.name], tensor.dtype)
                )

            zip_writer.write(new / PART.format(rank), tree, values, update)
        with (new / PARAMS).open("w", encoding="utf-8", newline="\n") as out:
            json.dump(meta_params.from_spec(spec, source.path), out, indent=2)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())
    return WriteResult(folder, count_params(table(spec)), size, False)


def _params(path: Path) -> dict[str, Any]:
    if not path.is_file():
        hint = "--from hf" if path.with_name("config.json").is_file() else ""
        raise FormatError(path.parent, f"has no {PARAMS}", wanted="a folder of Meta's Llama", hint=hint)
    content = read_foreign(path, MAX_JSON_BYTES)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, "is not JSON", found=error) from None
    if not isinstance(value, dict):
        raise FormatError(path, "content", found=type(value).__name__, wanted="a JSON object")
    return value


def _files(load: Path) -> list[Path]:
    files = sorted(load.glob("consolidated.*.pth"))
    if not files:
        raise FormatError(load, "has no weights", wanted=f"{PART.format(0)} and on")
    for rank, file in enumerate(files):
        if file.name != PART.format(rank):
            raise FormatError(
                load / PART.format(rank), "no such file", wanted=f"a part for every rank to {file.name}"
            )
    return files


def _tensors(file: Path, tree: Any) -> dict[str, MappedTensor]:
    if not isinstance(tree, dict) or not all(isinstance(value, MappedTensor) for value in tree.values()):
        raise FormatError(file, "is not a part of a Llama", wanted="a dictionary of tensors")
    return {str(name): stored for name, stored in tree.items() if name != _ANGLES}


def _tokenizer(load: Path, reading: ReadOptions, spec: ModelSpec) -> Tokenizer | None:
    """Load the tokenizer of --tokenizer, of the folder, or of its parent folder."""
    if reading.no_tokenizer:
        return None
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, spec)
    for path in (load / TOKENIZER, load.parent / TOKENIZER):
        if path.is_file():
            check_foreign(path, MAX_TOKENIZER_BYTES)
            with path.open("rb") as file:
                sentencepiece = file.read(1) == b"\n"  # the tag of its first field
            if not sentencepiece:
                return llama3_tokenizer.read_tokenizer(path, spec.vocab)
            tokenizer = open_tokenizer("Llama2Tokenizer", model=path)
            return user_overrides.check_fits(tokenizer, spec, path, hint=NO_TOKENIZER)
    return None


FORMAT = Format(read, check_target, write)
