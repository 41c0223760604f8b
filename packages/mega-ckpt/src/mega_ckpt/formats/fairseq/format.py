"""Read fairseq's tensor-parallel language models, such as megatron_11b.

model-model_part-0.pt, ...      one file per rank: args or cfg, model, optimizer state
dict.txt                        dictionary of token ids
encoder.json, vocab.bpe         GPT-2's tokenizer, if it was added
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource, ReadBox, gather_boxes, match_tensors
from mega_ckpt.checkpoint.merge_ranks import merge_ranks
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.fairseq import args as fairseq_args
from mega_ckpt.formats.fairseq import dictionary as fairseq_dictionary
from mega_ckpt.formats.fairseq.names import EMBEDDING, part_tensors
from mega_ckpt.formats.interface import Format, ReadOptions
from mega_ckpt.tensors.mapped_tensor import MappedTensor, tensors_equal
from mega_ckpt.torch_files.pickle_reader import PickleFile, Unpickler
from mega_schema.checkpoint.foreign_files import MAX_TOKENIZER_BYTES, check_foreign
from mega_schema.checkpoint.reader import DTYPES, MODEL
from mega_schema.errors import FormatError, LayoutError
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

_PART = re.compile(r"(?P<stem>.*)-model_part-(?P<rank>\d{1,4})\.pt")
_TIED = ("decoder.output_projection.weight", "decoder.embed_out")
_COMPUTED = ("decoder.embed_positions._float_tensor", "decoder.version")
_OTHER: Mapping[str, str] = MappingProxyType(
    {"last_optimizer_state": "the optimizer's state", "extra_state": "the schedule"}
)
_TOKENIZERS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


@dataclass(frozen=True, slots=True)
class _Part:
    """The content of a rank's file."""

    file: Path
    tree: Mapping[Any, Any]
    tensors: dict[str, MappedTensor]


def read(load: Path, reading: ReadOptions) -> CheckpointSource:
    """Read the files in a folder, or those of a path such as model.pt, as fairseq names them.

    Ids are in the order of GPT-2's tokenizer: see `dictionary`.

    Raises:
        FormatError: a part is missing, damaged or of another model, or the model is not supported.
    """
    files = _files(load)
    with Unpickler() as unpickler:
        parts = [_check_part(unpickler.open(file)) for file in files]
    first = parts[0]
    args = fairseq_args.model_args(first.tree, first.file)
    embedding = first.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError(first.file, "has no matrix", wanted=EMBEDDING)
    wanted = args.get("model_parallel_size", len(parts))
    if wanted != len(parts):
        raise FormatError(load, "parts of the model", found=len(parts), wanted=wanted)
    spec = fairseq_args.to_spec(args, embedding.shape[0] * len(parts), first.file)
    if spec.layers > len(first.tensors):  # otherwise the list of a wrong layer count could exhaust the memory
        raise FormatError(
            f"{first.file}: decoder_layers", "more than the file has", found=spec.layers, wanted="its layers"
        )
    try:
        expected = [list(part_tensors(spec, rank, len(parts))) for rank in range(len(parts))]
    except LayoutError as error:
        raise FormatError(load, f"cannot be in {len(parts)} parts: {error}") from None
    merged = merge_ranks(
        match_tensors(part.file, foreign, part.tensors) for part, foreign in zip(parts, expected, strict=True)
    )
    spaces, box, verify = gather_boxes(load, spec, {MODEL: merged.require_equal()})
    order = fairseq_dictionary.id_order(first.file.with_name(fairseq_dictionary.FILE), spec.vocab)
    ordered = _reorder_embedding(box, order, [part.tensors[EMBEDDING] for part in parts])
    dropped = tuple(description for key, description in _OTHER.items() if first.tree.get(key))
    return CheckpointSource(
        load,
        spec,
        spaces,
        ordered,
        tokenizer=_tokenizer(first.file.parent, reading, spec),
        dropped=dropped,
        verify=verify,
    )


def _files(load: Path) -> list[Path]:
    """Return the files in the order of their ranks."""
    folder, stem = (load, None) if load.is_dir() else (load.parent, load.name.removesuffix(".pt"))
    checkpoints: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("*.pt")):
        if (name := _PART.fullmatch(path.name)) and stem in (None, name["stem"]):
            checkpoints.setdefault(name["stem"], {})[int(name["rank"])] = path
    if not checkpoints:
        raise FormatError(load, "has no weights", wanted=f"{stem or 'model'}-model_part-0.pt and on")
    if len(checkpoints) > 1:
        hint = f"--load {folder / next(iter(checkpoints))}.pt"
        raise FormatError(
            load, "has several checkpoints", found=" ".join(checkpoints), wanted="one", hint=hint
        )
    ((stem, parts),) = checkpoints.items()
    for rank in range(1 + max(parts)):
        if rank not in parts:
            raise FormatError(
                folder / f"{stem}-model_part-{rank}.pt",
                "no such file",
                wanted=f"a file for every rank to {max(parts)}",
            )
    return [parts[rank] for rank in sorted(parts)]


def _check_part(opened: PickleFile) -> _Part:
    tree = opened.tree
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or not all(isinstance(value, MappedTensor) for value in model.values()):
        raise FormatError(
            opened.file, "is not a fairseq checkpoint", wanted="a dictionary with args and model"
        )
    tensors = {str(name): value for name, value in model.items() if name not in _COMPUTED}
    for name in _TIED:
        head = tensors.pop(name, None)
        if head is not None and EMBEDDING in tensors and not tensors_equal(head, tensors[EMBEDDING]):
            raise FormatError(f"{opened.file}: {name}", "is not the embedding, which it is tied to")
    return _Part(opened.file, tree, tensors)


def _reorder_embedding(box: ReadBox, order: np.ndarray, embeddings: list[MappedTensor]) -> ReadBox:
    """Return a `read_box` that reorders the rows of the embedding.

    Args:
        order: fairseq's id for every id of Mega.
        embeddings: the embedding of every part; all have the same number of rows.
    """
    part_rows = embeddings[0].shape[0]

    def read_reordered(space: str, name: str, slab: Slab) -> np.ndarray:
        if name != "embed.weight":
            return box(space, name, slab)
        rows, columns = slab.in_global
        ids = order[rows]
        out = np.empty(slab.shape, DTYPES[embeddings[0].dtype])
        for part, embedding in enumerate(embeddings):
            positions = np.flatnonzero(ids // part_rows == part)
            out[positions] = embedding.values()[ids[positions] % part_rows, columns]
        return out

    return read_reordered


def _tokenizer(folder: Path, reading: ReadOptions, spec: ModelSpec) -> Tokenizer | None:
    """Load the tokenizer of --tokenizer, or GPT-2's in the same folder."""
    if reading.no_tokenizer:
        return None
    if reading.tokenizer is not None:
        return user_overrides.load_tokenizer(reading.tokenizer, spec)
    for vocab, merges in ((folder / vocab, folder / merges) for vocab, merges in _TOKENIZERS):
        if vocab.is_file() and merges.is_file():
            check_foreign(vocab, MAX_TOKENIZER_BYTES)
            check_foreign(merges, MAX_TOKENIZER_BYTES)
            tokenizer = open_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
            return user_overrides.check_fits(tokenizer, spec, vocab, hint=user_overrides.NO_TOKENIZER)
    return None


FORMAT = Format(read)
