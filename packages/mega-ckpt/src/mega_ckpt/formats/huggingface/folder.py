"""Read and write a Hugging Face model folder: config.json, weights and tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_ckpt.checkpoint.output_dir import contains_file
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.huggingface import config_json
from mega_ckpt.formats.huggingface import tokenizer as hf_tokenizer
from mega_ckpt.formats.huggingface.names import BUFFERS, HfNames, names_of
from mega_ckpt.formats.huggingface.shards import INDEX, WEIGHTS
from mega_ckpt.formats.huggingface.t5_names import COPIES
from mega_ckpt.formats.huggingface.tokenizer import GENERATION, TOKENIZER_JSON
from mega_ckpt.formats.user_overrides import NO_TOKENIZER
from mega_ckpt.tensors import safetensors_io
from mega_ckpt.tensors.mapped_tensor import MappedTensor, tensors_equal
from mega_ckpt.torch_files.pickle_reader import Unpickler
from mega_schema.atomic_io import disk_errors
from mega_schema.checkpoint.checkpoint_dir import MANIFEST
from mega_schema.checkpoint.foreign_files import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    check_foreign,
    read_foreign,
)
from mega_schema.dataset.atomic_dataset import atomic_folder
from mega_schema.errors import FormatError
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.sentencepiece import MODEL
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

CONFIG = "config.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
VOCAB, MERGES = "vocab.json", "merges.txt"

_OLD_NAMES: Mapping[str, str] = MappingProxyType({"gamma": "weight", "beta": "bias"})
_TORCH_NAMES: Mapping[str, str] = MappingProxyType({"F32": "float32", "BF16": "bfloat16", "F16": "float16"})


@dataclass(frozen=True, slots=True)
class HfFolder:
    """An opened folder: its config.json, the model spec and its mapped tensors."""

    config: Mapping[str, Any]
    spec: ModelSpec
    entries: Mapping[str, MappedTensor]


def open_hf_folder(folder: Path) -> HfFolder:
    """Read the config and the headers of the weights.

    Raises:
        FormatError: the folder is not of a supported model, or a file is missing or damaged.
    """
    if not (folder / CONFIG).is_file():
        is_mega = (folder / MANIFEST).is_file() or any(folder.glob(f"iter_*/{MANIFEST}"))
        hint = "--from mega --to hf" if is_mega else ""
        raise FormatError(folder, f"has no {CONFIG}", wanted="the folder of a Hugging Face model", hint=hint)
    config = _read_json(folder / CONFIG)
    spec = config_json.to_spec(config, folder / CONFIG)
    names = names_of(spec)
    entries = _entries(folder)
    if spec.layers > len(entries):  # otherwise the list of a wrong layer count could exhaust the memory
        raise FormatError(folder, "has fewer tensors than the model has layers", found=len(entries))
    embedding, head = f"{names.inner}{names.whole['embed']}.weight", f"{names.head}.weight"
    heads = (head, f"{names.other_head}.weight")
    entries = {head if n in heads else n: e for n, e in entries.items() if not n.endswith(BUFFERS)}
    if spec.encoder_layers is not None:
        spec, entries = _read_tied_tensors(folder, config, spec, entries)
    if not spec.causal:
        entries = _rename_encoder_tensors(folder, names, entries)
    if embedding.removeprefix(names.inner) in entries:  # only the inner model was saved, as OpenAI's
        entries = {n if n == head else names.inner + n: e for n, e in entries.items()}
    tied = spec.tied and head in entries and embedding in entries
    if tied and not tensors_equal(entries.pop(head), entries[embedding]):
        raise FormatError(
            f"{folder}: {head}",
            "is not the embedding, which it is tied to",
            hint=f'"tie_word_embeddings": false in {CONFIG}',
        )
    return HfFolder(config, spec, entries)


def _rename_encoder_tensors(
    folder: Path, names: HfNames, entries: Mapping[str, MappedTensor]
) -> dict[str, MappedTensor]:
    """Rename a norm's gamma and beta of old files, and drop the second copy of the head's bias."""
    renamed = {}
    for name, entry in entries.items():
        module, _, kind = name.rpartition(".")
        renamed[f"{module}.{_OLD_NAMES.get(kind, kind)}"] = entry
    bias, copy = f"{names.outer['head.bias']}.bias", f"{names.head}.bias"
    if (
        copy != bias
        and copy in renamed
        and bias in renamed
        and not tensors_equal(renamed.pop(copy), renamed[bias])
    ):
        raise FormatError(f"{folder}: {copy}", f"is not {bias}, which it is tied to")
    return renamed


def _read_tied_tensors(
    folder: Path, config: Mapping[str, Any], spec: ModelSpec, entries: Mapping[str, MappedTensor]
) -> tuple[ModelSpec, dict[str, MappedTensor]]:
    """Drop the copies of T5's embedding, and find whether the output matrix is tied to it.

    transformers 5 records every T5 as tied, and in `scale_decoder_outputs` what the key of the tie meant
    before. It reads an output matrix that differs from the embedding as untied.
    """
    names = names_of(spec)
    embedding, head = f"{names.whole['embed']}.weight", f"{names.head}.weight"
    whole = {name: entry for name, entry in entries.items() if name not in COPIES}
    if embedding not in whole:
        return spec, whole  # refused later as a missing tensor
    for name in COPIES:
        if name in entries and not tensors_equal(entries[name], whole[embedding]):
            raise FormatError(f"{folder}: {name}", f"is not {embedding}, which it is tied to")
    scale_output = config.get("scale_decoder_outputs", spec.scale_output)
    if scale_output is spec.tied:
        return spec, whole
    tied = head not in whole or tensors_equal(whole[head], whole[embedding])
    return replace(spec, tied=tied, scale_output=scale_output), whole


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder contains the files of a tokenizer, without reading them."""
    sets = ((TOKENIZER_JSON,), (VOCAB, MERGES), (MODEL,))
    return any(all((folder / name).is_file() for name in names) for names in sets)


