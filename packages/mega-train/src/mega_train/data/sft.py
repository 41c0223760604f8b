"""Supervised fine-tuning data: prompts with their answers, or conversations, packed into rows.

`mega-data preprocess --json-keys prompt answer` writes a dataset of each key, with documents in the order of
the lines. An example is a prompt, its answer and the end-of-document token. `mega-data preprocess-chat`
writes one dataset; an example is a conversation. Rows hold whole examples, as many as fit; examples do not
attend to each other, each starts at position 0, and only tokens of answers and of the assistant's turns have
a loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, sibling
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.identity import TokenizerIdentity
from mega_train.config import DataConfig

Ints = NDArray[np.int64]
# the four values of each position of a row, in this order; examples are numbered from 0 in their row
TOKEN, EXAMPLE, POSITION, LEARNT = range(4)


CHAT_KEY: Final = "chat"  # of the name of a dataset of conversations, and of its options


class SftExamples(ABC):
    """Examples with tokens that have a loss and others that have none.

    Attributes:
        parts: datasets of the examples; the first has the name and the tokenizer.
    """

    parts: tuple[IndexedDataset, ...]

    @property
    def prefix(self) -> Path:
        return self.parts[0].prefix

    @property
    def info(self) -> DatasetInfo | None:
        return self.parts[0].info

    @property
    def identity(self) -> TokenizerIdentity | None:
        """The identity of the tokenizer; None if the datasets do not record it."""
        return None if self.info is None else self.info.tokenizer

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer's files; None if there is none."""
        folder = sibling(self.prefix, ".tokenizer")
        return folder if folder.is_dir() else None

    def __len__(self) -> int:
        return len(self.parts[0].documents) - 1

    @property
    def eod(self) -> int:
        """The token that ends an example of prompt and answer, and fills a row."""
        assert self.info is not None
        assert self.info.tokenizer.eod is not None, "resolve asks for one"
        return self.info.tokenizer.eod

    @property
    @abstractmethod
    def example_lengths(self) -> Ints:
        """Lengths (N,) in tokens of every example."""

    @abstractmethod
    def read_example(self, i: int) -> tuple[Ints, Ints]:
        """Return the tokens of an example, and 1 for each that has a loss; both (length,)."""


class PromptResponsePairs(SftExamples):
    """Two datasets: the prompts, and their answers in the same order."""

    def __init__(self, prefix: Path, keys: tuple[str, str]) -> None:
        """Open `PREFIX_KEY_document` of both keys.

        Raises:
            FormatError: a dataset is missing or damaged, or the two do not belong together.
        """
        self.prompts, self.answers = (IndexedDataset(sibling(prefix, f"_{key}_document")) for key in keys)
        self.parts = (self.prompts, self.answers)
        counts = [len(part.documents) - 1 for part in (self.prompts, self.answers)]
        if counts[0] != counts[1]:
            raise FormatError(
                self.answers.prefix,
                "lacks an answer for some prompts",
                found=f"{counts[1]} documents",
                wanted=f"{counts[0]}, as {self.prefix.name} has",
                hint=f"mega-data preprocess --json-keys {keys[0]} {keys[1]}, both at once",
            )
        prompt_info, answer_info = self.prompts.info, self.answers.info
        if prompt_info is not None and answer_info is not None:
            identities = [info.tokenizer for info in (answer_info, prompt_info)]
            if identities[0].sha256 != identities[1].sha256:
                found, wanted = (f"{identity.type}, sha256 {identity.sha256[:12]}" for identity in identities)
                raise FormatError(
                    self.answers.prefix,
                    "is tokenized differently from the prompts",
                    found=found,
                    wanted=wanted,
                )

    @cached_property
    def lengths(self) -> tuple[Ints, Ints]:
        """Lengths (N,) in tokens of every prompt, and of every answer with its end-of-document token."""
        prompt = _document_lengths(self.prompts) - self._has_eod(self.prompts)
        return prompt, _document_lengths(self.answers) - self._has_eod(self.answers) - self._has_bos + 1

    @property
    def example_lengths(self) -> Ints:
        prompts, answers = self.lengths
        return prompts + answers

    def read_example(self, i: int) -> tuple[Ints, Ints]:
        ids, prompt = self.read(i)
        return ids, (np.arange(len(ids)) >= prompt).astype(np.int64)

    def read(self, i: int) -> tuple[Ints, int]:
        """Return the tokens of an example, and the length of its prompt."""
        prompts, answers = self.lengths
        prompt = _document_tokens(self.prompts, i)[: prompts[i]]
        answer = _document_tokens(self.answers, i)
        begin = int(self._has_bos[i])
        answer = answer[begin : begin + answers[i] - 1]
        return np.concatenate([prompt, answer, [self.eod]]).astype(np.int64), len(prompt)

    def _has_eod(self, part: IndexedDataset) -> Ints:
        """Return (N,) 1 where a document ends with the end-of-document token, which --append-eod wrote."""
        return _has_token(part, part.documents[1:] - 1, last=True, token=self.eod)

    @cached_property
    def _has_bos(self) -> Ints:
        """Return (N,) 1 where an answer begins with the begin-of-text token although a prompt precedes it."""
        assert self.info is not None
        bos = self.info.tokenizer.bos
        part = self.answers
        if bos is None:
            return np.zeros(len(self), np.int64)
        is_nonempty = (_document_lengths(part) > self._has_eod(part)) & (
            _document_lengths(self.prompts) > self._has_eod(self.prompts)
        )
        return _has_token(part, part.documents[:-1], last=False, token=bos) * is_nonempty


