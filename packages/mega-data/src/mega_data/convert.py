"""Convert a dataset to another index format or dtype, or back to text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import orjson

from mega_data.inspect import open_dataset_tokenizer
from mega_schema.atomic_io import atomic_write, disk_errors, own_partial_file, sync_folder
from mega_schema.dataset.indexed_dataset import IndexedDataset, sibling
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer


def canonical_format(name: str) -> str:
    """Return the index format of Megatron's name: `lazy` and `cached` read the same format."""
    return "cached" if name == "lazy" else name


def check_index_format(data: IndexedDataset, name: str) -> None:
    """Refuse a dataset that is not of the named index format; `auto` accepts any.

    Raises:
        FormatError: the dataset has another format.
    """
    if name != "auto" and canonical_format(name) != data.index_format:
        raise FormatError(
            sibling(data.prefix, ".idx"),
            "index format",
            found=data.index_format,
            wanted=name,
            hint="--from auto",
        )


def loses_documents(data: IndexedDataset, index_format: str) -> bool:
    """Return whether the format does not store documents."""
    return index_format.startswith("fairseq") and (data.documents[1:] - data.documents[:-1] != 1).any().item()


def to_json_lines(
    data: IndexedDataset,
    path: Path,
    *,
    key: str = "text",
    tokenizer: Tokenizer | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> int:
    """Write the text of every document as a line of JSON.

    The default tokenizer is the one stored with the dataset. The eod at a document's end is omitted; several
    sequences of a document are joined by a space.

    Args:
        progress: called with the bytes of ids read since its last call.

    Returns:
        Documents written.

    Raises:
        ConfigError: there is no tokenizer.
        FormatError: the dataset is damaged.
        MegaError: the disk is full.
    """
    tokenizer = tokenizer or open_dataset_tokenizer(data)
    if tokenizer is None:
        found = f"no {sibling(data.prefix, '.tokenizer')}"
        hint = "add --tokenizer-model FOLDER"
        raise ConfigError("--to jsonl", "needs the tokenizer of the ids", found=found, hint=hint)
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = 0
    with disk_errors(path), atomic_write(path, own_partial_file(path)) as partial, partial.open("wb") as file:
        for text, size in _decode_documents(data, tokenizer):
            file.write(orjson.dumps({key: text}) + b"\n")
            documents += 1
            progress(size)
    sync_folder(path.parent)
    return documents


def _decode_documents(data: IndexedDataset, tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yield each document's text and the bytes of its ids."""
    eod = tokenizer.identity.eod
    size = tokenizer.identity.vocab_size
    for first, last in zip(data.documents[:-1].tolist(), data.documents[1:].tolist(), strict=True):
        sequences = [data.read(i) for i in range(first, last)]
        count = sum(map(len, sequences))
        for sequence, ids in enumerate(sequences, first):
            if len(bad_ids := np.flatnonzero((ids < 0) | (ids >= size))):
                path, found = sibling(data.prefix, ".bin"), int(ids[bad_ids[0]])
                wanted = f"0 to {size - 1}, the vocabulary"
                raise FormatError(
                    path, f"token {bad_ids[0]} of sequence {sequence}", found=found, wanted=wanted
                )
        if sequences and len(sequences[-1]) and sequences[-1][-1] == eod:
            sequences[-1] = sequences[-1][:-1]
        text = " ".join(tokenizer.decode(ids.tolist()) for ids in sequences)
        # a text that ends in the middle of a character is not valid UTF-8
        yield text.encode("utf-8", "replace").decode("utf-8"), count * data.dtype.itemsize
