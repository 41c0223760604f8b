"""Held-out text, from JSON lines or from an indexed dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import orjson

from mega_eval.windows import Tokens, ids
from mega_schema.errors import FormatError
from mega_schema.indexed import IndexedDataset, beside
from mega_schema.tokenizer import TokenizerIdentity, check_same

_log = logging.getLogger("mega.eval")


class Encoder(Protocol):
    """What a task asks of a tokenizer."""

    @property
    def identity(self) -> TokenizerIdentity: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents as text and as tokens, side by side, none of them empty.

    Attributes:
        texts: one string a document.
        tokens: its ids, without the token that ends a document.
        empty: documents that had no tokens and are left out.
    """

    texts: list[str]
    tokens: list[Tokens]
    empty: int

    @property
    def bytes(self) -> int:
        """Length of all texts in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)


def text_file(path: Path) -> str:
    """The text of a file, its line ends as they are.

    Raises:
        FormatError: there is no such file, it is empty, or it is not UTF-8.
    """
    _must_be_a_file(path)
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise FormatError(
            path, "not UTF-8", found=f"byte {error.object[error.start]:#04x} at {error.start}"
        ) from None
    if not text.strip():
        raise FormatError(path, "no text in the file")
    return text


def json_lines(path: Path, key: str) -> list[tuple[int, str]]:
    """The string under `key` of every line, with the number of its line; blank lines are passed over.

    Raises:
        FormatError: there is no such file, it has no lines, or a line has no text under `key`.
    """
    _must_be_a_file(path)
    texts = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                texts.append((number, _text_of(line, key, f"{path}:{number}")))
    if not texts:
        raise FormatError(path, "no lines in the file", wanted=f'lines like {{"{key}": "..."}}')
    return texts


def is_dataset(path: Path) -> bool:
    """Whether the path is the prefix of an indexed dataset."""
    return not path.is_file() and beside(path, ".idx").is_file()


def files_of(path: Path) -> list[Path]:
    """The files of held-out text: JSON lines, or the two of an indexed dataset.

    Raises:
        FormatError: the path is neither, or it is one file of a dataset instead of the prefix of both.
    """
    if is_dataset(path):
        return dataset_files(path)
    if path.suffix in (".bin", ".idx") and is_dataset(path.with_suffix("")):
        raise FormatError(path, "one file of an indexed dataset", hint=f"--data {path.with_suffix('')}")
    _must_be_a_file(path)
    return [path]


def dataset_files(prefix: Path) -> list[Path]:
    """The two files of an indexed dataset.

    Raises:
        FormatError: there is no such dataset.
    """
    if not is_dataset(prefix):
        hint = "leave .bin and .idx off the path"
        raise FormatError(prefix, "no such indexed dataset", wanted=beside(prefix, ".idx"), hint=hint)
    return [beside(prefix, ".bin"), beside(prefix, ".idx")]


def documents_of(path: Path, key: str, encoder: Encoder) -> Documents:
    """The documents of a JSON lines file or of an indexed dataset, whichever the path names.

    Raises:
        FormatError: it is neither, or it holds no tokens, or the dataset was made with another tokenizer.
    """
    if is_dataset(path):
        tokens = list(_dataset_documents(path, encoder.identity))
        texts = [encoder.decode(t.tolist()) for t in tokens]
    else:
        texts = [text for _, text in json_lines(path, key)]
        tokens = [ids(t) for t in encoder.encode_batch(texts)]
    kept = [(text, t) for text, t in zip(texts, tokens, strict=True) if len(t)]
    if not kept:
        raise FormatError(path, "no tokens in any document")
    return Documents([text for text, _ in kept], [t for _, t in kept], len(texts) - len(kept))


def dataset_stream(prefix: Path, identity: TokenizerIdentity) -> Tokens:
    """All documents of an indexed dataset end to end, each ended by the end-of-document token.

    Raises:
        FormatError: there is no such dataset, another tokenizer made it, or it is too short to count.
    """
    dataset_files(prefix)
    stream = joined([t for t in _dataset_documents(prefix, identity) if len(t)], identity.eod)
    if len(stream) < 2:
        raise FormatError(prefix, "too short to count pairs in", found=f"{len(stream)} tokens", wanted="2")
    return stream


def joined(documents: Sequence[Tokens], eod: int | None) -> Tokens:
    """Documents end to end, each followed by `eod` where the tokenizer has one."""
    end = [] if eod is None else [ids([eod])]
    return np.concatenate([part for document in documents for part in (document, *end)] or [ids([])])


def _dataset_documents(prefix: Path, identity: TokenizerIdentity) -> Iterator[Tokens]:
    """The tokens of each document, without the one that ends it."""
    data = IndexedDataset(prefix)
    if data.info is None:
        _log.warning(
            "%s: says nothing of its tokenizer (no %s.json); only its ids are checked", prefix, prefix.name
        )
    else:
        check_same(data.info.tokenizer, identity, prefix)
    for number, (first, last) in enumerate(zip(data.documents[:-1], data.documents[1:], strict=True)):
        tokens = np.concatenate([ids([]), *(ids(data[i]) for i in range(int(first), int(last)))])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < identity.vocab_size:
            raise FormatError(
                prefix,
                f"ids of document {number} do not fit the checkpoint's tokenizer",
                found=f"{tokens.min()} to {tokens.max()}",
                wanted=f"0 to {identity.vocab_size - 1}",
            )
        yield tokens[:-1] if len(tokens) and tokens[-1] == identity.eod else tokens


def _text_of(line: bytes, key: str, where: str) -> str:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise FormatError(where, "not JSON", found=str(error)) from None
    if not isinstance(value, dict):
        raise FormatError(
            where, "not a JSON object", found=type(value).__name__, wanted=f'{{"{key}": "..."}}'
        )
    if key not in value:
        raise FormatError(
            where, f"no key {key!r}", found=", ".join(sorted(value)) or "an empty object", wanted=key
        )
    if not isinstance(value[key], str):
        raise FormatError(f"{where} {key}", "not text", found=type(value[key]).__name__, wanted="a string")
    return str(value[key])


def _must_be_a_file(path: Path) -> None:
    if not path.is_file():
        raise FormatError(path, "is a folder" if path.is_dir() else "no such file")
