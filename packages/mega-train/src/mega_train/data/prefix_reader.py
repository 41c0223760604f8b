"""Samples of prefix language models: each document of a sample gets a prefix of random length.

The draws are a function of the seed and the sample's number, so every layout and a resumed run have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mega_train.data.sft import EXAMPLE, LEARNT, POSITION, TOKEN

Ints = NDArray[np.int64]
PREFIX = 4  # the row after those of `data.sft`: 1 for tokens of a prefix


class CausalSamples(Protocol):
    """The samples to which prefixes are added: (length + 1,) tokens, or (4, length + 1) of `data.sft`."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Ints: ...

    def prefetch(self, numbers: Iterable[int]) -> None: ...

    def dataset_prefix(self, i: int) -> Path: ...


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """The rule by which a sample gets its prefixes (BigScience's pretrain_prefix_lm.py).

    Attributes:
        seed: of the run; sample i draws from a generator of the seed `seed + i`.
        eod: the end-of-document token; None if nothing needs it.
        per_document: whether each document has a prefix and sees only itself; else a sample is one document.
        resets_positions: whether positions count from the start of a document.
        masks_eod: whether an input that is an end-of-document token has no loss.
        targets_only: whether targets within a prefix have no loss.
    """

    seed: int
    eod: int | None = None
    per_document: bool = False
    resets_positions: bool = False
    masks_eod: bool = False
    targets_only: bool = False

    def add_prefixes(self, token_S1: Ints, number: int) -> Ints:
        """Return (5, S + 1): the rows of `data.sft`, and 1 for tokens of a prefix.

        A prefix has at least one token. It may be a whole document, but does not contain the end-of-document
        token; of a document that is only this token, it does. The last token of a prefix predicts the first
        after it, so with `targets_only` it has a loss.

        Args:
            token_S1: the tokens of sample `number`. The last is only a target.
        """
        tokens = len(token_S1) - 1
        rng = np.random.RandomState((self.seed + number) % 2**32)
        is_end = np.zeros(tokens, np.bool_) if self.eod is None else token_S1[:tokens] == self.eod
        row = np.zeros((5, tokens + 1), np.int64)
        row[TOKEN] = token_S1
        row[POSITION] = np.arange(tokens + 1)
        row[LEARNT] = 1
        begins = [0, *(np.flatnonzero(is_end[:-1]) + 1).tolist()]
        if self.resets_positions:
            for begin in begins:
                row[POSITION, begin:] = np.arange(tokens + 1 - begin)
        if self.masks_eod:
            row[LEARNT, 1:][is_end] = 0
        if not self.per_document:
            begins = [0]
        for document, (begin, end) in enumerate(zip(begins, [*begins[1:], tokens], strict=True)):
            ends_here = self.per_document and bool(is_end[end - 1])
            middle = begin + rng.randint(1, max(1, end - begin - ends_here) + 1)
            row[EXAMPLE, begin:] = document
            row[PREFIX, begin:middle] = 1
            if self.targets_only:
                row[LEARNT, begin + 1 : middle] = 0
        return row


def add_prompt_prefixes(row_4S1: Ints, number: int) -> Ints:
    """Return (5, S + 1): the rows of `data.sft`, where the prefix of an example is its prompt.

    Of a conversation it is the text before the first turn of the assistant.

    Args:
        number: of the sample; nothing depends on it.
    """
    learnt = np.cumsum(row_4S1[LEARNT])
    begins = np.flatnonzero(np.diff(row_4S1[EXAMPLE], prepend=-1))
    before = (learnt - row_4S1[LEARNT])[begins]  # targets before each example
    prefix = learnt == np.repeat(before, np.diff(begins, append=len(learnt)))
    return np.concatenate((row_4S1, prefix[None].astype(np.int64)))


class PrefixReader:
    """Random access to the samples of a split with their prefixes: (5, length + 1) int64."""

    def __init__(self, samples: CausalSamples, build_row: Callable[[Ints, int], Ints]) -> None:
        """Read samples through a function.

        Args:
            build_row: builds the rows of a sample from the sample and its number.
        """
        self.samples = samples
        self.build_row = build_row

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Ints:
        return self.build_row(self.samples[i], i)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to read samples of remote datasets."""
        self.samples.prefetch(numbers)

    def dataset_prefix(self, i: int) -> Path:
        """Return the prefix of the path of sample `i`'s dataset."""
        return self.samples.dataset_prefix(i)
