"""Blocks of an input to documents of ids: what a worker process of `preprocess` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_data.encoders import Encode, Flat
from mega_data.readers.blocks import Block, Fault, Rows, Text
from mega_data.resumable_output import Encoded
from mega_schema.errors import RequestError
from mega_schema.tokenizer.special_tokens import SpecialTokens


@dataclass(frozen=True, slots=True)
class Done:
    """A block that was encoded.

    Attributes:
        input: number of the input it is of.
        end: position in it after the block.
        rows, size, consumed: of the block, as in Rows and Block.
        keys: its documents under each key.
        faults: its rows that are in none of them, in their order.
    """

    input: int
    end: int
    rows: int
    size: int
    consumed: int
    keys: list[Encoded]
    faults: list[Fault]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Block to ids; what a worker process is sent once.

    Attributes:
        eod: id to end each document with that has tokens, None for none.
        added: special tokens around the ids of each sequence that has any.
        split: text to its sentences, each a sequence; None leaves a text whole.
    """

    encode: Encode
    keys: tuple[str, ...]
    dtype: np.dtype[Any]
    eod: int | None = None
    added: SpecialTokens = SpecialTokens()
    split: Callable[[str], list[str]] | None = None

    def __call__(self, item: tuple[int, Block]) -> Done:
        number, block = item
        rows = block.rows(self.keys)
        try:
            encoded = self._encoded(rows)
        except RequestError:
            self._set_apart(rows)
            encoded = self._encoded(rows)
        return Done(number, block.end, rows.count, rows.size, block.consumed, encoded, rows.faults)

    def _encoded(self, rows: Rows) -> list[Encoded]:
        return [self._of_key([row[key] for row in rows.texts]) for key in range(len(self.keys))]

    def _of_key(self, values: list[Text]) -> Encoded:
        if self.split is None and not self.added and all(type(value) is str for value in values):
            ids, lengths = self.encode(values, self.eod)  # type: ignore[arg-type]
            full = lengths > 0
            return Encoded(ids.astype(self.dtype), lengths[full].astype(np.int32), full.astype(np.int64))
        sentences, owners = list[str](), list[int]()
        for owner, value in enumerate(values):
            parts = value if isinstance(value, list) else self.split(value) if self.split else [value]
            sentences += parts
            owners += [owner] * len(parts)
        ids, lengths = self.encode(sentences)
        return self._joined(ids, lengths, np.array(owners, np.int64), len(values))

    def _joined(
        self, ids: NDArray[Any], lengths: NDArray[np.int64], owners: NDArray[np.int64], documents: int
    ) -> Encoded:
        """Sequences without tokens dropped, eod and added special tokens in their places.

        Args:
            owners: document of each sequence, ascending.
        """
        full = lengths > 0
        lengths, owners = lengths[full], owners[full]
        sequences = np.bincount(owners, minlength=documents).astype(np.int64)
        ends_document = np.zeros(len(lengths), np.bool_)
        if self.eod is not None and len(owners):
            ends_document[:-1] = owners[1:] != owners[:-1]
            ends_document[-1] = True
        prefix, suffix = self.added.prefix, self.added.suffix
        longer = lengths + len(prefix) + len(suffix) + ends_document
        out, ends = np.empty(int(longer.sum()), self.dtype), np.cumsum(longer)
        text = np.ones(len(out), np.bool_)
        places = [(ends - longer + at, token) for at, token in enumerate(prefix)]
        places += [(ends - ends_document - len(suffix) + at, token) for at, token in enumerate(suffix)]
        if self.eod is not None:
            places.append(((ends - 1)[ends_document], self.eod))
        for at, token in places:
            out[at], text[at] = token, False
        out[text] = ids
        return Encoded(out, longer.astype(np.int32), sequences)

    def _set_apart(self, rows: Rows) -> None:
        """Move rows that have no ids to the faults."""
        kept_numbers, kept_texts = list[int](), list[tuple[Text, ...]]()
        for number, texts in zip(rows.numbers, rows.texts, strict=True):
            try:
                for text in texts:
                    self.encode([text] if isinstance(text, str) else text)
            except RequestError as error:
                raw = repr(texts)
                rows.faults.append(Fault(number, error.what, str(error.found), str(error.wanted), raw))
            else:
                kept_numbers.append(number)
                kept_texts.append(texts)
        rows.numbers, rows.texts = kept_numbers, kept_texts
        rows.faults.sort(key=lambda fault: fault.row)


def ids_of(texts: Sequence[str], work: Encoder) -> Flat:
    """Encode texts as the work does; a question for the process that holds it (`Started.ask`).

    It is here, and not with its caller, because a question is unpickled there: what its module imports, that
    process imports while everybody waits for the answer.
    """
    return work.encode(texts)