class ChatExamples(SftExamples):
    """A dataset of conversations, whose sequences alternate between context and turns of the assistant."""

    def __init__(self, prefix: Path) -> None:
        """Open `PREFIX_chat_document`.

        Raises:
            FormatError: the dataset is missing or damaged, or not of conversations.
        """
        self.chats = IndexedDataset(sibling(prefix, f"_{CHAT_KEY}_document"))
        self.parts = (self.chats,)
        if self.info is None or CHAT_KEY not in self.info.options:
            path = sibling(self.prefix, ".json")
            wanted, hint = "a dataset of conversations", "mega-data preprocess-chat"
            raise FormatError(path, f"has no option {CHAT_KEY!r}", wanted=wanted, hint=hint)

    @cached_property
    def example_lengths(self) -> Ints:
        return _document_lengths(self.chats)

    def read_example(self, i: int) -> tuple[Ints, Ints]:
        first, stop = int(self.chats.documents[i]), int(self.chats.documents[i + 1])
        lengths = self.chats.lengths[first:stop]
        is_turn = np.arange(stop - first) % 2
        return _document_tokens(self.chats, i).astype(np.int64), np.repeat(is_turn, lengths)


def open_examples(data: DataConfig) -> SftExamples:
    """Open the prompts and answers, or the conversations, that a run's flags name.

    Raises:
        ConfigError: the flags name no examples, or several datasets of them.
        FormatError: a dataset is missing or damaged, or two do not belong together.
    """
    if data.has_dataset_per_split or data.path_file is not None or len(data.path) != 1:
        found = " ".join(data.path) or "none"
        raise ConfigError(
            "--sft", "reads one pair of datasets", found=found, wanted="one prefix", hint="--data-path P"
        )
    prefix = Path(data.path[0])
    if not sibling(prefix, f"_{CHAT_KEY}_document.idx").exists():
        return PromptResponsePairs(prefix, data.sft_keys)
    if sibling(prefix, f"_{data.sft_keys[0]}_document.idx").exists():
        found = f"{prefix}_{CHAT_KEY}_document and {prefix}_{data.sft_keys[0]}_document"
        raise ConfigError("--data-path", "names conversations and prompts", found=found, wanted="one of them")
    return ChatExamples(prefix)


