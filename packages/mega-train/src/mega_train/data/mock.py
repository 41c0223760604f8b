"""Megatron's mock data: counting documents, to measure speed or to try a layout without a dataset.

Lengths, tokens and split are those of its MockGPTDataset (megatron-core 0.16), number for number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError

MOCK_PREFIX = Path("mock-data")
_SEED = 0
_DOCUMENTS = 100_000
_LONGEST = 4096  # tokens; a document has fewer


class MockDataset(IndexedDataset):
    """Documents computed when they are read; nothing is on disk.

    Document i holds 1, 2, 3, ... modulo the vocabulary, and ends with the end-of-document token.
    """

    def __init__(self, vocab: int, eod: int) -> None:
        """Compute the lengths of the documents.

        Args:
            vocab: ids of the tokenizer.
            eod: the id that ends a document.

        Raises:
            ConfigError: there are no ids.
        """
        if vocab < 1:
            raise ConfigError("--vocab-size", "not a count", found=vocab, wanted="1 or more")
        self.prefix = MOCK_PREFIX
        self.remote = None
        self.index_format = "mock"
        self.shift = 0
        self.modes = None
        self.info = None
        self.vocab = vocab
        self.eod = eod
        self.dtype = np.dtype(np.int64)
        generator = np.random.default_rng(seed=_SEED)
        self.lengths = generator.integers(low=1, high=_LONGEST, size=_DOCUMENTS, dtype=np.int32)
        offsets = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.pointers = offsets * self.dtype.itemsize
        self.documents = np.arange(_DOCUMENTS + 1, dtype=np.int64)
        self.tokens = int(self.lengths.sum(dtype=np.int64))

    def __reduce__(self) -> tuple[object, ...]:
        return MockDataset, (self.vocab, self.eod)

    def read(self, i: int, offset: int = 0, length: int | None = None, *, copy: bool = False) -> NDArray[Any]:
        """Read `length` tokens of document `i` from `offset`; None: to its end."""
        document_length = int(self.lengths[i])
        length = document_length - offset if length is None else length
        if not 0 <= offset <= offset + length <= document_length:
            raise IndexError(
                f"tokens {offset} to {offset + length} of document {i}, which has {document_length}"
            )
        tokens = np.arange(offset + 1, offset + length + 1, dtype=np.int64) % self.vocab
        if offset + length == document_length and length:
            tokens[-1] = self.eod
        return tokens
