"""Identify datasets by their content, so that a resumed run recognises its own after a move."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np

from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_train.config import DataConfig
from mega_train.data.dataloaders import RunDatasets
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.sentence_datasets import SentenceDatasets
from mega_train.data.sft import SftExamples
from mega_train.data.task_data import TaskData, TaskSamples

_SEQUENCES, _TOKENS = 16, 1024  # read of each dataset: reading all of it would take hours


def compute_identities(
    data: DataConfig, datasets: RunDatasets | TaskData | IndexedDataset
) -> Mapping[str, str]:
    """Compute a digest of each dataset of a run, by its prefix; empty for mock data.

    The digest covers the lengths of all sequences, where documents begin, and the first tokens of some
    sequences from the first to the last. The type of the ids does not count.
    """
    if data.mock:
        return {}
    if isinstance(datasets, SftExamples):
        return {normalize_prefix(data.path[0]): _digest(*datasets.parts)}
    if isinstance(datasets, TaskSamples | TaskData):
        return {}  # the paths are compared
    if isinstance(datasets, SentenceDatasets):
        datasets = datasets.datasets
    indexed = datasets.by_prefix.values() if isinstance(datasets, Datasets) else [datasets]
    return {str(dataset.prefix): _digest(dataset) for dataset in indexed}


def normalize_prefix(word: str) -> str:
    """Return a prefix in the form that the identities use."""
    return str(Path(word.strip()))


def _digest(*datasets: IndexedDataset) -> str:
    digest = blake2b(digest_size=16)
    for dataset in datasets:
        digest.update(np.ascontiguousarray(dataset.lengths, np.int32).data)
        digest.update(np.ascontiguousarray(dataset.documents, np.int64).data)
        for number in np.linspace(0, len(dataset) - 1, min(_SEQUENCES, len(dataset)), dtype=np.int64):
            length = min(_TOKENS, int(dataset.lengths[number]))
            digest.update(dataset.read(int(number), 0, length).astype(np.int64).data)
    return digest.hexdigest()
