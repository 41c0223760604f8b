"""Samples for BERT: two segments of consecutive sentences, in order or swapped, with masked tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_schema.dataset.indexed_dataset import IndexedDataset, Piece
from mega_train.config.encoder_data import SampleRule
from mega_train.data.encoder.ngram_masker import MaskedTokens, NgramMasker
from mega_train.data.encoder.vocabulary import MaskingVocabulary

Ints = NDArray[np.int64]
Sample = dict[str, Ints]

SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
IGNORED = -1  # label of a token without a loss


@dataclass(frozen=True, slots=True)
class BertRule:
    """The rule by which sentences become a sample of BERT.

    Attributes:
        length: tokens of a sample with padding.
        seed: sample i draws from a generator of the seed `seed + i`.
        has_pairs: two segments, which are swapped in half of the samples; else one.
        sample_rule: "mcore" hides every padding id in the padding mask, also one that replaces a masked
            token, as Megatron core 0.16; "legacy" hides the padding only, as Megatron and core through 0.9.
    """

    length: int
    seed: int
    has_pairs: bool = True
    sample_rule: SampleRule = "mcore"


class BertDataset:
    """Samples of a dataset by their mapping.

    Attributes:
        dataset: one sentence per sequence.
        mapping: (R, 3) first sentence, last + 1 and target length of each sample.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        mapping: NDArray[np.unsignedinteger],
        rule: BertRule,
        masker: NgramMasker,
    ) -> None:
        self.dataset = dataset
        self.mapping = mapping
        self.rule = rule
        self.masker = masker

    def __len__(self) -> int:
        return len(self.mapping)

    def pieces(self, i: int) -> Sequence[Piece]:
        """Return the sentences of sample `i`."""
        first, stop, _ = self.mapping[i].tolist()
        return [(sentence, 0, None) for sentence in range(first, stop)]

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i` in int64 arrays, with Megatron's names.

        `text`, `types` (0 for the first segment and padding, 1 for the second), `labels` (-1 without a loss),
        `loss_mask` and `padding_mask` (1 at real tokens) are (length,); `is_random` (1 if the segments are
        swapped) and `truncated` are scalars.

        Raises:
            FormatError: a token is outside the tokenizer's vocabulary.
        """
        first, stop, target = self.mapping[i].tolist()
        seed = (self.rule.seed + i) % (1 << 32)
        rng = np.random.RandomState(seed)
        sentences = [self.dataset[sentence] for sentence in range(first, stop)]
        pivot, is_swapped = len(sentences), False
        if self.rule.has_pairs:
            pivot = int(rng.randint(1, len(sentences))) if len(sentences) > 2 else 1
            is_swapped = rng.random_sample() < 0.5
        segments = _join(sentences[:pivot]), _join(sentences[pivot:])
        if is_swapped:
            segments = segments[1], segments[0]
        is_truncated = len(segments[0]) + len(segments[1]) > target
        first_segment, second_segment = _truncate(*segments, target, rng)
        tokens = _add_special_tokens(first_segment, second_segment, self.masker.vocabulary)
        self.masker.vocabulary.check_tokens(tokens, self.dataset.prefix)
        masked = self.masker.mask(tokens, target, rng, seed)
        return {
            **self._pad(masked, begin_second=len(first_segment) + 2),
            "is_random": np.array(is_swapped, np.int64),
            "truncated": np.array(is_truncated, np.int64),
        }

    def dataset_prefix(self, i: int) -> Path:
        """Return the prefix of the dataset."""
        return self.dataset.prefix

    def _pad(self, masked: MaskedTokens, begin_second: int) -> Sample:
        length, pad = self.rule.length, self.masker.vocabulary.pad
        count = len(masked.tokens)
        text = np.full(length, pad, np.int64)
        text[:count] = masked.tokens
        types, padding_mask, loss_mask = np.zeros((3, length), np.int64)
        types[begin_second:count] = 1
        padding_mask[:count] = 1
        loss_mask[masked.positions] = 1
        labels = np.full(length, IGNORED, np.int64)
        labels[masked.positions] = masked.labels
        if self.rule.sample_rule == "mcore":
            padding_mask = (text != pad).astype(np.int64)
        return {
            "text": text,
            "types": types,
            "labels": labels,
            "padding_mask": padding_mask,
            "loss_mask": loss_mask,
        }


def _join(sentences: list[NDArray[np.integer]]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *sentences])


def _truncate(first: Ints, second: Ints, target: int, rng: np.random.RandomState) -> tuple[Ints, Ints]:
    """Remove tokens of the longer segment, each at a random end, until both have `target` together."""
    bounds = [[0, len(first)], [0, len(second)]]
    surplus = max(0, len(first) + len(second) - target)
    for removes_first_token in (rng.random_sample(surplus) < 0.5).tolist():
        lengths = [end - begin for begin, end in bounds]
        longer = bounds[0] if lengths[0] > lengths[1] else bounds[1]
        if removes_first_token:
            longer[0] += 1
        else:
            longer[1] -= 1
    return first[slice(*bounds[0])], second[slice(*bounds[1])]


def _add_special_tokens(first: Ints, second: Ints, vocabulary: MaskingVocabulary) -> Ints:
    """Return [CLS] first [SEP] second [SEP]; without a second segment, [CLS] first [SEP]."""
    sep = [vocabulary.sep]
    parts = [[vocabulary.cls], first, sep, second, sep] if len(second) else [[vocabulary.cls], first, sep]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])
