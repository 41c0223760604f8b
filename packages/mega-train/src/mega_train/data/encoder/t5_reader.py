"""The samples of T5 as arrays with a row for each kind of value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from mega_schema.tasks.pair_features import IGNORED
from mega_train.data.blended_dataset import BlendedDataset

# Rows of a sample. Of the encoder: token ids, and 1 at real tokens. Of the decoder: token ids, the next token
# of each or IGNORED, and 1 at real tokens. The shorter of the two is padded to the length of the other.
SOURCE, SOURCE_REAL, TOKEN, LABEL, REAL = range(5)


class T5Reader:
    """Random access to the samples of a split: (5, longer length) int64, with the rows of this module."""

    def __init__(self, samples: BlendedDataset[Mapping[str, np.ndarray]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> np.ndarray:
        sample = self.samples[i]
        rows = {
            SOURCE: sample["text_enc"],
            SOURCE_REAL: _visible_tokens(sample["enc_mask"]),
            TOKEN: sample["text_dec"],
            LABEL: np.where(sample["loss_mask"] == 1, sample["labels"], IGNORED),
            REAL: _visible_tokens(sample["dec_mask"]),
        }
        values = np.zeros((len(rows), max(len(row) for row in rows.values())), np.int64)
        for number, row in rows.items():
            values[number, : len(row)] = row
        values[LABEL, len(rows[LABEL]) :] = IGNORED
        return values

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to read samples of remote datasets."""
        self.samples.prefetch(numbers)

    def dataset_prefix(self, i: int) -> Path:
        """Return the prefix of the dataset of sample `i`."""
        return self.samples.dataset_prefix(i)


def _visible_tokens(mask: np.ndarray) -> np.ndarray:
    """Return which tokens are visible: the mask itself, or the diagonal of one of queries and keys."""
    return mask if mask.ndim == 1 else mask.diagonal()
