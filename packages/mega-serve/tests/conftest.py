"""Shared fixtures: a small checkpoint with random weights, and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, boxes_to_write
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.parallel_layout import WHOLE
from mega_schema.spec import ModelSpec, gpt
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

EOD = "<|endoftext|>"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer like GPT-2's: 256 bytes, a double line break (ĊĊ) and an end-of-document token."""
    folder = tmp_path_factory.mktemp("words")
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in printing] + [chr(256 + i) for i in range(256 - len(printing))]
    vocab = {word: number for number, word in enumerate([*letters, "ĊĊ", EOD])}
    vocab_file = folder / "vocab.json"
    merge_file = folder / "merges.txt"
    vocab_file.write_text(json.dumps(vocab), "utf-8")
    merge_file.write_text("#version: 0.2\nĊ Ċ\n", "utf-8")
    return open_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)


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
    rng = np.random.default_rng(3)

    def values(box: BoxToWrite) -> np.ndarray:
        return rng.normal(1.0 if "norm.weight" in box.name else 0.0, 0.3, box.slab.shape).astype(np.float32)

    save = CheckpointWriter(run, 7)
    save.begin()
    rows = [row for row in table(spec) if row.tied_to is None]
    shards = [box for row in rows for box in boxes_to_write(row.name, row.shape, row.slabs(0, 1), "F32")]
    save.write(MODEL, 0, shards, values)
    save.commit(spec, layout=WHOLE, trainer={}, tokenizer=tokenizer_folder)
    return run
