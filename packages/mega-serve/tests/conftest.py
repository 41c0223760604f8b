"""Shared fixtures: a small checkpoint with random weights, and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_schema.spec import ModelSpec, gpt
from mega_schema.tokenizer.tokenizer import Tokenizer
from tests.serving.random_checkpoint import open_byte_tokenizer, save_random_checkpoint


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer like GPT-2's: 256 bytes, a double line break (ĊĊ) and an end-of-document token."""
    folder = tmp_path_factory.mktemp("words")
    return open_byte_tokenizer(folder)


@pytest.fixture(scope="session")
def spec(tokenizer: Tokenizer) -> ModelSpec:
    """A model with two ids more than the tokenizer."""
    vocab = tokenizer.identity.vocab_size + 2
    return gpt(layers=2, hidden=32, heads=4, vocab=vocab, max_seq_len=64, init_std=0.3, vocab_multiple=8)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec, tokenizer: Tokenizer) -> Path:
    """A run directory with one checkpoint."""
    run = tmp_path_factory.mktemp("run")
    tokenizer_folder = run / "words"
    tokenizer.save(tokenizer_folder)
    save_random_checkpoint(run, spec, tokenizer_folder)
    return run