def read_tokenizer(folder: Path, spec: ModelSpec) -> Tokenizer | None:
    """Read the folder's tokenizer; None if it has none.

    Raises:
        FormatError: it is damaged, or has ids outside the model's vocabulary.
    """
    for name in (TOKENIZER_JSON, VOCAB, MERGES, MODEL):
        check_foreign(folder / name, MAX_TOKENIZER_BYTES)
    if (folder / TOKENIZER_JSON).is_file():
        tokenizer = open_tokenizer("HuggingFaceTokenizer", model=folder)
    elif (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        tokenizer = open_tokenizer("GPT2BPETokenizer", vocab_file=folder / VOCAB, merge_file=folder / MERGES)
    elif (folder / MODEL).is_file():
        tokenizer = open_tokenizer("Llama2Tokenizer", model=folder / MODEL)
    else:
        return None
    return user_overrides.check_fits(tokenizer, spec, f"{folder}: the tokenizer", hint=NO_TOKENIZER)


def write_folder(
    folder: Path,
    spec: ModelSpec,
    config: Mapping[str, Any],
    weights: Callable[[Path], None],
    *,
    dtype: str,
    tokenizer: Tokenizer | None,
) -> None:
    """Write a folder that `transformers` loads, atomically; `output_dir` has the check of the path.

    Args:
        weights: writes the weights into a folder.
        dtype: of the weights, safetensors' name.

    Raises:
        MegaError: the disk is full, or refused the write for another reason.
    """
    special = _special_ids(tokenizer)
    if spec.encoder_layers is not None:  # T5's decoder begins with padding, where there is no other start
        start = special["bos_token_id"] if special["bos_token_id"] is not None else special["pad_token_id"]
        special["decoder_start_token_id"] = start or 0
    torch_name = _TORCH_NAMES[dtype]
    with disk_errors(folder), atomic_folder(folder, contains_file(CONFIG)) as new:
        weights(new)
        # transformers 4 reads torch_dtype, 5 reads dtype
        _write_json(new / CONFIG, {**config, **special, "dtype": torch_name, "torch_dtype": torch_name})
        if (generation := hf_tokenizer.generation_config(tokenizer)) is None:
            _write_json(new / GENERATION, {"_from_model_config": True, **special})
        else:
            (new / GENERATION).write_bytes(generation)
        if tokenizer is not None:
            hf_tokenizer.write_tokenizer(new, tokenizer, spec.max_seq_len)


def _entries(folder: Path) -> dict[str, MappedTensor]:
    """Map every tensor of the folder's files; safetensors files are preferred to pickles."""
    for index, alone, tensors in (
        (INDEX, WEIGHTS, _safetensors_tensors),
        (PICKLED_INDEX, PICKLED, _pickled_tensors),
    ):
        if (folder / index).is_file():
            return _indexed_tensors(folder / index, tensors)
        if (folder / alone).is_file():
            return dict(tensors([folder / alone])[alone])
    raise FormatError(folder, "has no weights", wanted=f"{WEIGHTS}, {PICKLED}, or the index of several")


def _safetensors_tensors(files: Sequence[Path]) -> dict[str, Mapping[str, MappedTensor]]:
    return {file.name: safetensors_io.read_header(file).entries for file in files}


def _pickled_tensors(files: Sequence[Path]) -> dict[str, Mapping[str, MappedTensor]]:
    with Unpickler() as unpickler:
        return {file.name: unpickler.open(file).tensors() for file in files}


def _indexed_tensors(
    index: Path, tensors: Callable[[Sequence[Path]], Mapping[str, Mapping[str, MappedTensor]]]
) -> dict[str, MappedTensor]:
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise FormatError(f"{index}: weight_map", "is not an object of tensor: file")
    files = []
    for name in sorted(set(where.values())):
        if Path(name).name != name or name == "..":
            raise FormatError(index, "file outside the folder", found=name)
        files.append(index.parent / name)
        if not files[-1].is_file():
            raise FormatError(files[-1], "missing file", wanted=f"a file that {index.name} names")
    by_file = tensors(files)
    for tensor, file in where.items():
        if tensor not in by_file[file]:
            raise FormatError(index.parent / file, "has no tensor", wanted=tensor)
    return {tensor: by_file[file][tensor] for tensor, file in where.items()}


def _special_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Return the special token ids; missing ones would be taken from defaults of other models."""
    identity = tokenizer.identity if tokenizer else None
    return {
        "bos_token_id": identity.bos if identity else None,
        "eos_token_id": identity.eod if identity else None,
        "pad_token_id": identity.pad if identity else None,
    }


def _read_json(path: Path) -> dict[str, Any]:
    content = read_foreign(path, MAX_JSON_BYTES)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, "is not JSON", found=error) from error
    if not isinstance(value, dict):
        raise FormatError(path, "content", found=type(value).__name__, wanted="a JSON object")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as out:
        json.dump(value, out, indent=2)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
