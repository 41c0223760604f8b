"""The sample order computed by Megatron Core itself: the reference of `sample_index.py` if it is installed.

Its arrays are made by numpy and by loops of C++ (`megatron.core.datasets.helpers`), and kept as .npy files.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

# what a dataset asks of a tokenizer, and tells of it in the names of its files
TOKENIZER = SimpleNamespace(vocab_size=50_000, eod=0, unique_identifiers={})


def _config(names: list[str], length: int, cache: Path, threads: int) -> Any:
    return GPTDatasetConfig(
        random_seed=1234,
        sequence_length=length,
        blend=(names, None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        num_dataset_builder_threads=threads,
    )


def open_dataset(name: str) -> Any:
    return IndexedDataset(name)


def build_index(corpus: Any, samples: int, length: int, cache: Path) -> Any:
    """Build and cache the index of one dataset, or load it from the cache."""
    name = corpus.path_prefix
    numbers = np.arange(len(corpus), dtype=np.int32)
    config = _config([name], length, cache, 1)
    return GPTDataset(corpus, name, numbers, samples, Split.train, config)


def sample(data: Any, i: int) -> np.ndarray:
    """Read the tokens of a sample, without masks and tensors."""
    return data._query_document_sample_shuffle_indices(i)[0]


def open_all(names: list[str], samples: int, length: int, cache: Path, threads: int) -> Any:
    """Open many datasets, and build and cache their indices."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = _config(names, length, cache, threads)
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


def choices(shares: np.ndarray, size: int) -> np.ndarray:
    """Return the dataset of each of `size` samples of a blend."""
    corpus, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(corpus, number, shares, len(shares), size, False)
    return corpus
