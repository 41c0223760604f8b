"""Prompts with their answers, packed into rows: what supervised fine-tuning reads.

`mega-data preprocess --json-keys prompt answer` writes a dataset of each key, whose documents stand in the
order of the lines. An example is a prompt, its answer and the token that ends a document. Whole examples lie
in a row one after another, as many as there is room for; they do not see each other, each begins at position
0, and only tokens of answers are learnt.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, sibling
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.identity import TokenizerIdentity
from mega_train.config import Data

Ints = NDArray[np.int64]
# what a row says of each of its places, in this order; an example's number counts from 0 in its row
TOKEN, EXAMPLE, POSITION, LEARNT = range(4)


class Pairs:
    """Two datasets, the one's documents the prompts and the other's their answers.

    Attributes:
        prefix: of the prompts' dataset.
    """

    def __init__(self, prefix: Path, keys: tuple[str, str]) -> None:
        """Open `PREFIX_KEY_document` of both keys.

        Raises:
            FormatError: a dataset is not there or damaged, or they do not belong together.
        """
        self.prompts, self.answers = (IndexedDataset(sibling(prefix, f"_{key}_document")) for key in keys)
        self.prefix = self.prompts.prefix
        counts = [len(part.documents) - 1 for part in (self.prompts, self.answers)]
        if counts[0] != counts[1]:
            raise FormatError(
                self.answers.prefix,
                "has not an answer for each prompt",
                found=f"{counts[1]} documents",
                wanted=f"{counts[0]}, as {self.prefix.name} has",
                hint=f"mega-data preprocess --json-keys {keys[0]} {keys[1]}, both at once",
            )
        ours, theirs = self.prompts.info, self.answers.info
        if ours is not None and theirs is not None:
            made = [info.tokenizer for info in (theirs, ours)]
            if made[0].sha256 != made[1].sha256:
                found, wanted = (f"{each.type}, sha256 {each.sha256[:12]}" for each in made)
                raise FormatError(
                    self.answers.prefix, "is tokenized otherwise than the prompts", found=found, wanted=wanted
                )

    @classmethod
    def open(cls, data: Data) -> Pairs:
        """The pair that a run's flags name.

        Raises:
            ConfigError: they name none, or more than one.
            FormatError: as above.
        """
        if data.by_use or data.path_file is not None or len(data.path) != 1:
            found = " ".join(data.path) or "none"
            raise ConfigError(
                "--sft", "reads one pair of datasets", found=found, wanted="one prefix", hint="--data-path P"
            )
        return cls(Path(data.path[0]), data.sft_keys)

    @property
    def info(self) -> DatasetInfo | None:
        return self.prompts.info

    @property
    def identity(self) -> TokenizerIdentity | None:
        """Of the tokenizer that made them, where they say which."""
        return None if self.info is None else self.info.tokenizer

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer's files, where it lies beside the prompts."""
        folder = sibling(self.prefix, ".tokenizer")
        return folder if folder.is_dir() else None

    def __len__(self) -> int:
        return len(self.prompts.documents) - 1

    @property
    def eod(self) -> int:
        """The token that ends an example."""
        assert self.info is not None
        assert self.info.tokenizer.eod is not None, "resolve asks for one"
        return self.info.tokenizer.eod

    @cached_property
    def lengths(self) -> tuple[Ints, Ints]:
        """(N,) tokens of every prompt, and of every answer with its end."""
        prompt = _lengths(self.prompts) - self._ended(self.prompts)
        return prompt, _lengths(self.answers) - self._ended(self.answers) - self._begun + 1

    def read(self, i: int) -> tuple[Ints, int]:
        """Tokens of an example, and how many of them are its prompt."""
        prompts, answers = self.lengths
        prompt = _document(self.prompts, i)[: prompts[i]]
        answer = _document(self.answers, i)
        begin = int(self._begun[i])
        answer = answer[begin : begin + answers[i] - 1]
        return np.concatenate([prompt, answer, [self.eod]]).astype(np.int64), len(prompt)

    def _ended(self, part: IndexedDataset) -> Ints:
        """(N,) 1 where a document's last token is the one that ends it: --append-eod wrote it."""
        return _at(part, part.documents[1:] - 1, last=True, token=self.eod)

    @cached_property
    def _begun(self) -> Ints:
        """(N,) 1 where an answer begins with the token that begins a text, though a prompt is before it."""
        assert self.info is not None
        bos, part = self.info.tokenizer.bos, self.answers
        if bos is None:
            return np.zeros(len(self), np.int64)
        some = (_lengths(part) > self._ended(part)) & (_lengths(self.prompts) > self._ended(self.prompts))
        return _at(part, part.documents[:-1], last=False, token=bos) * some


