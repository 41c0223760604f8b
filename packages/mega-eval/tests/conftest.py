"""What several test files need: scorers and a tokenizer that are simple enough to check by hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mega_eval.lm import Scored
from mega_schema.tokenizer import TokenizerIdentity

ROOT = Path(__file__).resolve().parents[3]


class Words:
    """A tokenizer whose tokens are words with the space before them; id 0 ends a document."""

    def __init__(self, vocab: int = 50) -> None:
        self.identity = TokenizerIdentity("NullTokenizer", vocab, 0, None, None, "0" * 64)
        self.known = ["<eod>"]

    def encode(self, text):
        for word in text.split():
            if word not in self.known:
                self.known.append(word)
        return [self.known.index(word) for word in text.split()]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return " ".join(self.known[i] for i in ids)


class Uniform:
    """Knows nothing: every token has probability 1/V, and its first choice is token 1."""

    def __init__(self, vocab: int, context: int) -> None:
        self.vocab, self.context, self.seen = vocab, context, []

    def score(self, windows):
        self.seen += windows
        assert all(window.read <= self.context for window in windows)
        targets = [window.tokens[len(window.tokens) - window.scored :] for window in windows]
        return [Scored(np.full(len(t), -np.log(self.vocab)), t == 1) for t in targets]


@pytest.fixture
def words():
    return Words()


@pytest.fixture
def uniform():
    return Uniform


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = Path(os.environ.get("MEGA_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}: set MEGA_SHARED")
    return folder


@pytest.fixture(scope="session")
def gpt2(shared):
    from mega_schema.tokenizer import open_tokenizer

    files = shared / "data/tokenizers/gpt2"
    return open_tokenizer(
        "GPT2BPETokenizer", vocab_file=files / "gpt2-vocab.json", merge_file=files / "gpt2-merges.txt"
    )
