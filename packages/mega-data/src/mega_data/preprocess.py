"""JSON lines to indexed datasets, one per key: the same bytes whatever the number of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_data.jsonl import CHUNK_BYTES, Chunk, Fault, chunks, read
from mega_data.workers import in_order
from mega_schema.errors import ConfigError, RequestError
from mega_schema.indexed import DatasetInfo, IndexedWriter, beside, smallest_dtype
from mega_schema.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoded:
    """Documents of a chunk under one key: their ids end to end, and how many each has."""

    ids: NDArray[Any]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Chunk to ids; what a worker process is sent once."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    dtype: np.dtype[Any]

    def __call__(self, chunk: Chunk) -> tuple[int, list[Encoded]] | Fault:
        """Bytes read, and the documents under each key; or the first fault."""
        rows = read(chunk, self.keys)
        if isinstance(rows, Fault):
            return rows
        encoded = []
        for place in range(len(self.keys)):
            texts = [row[place] for row in rows[1]]
            try:
                documents = self.tokenizer.encode_batch(texts)
            except RequestError:
                return self._first_fault(chunk, rows[0], texts)
            encoded.append(self._joined(documents))
        return chunk.size, encoded

    def _joined(self, documents: list[list[int]]) -> Encoded:
        eod = self.tokenizer.identity.eod
        flat: list[int] = []
        for document in documents:
            if document and self.append_eod:
                assert eod is not None
                document.append(eod)  # an empty document stays empty, as Megatron's
            flat += document
        return Encoded(np.array(flat, self.dtype), [len(document) for document in documents])

    def _first_fault(self, chunk: Chunk, numbers: list[int], texts: list[str]) -> Fault:
        for number, text in zip(numbers, texts, strict=True):
            try:
                self.tokenizer.encode(text)
            except RequestError as error:
                return Fault(f"{chunk.path}:{number}", error.what, str(error.found), str(error.wanted))
        raise AssertionError("a batch was refused, but none of its texts")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run wrote: the prefix of each dataset, documents of each, tokens of all, bytes read, seconds."""

    prefixes: tuple[Path, ...]
    documents: int
    tokens: int
    size: int
    seconds: float


def preprocess(
    inputs: Sequence[Path],
    output_prefix: Path,
    tokenizer: Tokenizer,
    *,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    chunk: int = CHUNK_BYTES,
    progress: Callable[[int], object] = lambda _: None,
) -> Outcome:
    """Write `{output_prefix}_{key}_document.{bin,idx,json}` and `.tokenizer/` for each key.

    A line is a document and one sequence of it; a text without tokens is an empty document. Lines that are
    blank are passed over.

    Args:
        append_eod: end each document that has tokens with the tokenizer's eod.
        workers: processes that encode; 1 is this process, with the threads of the tokenizers library.
        chunk: bytes of lines a worker is handed at a time; what is written does not depend on it.
        progress: told the bytes read since it was last called.

    Raises:
        ConfigError: an eod is asked for that the tokenizer does not have, or a key is named twice.
        FormatError: a line is not what it should be; then nothing is written.
    """
    identity = tokenizer.identity
    if append_eod and identity.eod is None:
        wanted = "a tokenizer with <|endoftext|>, </s> or the like"
        raise ConfigError("--append-eod", "the tokenizer has no end of document", found="none", wanted=wanted)
    if len(set(keys)) != len(keys):
        raise ConfigError("--json-keys", "a key is named twice", found=" ".join(keys))
    dtype = smallest_dtype(identity.vocab_size)
    began, documents, size = time.monotonic(), 0, 0
    prefixes = tuple(beside(output_prefix, f"_{key}_document") for key in keys)
    sources = tuple(str(path) for path in inputs)
    with ExitStack() as stack:
        writers = []
        for prefix, key in zip(prefixes, keys, strict=True):
            options = {"key": key, "append_eod": append_eod}
            info = DatasetInfo(identity, sources=sources, options=options)
            writers.append(stack.enter_context(IndexedWriter(prefix, dtype, info)))
        encoder = Encoder(tokenizer, tuple(keys), append_eod, dtype)
        for done in in_order(encoder, chunks(inputs, chunk), workers):
            if isinstance(done, Fault):
                raise done.error()
            for writer, encoded in zip(writers, done[1], strict=True):
                _write(writer, encoded)
            documents, size = documents + len(done[1][0].lengths), size + done[0]
            progress(done[0])
        for prefix in prefixes:
            tokenizer.save(beside(prefix, ".tokenizer"))
    tokens = sum(writer.tokens for writer in writers)
    return Outcome(prefixes, documents, tokens, size, time.monotonic() - began)


def _write(writer: IndexedWriter, encoded: Encoded) -> None:
    at = 0
    for length in encoded.lengths:
        if length:
            writer.add(encoded.ids[at : at + length])
        writer.end_document()
        at += length
