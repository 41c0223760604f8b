"""Shared fixtures: a toy corpus, reference data, and configurations in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from mega_schema.app.config import load_config
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, IndexedWriter, smallest_dtype
from mega_schema.spec import Family, ModelSpec
from mega_schema.tokenizer.identity import TokenizerIdentity
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.config import RunConfig
from mega_train.resolve import ResolvedConfig, resolve
from mega_train.schedules.lr import ParamSchedules

VOCABULARY = 33  # 32 ids and the end of a document


def write_corpus(
    prefix: Path, *, documents: int = 120, seed: int = 3, vocabulary: int = VOCABULARY, described: bool = True
) -> Path:
    """Documents that count up by 7 modulo `vocabulary` - 1: one look at the token before tells the next."""
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=vocabulary - 1)
    info = DatasetInfo(tokenizer=tokenizer.identity) if described else None
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, smallest_dtype(vocabulary), info=info) as out:
        for _ in range(documents):
            begin, length = rng.integers(0, vocabulary - 1), rng.integers(3, 40)
            out.add([*((begin + 7 * np.arange(length)) % (vocabulary - 1)), vocabulary - 1])
            out.end_document()
    if described:
        tokenizer.save(prefix.with_name(prefix.name + ".tokenizer"))
    return prefix


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small corpus with its tokenizer beside it."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy_text_document")


@pytest.fixture(scope="session")
def oracle(golden: Path) -> Callable[[str], Any]:
    """A JSON file of the oracle."""

    def read(name: str) -> Any:
        return json.loads((golden / name).read_text("utf-8"))

    return read


TINY = {
    "model.num_layers": 2,
    "model.hidden_size": 16,
    "model.num_attention_heads": 2,
    "model.vocab_size": VOCABULARY,
    "model.make_vocab_size_divisible_by": 8,
    "batch.seq_length": 8,
    "batch.global_batch_size": 4,
    "train.train_iters": 10,
    "optimizer.lr": 0.01,
    "evaluation.eval_iters": 0,
}


def make_config(**values: Any) -> RunConfig:
    """TINY with these values, written section__key; None leaves one out."""
    merged = TINY | {key.replace("__", "."): value for key, value in values.items()}
    sets = [f"{key}={_toml(value)}" for key, value in merged.items() if value is not None]
    return load_config(RunConfig, None, {}, sets)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class ResolveConfig(Protocol):
    def __call__(
        self,
        *,
        family: Family = "gpt",
        world: int = 1,
        corpus: TokenizerIdentity | None = None,
        loaded: ModelSpec | None = None,
        loaded_courses: ParamSchedules | None = None,
        cuda: bool = False,
        **values: Any,
    ) -> ResolvedConfig: ...


@pytest.fixture(scope="session")
def resolve_config() -> ResolveConfig:
    """A plan of TINY with these values, written section__key."""

    def plan(
        *,
        family: Family = "gpt",
        world: int = 1,
        corpus: TokenizerIdentity | None = None,
        loaded: ModelSpec | None = None,
        loaded_courses: ParamSchedules | None = None,
        cuda: bool = False,
        **values: Any,
    ) -> ResolvedConfig:
        return resolve(
            make_config(**values),
            family,
            world,
            corpus=corpus,
            loaded_spec=loaded,
            loaded_schedules=loaded_courses,
            cuda=cuda,
        )

    return plan


@pytest.fixture
def open_corpus(corpus: Path) -> IndexedDataset:
    return IndexedDataset(corpus)
