"""The samples of BERT as arrays with a row for each kind of value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from mega_model.kernels.reference import IGNORED
from mega_train.data.blended_dataset import BlendedDataset

# Rows of a sample: token ids, token types, the original ids of masked tokens or IGNORED, 1 at real tokens,
# and in every column 1 if the segments are swapped.
TOKEN, TYPE, LABEL, REAL, ORDER = range(5)


class BertReader:
    """Random access to the samples of a split: (5, length) int64, with the rows of this module."""

    def __init__(self, samples: BlendedDataset[Mapping[str, np.ndarray]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> np.ndarray:
        sample = self.samples[i]
        row = np.empty((5, len(sample["text"])), np.int64)
        row[TOKEN] = sample["text"]
        row[TYPE] = sample["types"]
        row[LABEL] = np.where(sample["loss_mask"] == 1, sample["labels"], IGNORED)
        row[REAL] = sample["padding_mask"]
        row[ORDER] = sample["is_random"]
        return row

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to read samples of remote datasets."""
        self.samples.prefetch(numbers)

    def dataset_prefix(self, i: int) -> Path:
        """Return the prefix of the dataset of sample `i`."""
        return self.samples.dataset_prefix(i)
