"""Shared fixtures: a scorer and a tokenizer simple enough to check by hand, and a small checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mega_eval.models.interface import WindowScores
from mega_schema.tokenizer.tokenizer import TokenizerIdentity


class Words:
    """A tokenizer whose tokens are words; id 0 ends a document."""

    def __init__(self, vocab: int = 50) -> None:
        self.identity = TokenizerIdentity("NullTokenizer", vocab, 0, None, None, "0" * 64)
        self.words = ["<eod>"]

    def encode(self, text):
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids)

    def pieces(self, ids):
        return [self.words[i] for i in ids]


class Uniform:
    """A scorer that gives every token probability 1/V and whose greedy choice is token 1."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.windows = []

    def score(self, windows):
        self.windows += windows
        assert all(window.input_length <= self.context_length for window in windows)
        logprob = -np.log(self.vocab_size)
        return [
            WindowScores(
                np.full(window.target_length, logprob),
                window.targets == 1,
                np.ones(window.target_length, np.int64),
            )
            for window in windows
        ]


@pytest.fixture
def words():
    return Words()


@pytest.fixture
def uniform():
    return Uniform


@pytest.fixture(scope="session")
def gpt2(shared):
    from mega_schema.tokenizer.tokenizer import open_tokenizer

    files = shared / "data/tokenizers/gpt2"
    return open_tokenizer(
        "GPT2BPETokenizer", vocab_file=files / "gpt2-vocab.json", merge_file=files / "gpt2-merges.txt"
    )


VOCAB = 41


def write_checkpoint(
    run: Path,
    *,
    iteration: int = 10,
    tokenizer: bool = True,
    vocab: int = VOCAB,
    seed: int = 1,
    layers: int = 1,
    trainer: dict[str, int] | None = None,
    stored: str = "F32",
) -> Path:
    """Write a tiny model with random weights, and a tokenizer whose texts are the ids themselves."""
    import torch

    from mega_model.init import initial_values
    from mega_schema.arch import table
    from mega_schema.checkpoint.reader import boxes_to_write
    from mega_schema.checkpoint.writer import CheckpointWriter
    from mega_schema.parallel_layout import WHOLE
    from mega_schema.spec import gpt
    from mega_schema.tokenizer.tokenizer import open_tokenizer

    spec = gpt(layers=layers, hidden=16, heads=2, vocab=vocab, max_seq_len=16, init_std=0.3)
    rows = [row for row in table(spec) if row.tied_to is None]
    values = initial_values(rows, seed=seed)
    files = run.parent / f"{run.name}-tokenizer"
    open_tokenizer("NullTokenizer", vocab_size=VOCAB - 1).save(files)
    save = CheckpointWriter(run, iteration)
    save.begin()
    shards = [box for row in rows for box in boxes_to_write(row.name, row.shape, row.slabs(0, 1), stored)]

    def compute(box):
        weight = values(box.name, box.slab)
        return weight.bfloat16().view(torch.uint16).numpy() if stored == "BF16" else weight.numpy()

    save.write("model", 0, shards, compute)
    return save.commit(spec, layout=WHOLE, trainer=trainer or {}, tokenizer=files if tokenizer else None)


@pytest.fixture(scope="session")
def checkpoint_writer():
    return write_checkpoint


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval") / "run"
    write_checkpoint(folder)
    return folder
