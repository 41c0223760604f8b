"""Samples of constant length from the stream of a dataset's documents, in exactly Megatron's order.

The documents are repeated for as many epochs as the run needs and shuffled into one stream; sample r is the
tokens from r · length on (one more than `length`, so that inputs and targets are both that long); samples are
read in a shuffled order. One generator makes all the draws, so the same seed gives the same three arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mega_schema.dataset.indexed_dataset import IndexedDataset, Piece
from mega_schema.errors import ConfigError

# a mostly unneeded last epoch is shuffled separately, so that its samples do not displace earlier ones
SEPARATE_BELOW = 0.80


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """The position of every sample in the stream of documents.

    Attributes:
        document: (documents · epochs,) int32: the stream, as sequence numbers of the dataset.
        sample: (samples + 1, 2) int64: the start of each sample: index into `document`, token in that
            document.
        shuffle: (samples,) uint32, or int64 if there are too many: the order in which samples are read.
        epochs: passes over the dataset.
    """

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray
    epochs: int

    def __len__(self) -> int:
        return len(self.shuffle)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Passes over some sequences, and the samples they give.

    Attributes:
        length: tokens of a sample.
        extra: tokens a sample has beyond `length`: 1, or 0 when targets are the inputs rolled.
        tokens: of one epoch.
        epochs: their number.
        first: samples of all epochs but the last, where the last is shuffled by itself; else None.
        count: samples in all.
    """

    length: int
    extra: int
    tokens: int
    epochs: int
    first: int | None
    count: int


def plan_epochs(
    tokens: int,
    *,
    length: int,
    samples: int | None,
    extra: int = 1,
    keep_partial: bool = False,
    separate_below: float = SEPARATE_BELOW,
) -> EpochPlan | None:
    """Plan as many passes over `tokens` tokens as `samples` need; None if they do not fill a sample.

    Args:
        samples: how many are wanted; None means one epoch's.
        keep_partial: keep a last sample that is short (for validation).
        separate_below: fraction of the last epoch that must be needed for it to be shuffled with the others.
    """
    per_epoch = (tokens - extra) // length
    if tokens <= extra or (per_epoch < 1 and samples is None and not keep_partial):
        return None
    epochs = 1 if samples is None else max(1, -(-(samples * length + extra) // tokens))
    first = ((epochs - 1) * tokens - extra) // length
    separate = samples is not None and epochs > 1 and samples - first < int(separate_below * per_epoch)
    total = epochs * tokens - extra
    # Megatron rounds up in C's float32; so do we, for the same count
    count = int(np.ceil(np.float32(total) / np.float32(length))) if keep_partial else total // length
    return EpochPlan(length, extra, tokens, epochs, first if separate else None, count)


def not_enough_tokens_error(found: str, wanted: int, flag: str, split_name: str) -> ConfigError:
    """Build the error of a split without a sample."""
    return ConfigError(
        flag,
        f"{split_name} contains too few tokens for one sample",
        found=found,
        wanted=f"at least {wanted}",
        hint="a shorter --seq-length, another --split or more data; for validation also --eval-iters 0",
    )


def build_sample_index(
    lengths: np.ndarray, sequences: np.ndarray, epoch_plan: EpochPlan, seed: int
) -> SampleIndex:
    """Build the three arrays as Megatron core does.

    Args:
        lengths: tokens of every sequence of the dataset.
        sequences: int32 numbers of the sequences to use.
    """
    rng = np.random.RandomState(seed)
    parts = (epoch_plan.epochs,) if epoch_plan.first is None else (epoch_plan.epochs - 1, 1)
    document = np.concatenate([_shuffle(np.tile(sequences, times), rng) for times in parts])
    sample = _sample_starts(lengths, document, epoch_plan.length, epoch_plan.count, epoch_plan.extra)
    bounds = (0, epoch_plan.count) if epoch_plan.first is None else (0, epoch_plan.first, epoch_plan.count)
    shuffle = np.concatenate(
        [
            _shuffle(np.arange(a, b, dtype=shuffle_dtype(epoch_plan.count)), rng)
            for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ]
    )
    return SampleIndex(document, sample, shuffle, epoch_plan.epochs)


def shuffle_dtype(count: int) -> np.dtype[Any]:
    """Choose the dtype of the shuffled sample numbers."""
    return np.dtype(np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64)


def _shuffle(numbers: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    rng.shuffle(numbers)
    return numbers


def _sample_starts(
    lengths: np.ndarray, document: np.ndarray, length: int, count: int, extra: int
) -> np.ndarray:
    """Compute the (document, token) at which each sample begins, one row per sample.

    Megatron walks document by document. The same rows follow from where each document of the stream ends:
    sample r begins in the document that holds token r · length of the stream (with `extra` 0, just behind the
    one that holds the token before).
    """
    ends = np.cumsum(lengths[document], dtype=np.int64)
    last_read = np.arange(1, count + 1, dtype=np.int64) * length - (1 - extra)
    complete = int(np.searchsorted(last_read, ends[-1]))  # a short last sample ends with the stream
    positions = np.searchsorted(ends, last_read[:complete], side="right")
    document_starts = ends[positions] - lengths[document[positions]]
    rows = np.zeros((count + 1, 2), np.int64)
    rows[1 : complete + 1, 0], rows[1 : complete + 1, 1] = (
        positions,
        last_read[:complete] - document_starts + (1 - extra),
    )
    rows[complete + 1 :] = len(document) - 1, lengths[document[-1]] - extra
    return rows


class GPTDataset:
    """Samples of a dataset in the order of their index."""

    def __init__(
        self, dataset: IndexedDataset, index: SampleIndex, *, extra: int = 1, copy: bool = False
    ) -> None:
        """Read samples of a dataset in the order of an index.

        Args:
            copy: read the dataset's file instead of mapping it.
        """
        self.dataset = dataset
        self.index = index
        self.extra = extra
        self.copy = copy

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> np.ndarray:
        """Return the tokens of the i-th sample: (length + extra,) int64; fewer in a partial last sample."""
        parts = [self.dataset.read(*piece, copy=self.copy) for piece in self.pieces(i)]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int64)

    def pieces(self, i: int) -> list[Piece]:
        """Return the pieces of sequences that make the i-th sample."""
        row = int(self.index.shuffle[i])
        (first, begin), (last, end) = self.index.sample[row : row + 2].tolist()
        document = self.index.document[first : last + 1].tolist()
        if first == last:
            return [(document[0], begin, end - begin + self.extra)]
        middle = [(sequence, 0, None) for sequence in document[1:-1]]
        return [(document[0], begin, None), *middle, (document[-1], 0, end + self.extra)]
