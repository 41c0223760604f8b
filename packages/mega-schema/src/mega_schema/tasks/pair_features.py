"""Make BERT's inputs of texts and pairs of texts, as Megatron's tasks do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mega_schema.errors import ConfigError
from mega_schema.tasks.pair_examples import PairExample
from mega_schema.tasks.race_examples import LabelledExample
from mega_schema.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]
IGNORED = -100  # label of an example or a token without a loss
# rows of a sample: token ids, token types, 1 at real tokens, and labels, which depend on the head
TOKEN, TYPE, REAL, LABEL = range(4)
QUESTION_TOKENS = 128  # of a question with an option, Megatron's --max-qa-length
_BATCH = 4096  # examples that are encoded at a time


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of BERT's special tokens."""

    cls: int
    sep: int
    pad: int

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """Look up the tokens.

        Raises:
            ConfigError: the tokenizer lacks one.
        """
        identity = tokenizer.identity
        ids = {piece: i for i, piece in enumerate(tokenizer.pieces(range(identity.vocab_size))) if piece}
        missing = [name for name in ("[CLS]", "[SEP]", "[PAD]") if name not in ids]
        if missing:
            raise ConfigError(
                "--tokenizer-type",
                f"has no {' and no '.join(missing)}",
                found=identity.type,
                wanted="a tokenizer of BERT",
            )
        return cls(ids["[CLS]"], ids["[SEP]"], ids["[PAD]"])


class EncodedExamples:
    """The samples of examples, (4, rows x length) each; of choices, a row for each.

    Ids are kept without padding: a sample is built when it is read.

    Attributes:
        examples: what the samples are made of.
        rows: of a sample.
        length: tokens of a row.
        token_counts: (N,) tokens of each sample's longest row, without padding.
    """

    def __init__(
        self,
        examples: Sequence[LabelledExample],
        tokenizer: Tokenizer,
        special: SpecialIds,
        length: int,
        labels: Sequence[str],
    ) -> None:
        """Encode examples of one kind.

        Raises:
            ConfigError: `length` has no place for a token between the special ones.
        """
        check_length(length)
        self.examples = examples
        self.length = length
        self.rows = 1 if isinstance(examples[0], PairExample) else len(examples[0].choices)
        self._pad = special.pad
        self._ids = list[NDArray[np.int32]]()  # of every row
        self._first_tokens = list[int]()  # of every row, tokens of type 0
        numbers = {label: number for number, label in enumerate(labels)}
        self._labels = [IGNORED if e.label is None else numbers[e.label] for e in examples]
        first_limit = length if self.rows == 1 else QUESTION_TOKENS
        pairs = [pair for example in examples for pair in _list_pairs(example)]
        for begin in range(0, len(pairs), _BATCH):
            batch = pairs[begin : begin + _BATCH]
            firsts = tokenizer.encode_batch([first for first, _ in batch])
            seconds = tokenizer.encode_batch([second or "" for _, second in batch])
            for (_, second), first_ids, second_ids in zip(batch, firsts, seconds, strict=True):
                has_pair = second is not None
                ids, types = join_pair(
                    first_ids[:first_limit], second_ids if has_pair else None, special, length
                )
                self._ids.append(np.array(ids, np.int32))
                self._first_tokens.append(types.count(0))
        lengths = np.array([len(ids) for ids in self._ids]).reshape(len(examples), self.rows)
        self.token_counts: Ints = lengths.max(1)
        self.total_tokens = int(lengths.sum())

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, i: int) -> Ints:
        """Return sample `i`: rows of ids, types, real tokens, and the label in column 0."""
        sample = np.zeros((4, self.rows, self.length), np.int64)
        sample[TOKEN] = self._pad
        sample[LABEL] = IGNORED
        for row in range(self.rows):
            ids = self._ids[i * self.rows + row]
            sample[TOKEN, row, : len(ids)] = ids
            sample[TYPE, row, self._first_tokens[i * self.rows + row] : len(ids)] = 1
            sample[REAL, row, : len(ids)] = 1
        sample[LABEL, 0, 0] = self._labels[i]
        return sample.reshape(4, -1)

    def filler(self) -> Ints:
        """Return a sample without a label, all of whose tokens are real."""
        sample = self[0]
        sample[LABEL] = IGNORED
        sample[REAL] = 1
        return sample


def split_rows(samples: Ints, rows: int) -> Ints:
    """Return the rows (N x rows, 4, length) of samples, such as those of each choice."""
    count, kinds, width = samples.shape
    return samples.reshape(count, kinds, rows, width // rows).swapaxes(1, 2).reshape(-1, kinds, width // rows)


def _list_pairs(example: LabelledExample) -> list[tuple[str, str | None]]:
    """Return the two texts of every row of an example."""
    if isinstance(example, PairExample):
        return [(example.first, example.second)]
    return [(choice, example.article) for choice in example.choices]


def check_length(length: int) -> None:
    """Check that a sample has a place for text.

    Raises:
        ConfigError: it has none.
    """
    if length < 4:
        raise ConfigError(
            "--seq-length", "too short for [CLS] and two [SEP]", found=length, wanted="4 or more"
        )


def join_pair(
    first: Sequence[int], second: Sequence[int] | None, special: SpecialIds, length: int
) -> tuple[list[int], list[int]]:
    """Return ids and types of [CLS] first [SEP] second [SEP], cut at the end to `length`.

    As in Megatron the second text loses its end, and the first one only if it fills the sample by itself; the
    last [SEP] stays.
    """
    ids = [special.cls, *first, special.sep]
    types = [0] * len(ids)
    if second is not None:
        ids += second
        types += [1] * len(second)
    is_cut = len(ids) >= length
    if is_cut:
        ids, types = ids[: length - 1], types[: length - 1]
    if is_cut or second is not None:
        ids.append(special.sep)
        types.append(0 if second is None else 1)
    return ids, types
