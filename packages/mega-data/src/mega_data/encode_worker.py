"""Encode blocks of an input to token ids: the work of a `preprocess` worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_data.dataset_files import EncodedDocuments
from mega_data.encoders import FlatIds, TextEncoder
from mega_data.readers.blocks import Block, RowError, Rows, TextOrSentences
from mega_schema.errors import RequestError
from mega_schema.tokenizer.special_tokens import SpecialTokens


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """An encoded block.

    Attributes:
        input: number of its input.
        end: position in the input after the block.
        rows, size, consumed_bytes: of the block, as in Rows and Block.
        keys: its documents under each key.
        errors: the rows that could not be encoded, in order.
    """

    input: int
    end: int
    rows: int
    size: int
    consumed_bytes: int
    keys: list[EncodedDocuments]
    errors: list[RowError]


@dataclass(frozen=True, slots=True)
class BlockEncoder:
    """Encode a block to ids; sent to each worker process once.

    Attributes:
        eod: id to append to each document that has tokens, None for none.
        special_tokens: around the ids of each sequence that has any.
        split: splits a text into sentences, each a sequence; None keeps a text whole.
    """

    encode: TextEncoder
    keys: tuple[str, ...]
    dtype: np.dtype[Any]
    eod: int | None = None
    special_tokens: SpecialTokens = SpecialTokens()
    split: Callable[[str], list[str]] | None = None

    def __call__(self, item: tuple[int, Block]) -> EncodedBlock:
        number, block = item
        rows = block.rows(self.keys)
        try:
            encoded = self._encode_rows(rows)
        except RequestError:
            self._set_errors_apart(rows)
            encoded = self._encode_rows(rows)
        return EncodedBlock(
            number, block.end, rows.count, rows.size, block.consumed_bytes, encoded, rows.errors
        )

    def _encode_rows(self, rows: Rows) -> list[EncodedDocuments]:
        return [self._encode_key([row[key] for row in rows.texts]) for key in range(len(self.keys))]

    def _encode_key(self, values: list[TextOrSentences]) -> EncodedDocuments:
        if self.split is None and not self.special_tokens and all(type(value) is str for value in values):
            ids, lengths = self.encode(values, self.eod)  # type: ignore[arg-type]
            has_tokens = lengths > 0
            return EncodedDocuments(
                ids.astype(self.dtype), lengths[has_tokens].astype(np.int32), has_tokens.astype(np.int64)
            )
        sentences = list[str]()
        owners = list[int]()
        for owner, value in enumerate(values):
            parts = value if isinstance(value, list) else self.split(value) if self.split else [value]
            sentences += parts
            owners += [owner] * len(parts)
        ids, lengths = self.encode(sentences)
        return self._join_sequences(ids, lengths, np.array(owners, np.int64), len(values))

    def _join_sequences(
        self, ids: NDArray[Any], lengths: NDArray[np.int64], owners: NDArray[np.int64], documents: int
    ) -> EncodedDocuments:
        """Drop sequences without tokens; insert eod and special tokens.

        Args:
            owners: document of each sequence, ascending.
        """
        has_tokens = lengths > 0
        lengths, owners = lengths[has_tokens], owners[has_tokens]
        sequences = np.bincount(owners, minlength=documents).astype(np.int64)
        ends_document = np.zeros(len(lengths), np.bool_)
        if self.eod is not None and len(owners):
            ends_document[:-1] = owners[1:] != owners[:-1]
            ends_document[-1] = True
        prefix, suffix = self.special_tokens.prefix, self.special_tokens.suffix
        out_lengths = lengths + len(prefix) + len(suffix) + ends_document
        out = np.empty(int(out_lengths.sum()), self.dtype)
        ends = np.cumsum(out_lengths)
        is_text = np.ones(len(out), np.bool_)
        special_places = [(ends - out_lengths + index, token) for index, token in enumerate(prefix)]
        special_places += [
            (ends - ends_document - len(suffix) + index, token) for index, token in enumerate(suffix)
        ]
        if self.eod is not None:
            special_places.append(((ends - 1)[ends_document], self.eod))
        for index, token in special_places:
            out[index], is_text[index] = token, False
        out[is_text] = ids
        return EncodedDocuments(out, out_lengths.astype(np.int32), sequences)

    def _set_errors_apart(self, rows: Rows) -> None:
        """Move rows that cannot be encoded to the errors."""
        good_numbers = list[int]()
        good_texts = list[tuple[TextOrSentences, ...]]()
        for number, texts in zip(rows.numbers, rows.texts, strict=True):
            try:
                for text in texts:
                    self.encode([text] if isinstance(text, str) else text)
            except RequestError as error:
                raw = repr(texts)
                found, wanted = (str(error.values.get(word, "")) for word in ("found", "wanted"))
                rows.errors.append(RowError(number, error.what, found, wanted, raw))
            else:
                good_numbers.append(number)
                good_texts.append(texts)
        rows.numbers = good_numbers
        rows.texts = good_texts
        rows.errors.sort(key=lambda row_error: row_error.row)


def encode_texts(texts: Sequence[str], work: BlockEncoder) -> FlatIds:
    """Encode texts with the worker's encoder; called in the process that holds it (`ProcessPool.ask`).

    It is defined here, and not next to its caller, because that process imports the module of the function
    while the caller waits.
    """
    return work.encode(texts)