class PackedSftDataset:
    """Packed rows of `length` + 1 tokens; examples are shuffled in each epoch.

    A longer run has the same rows first.

    Attributes:
        too_long: examples that are longer than a row.
    """

    def __init__(
        self,
        pairs: SftExamples,
        example_range: tuple[int, int],
        *,
        length: int,
        rows: int,
        seed: int,
        name: str,
    ) -> None:
        """Pack the examples into rows.

        Args:
            example_range: first and last-plus-one example to read.
            rows: minimum number of rows.
            name: name of the examples in an error.

        Raises:
            ConfigError: there is no example that fits a row.
        """
        self.pairs = pairs
        self.length = length
        lengths = pairs.example_lengths[example_range[0] : example_range[1]]
        fits = np.flatnonzero(lengths <= length + 1) + example_range[0]
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
        self.too_long = len(lengths) - len(fits)
        rng = np.random.RandomState(seed)
        orders = list[Ints]()
        ends = list[Ints]()
        count = 0
        while count < rows:
            order = rng.permutation(fits)
            row_ends = _row_ends(lengths[order - example_range[0]], length + 1)
            ends.append(row_ends + sum(map(len, orders)))
            orders.append(order)
            count += len(row_ends)
        self.order = np.concatenate(orders)
        self.ends = np.concatenate(ends)

    def __len__(self) -> int:
        return len(self.ends)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Do nothing: prompts and answers are on this machine."""

    def dataset_prefix(self, i: int) -> Path:
        """Return the prefix of the examples."""
        return self.pairs.prefix

    def __getitem__(self, i: int) -> Ints:
        """Return row `i`, (4, length + 1): tokens, example numbers, positions and loss mask.

        The loss mask is 1 for tokens with a loss that are not the first of their example.
        """
        row = np.zeros((4, self.length + 1), np.int64)
        row[TOKEN] = self.pairs.eod
        position = 0
        begin = int(self.ends[i - 1]) if i else 0
        for number, example in enumerate(self.order[begin : self.ends[i]]):
            ids, learnt = self.pairs.read_example(int(example))
            end = position + len(ids)
            row[TOKEN, position:end], row[EXAMPLE, position:end] = ids, number
            row[POSITION, position:end] = np.arange(len(ids))
            row[LEARNT, position + 1 : end] = learnt[1:]
            position = end
        row[EXAMPLE, position:] = row[EXAMPLE, position - 1] + 1
        row[POSITION, position:] = np.arange(self.length + 1 - position)
        return row


def _row_ends(lengths: Ints, row_tokens: int) -> Ints:
    """Compute where each row ends when whole examples of these lengths fill rows of `row_tokens`."""
    total = np.cumsum(lengths)
    ends = list[int]()
    row_start = 0
    while not ends or ends[-1] < len(lengths):
        ends.append(int(np.searchsorted(total, row_start + row_tokens, "right")))
        row_start = int(total[ends[-1] - 1])
    return np.array(ends, np.int64)


def _document_tokens(part: IndexedDataset, i: int) -> NDArray[Any]:
    """Return the tokens of document `i`."""
    first, stop = part.documents[i], part.documents[i + 1]
    return np.concatenate([part[sequence] for sequence in range(first, stop)] or [np.empty(0, part.dtype)])


def _document_lengths(part: IndexedDataset) -> Ints:
    """Return (D,) tokens of each document."""
    before = np.concatenate([[0], np.cumsum(part.lengths, dtype=np.int64)])
    return before[part.documents[1:]] - before[part.documents[:-1]]


def _has_token(part: IndexedDataset, sequence: Ints, *, last: bool, token: int) -> Ints:
    """Return (D,) 1 where the first or last token of these sequences is `token`; 0 for empty documents."""
    matches = np.zeros(len(sequence), np.int64)
    nonempty = np.flatnonzero(part.documents[1:] > part.documents[:-1])
    last_or_first = sequence[nonempty]
    positions = part.pointers[last_or_first] // part.dtype.itemsize + (
        part.lengths[last_or_first] - 1 if last else 0
    )
    ids = part.view_range(0, part.tokens)
    matches[nonempty] = ids[positions] == token
    return matches