class Packs:
    """Rows of `length` + 1 tokens in the order they are read: examples shuffled, epoch by epoch.

    A longer run has the same rows first.

    Attributes:
        left_out: examples that are longer than a row.
    """

    def __init__(
        self, pairs: Pairs, part: tuple[int, int], *, length: int, rows: int, seed: int, name: str
    ) -> None:
        """
        Args:
            part: first and last-plus-one example to read.
            rows: how many are wanted at least.
            name: what an error calls the examples.

        Raises:
            ConfigError: there is no example that fits a row.
        """
        self.pairs, self.length = pairs, length
        lengths = sum(pairs.lengths)[part[0] : part[1]]  # type: ignore[index]
        fits = np.flatnonzero(lengths <= length + 1) + part[0]
        if not len(fits):
            raise ConfigError(
                "--data-path",
                f"no example of {name} fits a sample",
                found=f"{len(lengths)} examples of {lengths.min()} tokens or more"
                if len(lengths)
                else "none",
                wanted=f"at most --seq-length + 1 = {length + 1}",
                hint="a longer --seq-length, or another --split",
            )
        self.left_out = len(lengths) - len(fits)
        rng = np.random.RandomState(seed)
        orders, ends, count = list[Ints](), list[Ints](), 0
        while count < rows:
            order = rng.permutation(fits)
            last = _packed(lengths[order - part[0]], length + 1)
            ends.append(last + sum(map(len, orders)))
            orders.append(order)
            count += len(last)
        self.order, self.ends = np.concatenate(orders), np.concatenate(ends)

    def __len__(self) -> int:
        return len(self.ends)

    def corpus(self, i: int) -> Path:
        """Prefix of the prompts."""
        return self.pairs.prefix

    def __getitem__(self, i: int) -> Ints:
        """(4, length + 1): token, example, position and whether it is learnt, of every place of the i-th row.

        A token is learnt if it is an answer's and has one before it in its example.
        """
        row = np.zeros((4, self.length + 1), np.int64)
        row[TOKEN] = self.pairs.eod
        place, begin = 0, int(self.ends[i - 1]) if i else 0
        for number, example in enumerate(self.order[begin : self.ends[i]]):
            ids, prompt = self.pairs.read(int(example))
            past = place + len(ids)
            row[TOKEN, place:past], row[EXAMPLE, place:past] = ids, number
            row[POSITION, place:past] = np.arange(len(ids))
            row[LEARNT, place + max(prompt, 1) : past] = 1
            place = past
        row[EXAMPLE, place:] = row[EXAMPLE, place - 1] + 1
        row[POSITION, place:] = np.arange(self.length + 1 - place)
        return row


def _packed(lengths: Ints, room: int) -> Ints:
    """Where each row ends, when whole examples of these lengths go into rows with so much room, in turn."""
    total, ends, begun = np.cumsum(lengths), list[int](), 0
    while not ends or ends[-1] < len(lengths):
        ends.append(int(np.searchsorted(total, begun + room, "right")))
        begun = int(total[ends[-1] - 1])
    return np.array(ends, np.int64)


def _document(part: IndexedDataset, i: int) -> NDArray[Any]:
    first, past = part.documents[i], part.documents[i + 1]
    return np.concatenate([part[sequence] for sequence in range(first, past)] or [np.empty(0, part.dtype)])


def _lengths(part: IndexedDataset) -> Ints:
    """(D,) tokens of each document."""
    before = np.concatenate([[0], np.cumsum(part.lengths, dtype=np.int64)])
    return before[part.documents[1:]] - before[part.documents[:-1]]


def _at(part: IndexedDataset, sequence: Ints, *, last: bool, token: int) -> Ints:
    """(D,) 1 where the first or last token of these sequences is `token`, of documents that have any."""
    found = np.zeros(len(sequence), np.int64)
    full = np.flatnonzero(part.documents[1:] > part.documents[:-1])
    these = sequence[full]
    places = part.pointers[these] // part.dtype.itemsize + (part.lengths[these] - 1 if last else 0)
    ids = part.view_range(0, part.tokens)
    found[full] = ids[places] == token
    return found
