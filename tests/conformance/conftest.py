"""Shared fixtures: small models, small checkpoints and reference data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from mega_ckpt.tensors import dtypes
from mega_schema.arch import table
from mega_schema.checkpoint.reader import DTYPES, MAIN, MODEL, OPTIMIZER
from mega_schema.parallel_layout import WHOLE, Layout
from mega_schema.spec import ModelSpec, gpt, llama
from tests import checkpoint_fixture
from tests.checkpoint_fixture import Whole

RandomWhole = Callable[..., Whole]


class SaveWhole(Protocol):
    def __call__(
        self,
        run: Path,
        spec: ModelSpec,
        whole: Whole,
        *,
        dtype: str = "F32",
        layout: Layout = WHOLE,
        iteration: int = 1,
        tokenizer: Path | None = None,
    ) -> Path: ...


@pytest.fixture(scope="session")
def small_gpt() -> ModelSpec:
    return gpt(layers=3, hidden=16, heads=4, vocab=37, max_seq_len=8, vocab_multiple=8)


@pytest.fixture(scope="session")
def small_llama() -> ModelSpec:
    return llama(layers=3, hidden=16, heads=4, kv_heads=4, ffn=12, vocab=37, max_seq_len=8, vocab_multiple=8)


@pytest.fixture(scope="session")
def random_whole() -> RandomWhole:
    """Whole tensors of every namespace of a model, as they would be stored."""

    def make(spec: ModelSpec, dtype: str = "F32", *, optimizer: bool = False, seed: int = 1) -> Whole:
        rng = np.random.default_rng(seed)

        def values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
            width = DTYPES[dtype].itemsize
            return rng.integers(0, 256, (*shape, width), np.uint8).view(DTYPES[dtype])[..., 0]

        rows = [row for row in table(spec) if row.tied_to is None]
        spaces = {MODEL: dtype} | (dict.fromkeys(OPTIMIZER, "F32") if optimizer else {})
        tensors = {
            space: {row.name: values(row.shape, kind) for row in rows} for space, kind in spaces.items()
        }
        if optimizer and dtype != "F32":  # narrow weights are the optimizer's, rounded
            tensors[MODEL] = {name: dtypes.round_float32(main, dtype) for name, main in tensors[MAIN].items()}
        return tensors

    return make


@pytest.fixture(scope="session")
def save_whole() -> SaveWhole:
    """Save whole tensors as the ranks of a layout would."""
    return checkpoint_fixture.save_whole
