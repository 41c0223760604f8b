"""What several test files need: scorers and a tokenizer that are simple enough to check by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mega_eval.scorer import Scored
from mega_schema.tokenizer import TokenizerIdentity


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
def gpt2(shared):
    from mega_schema.tokenizer import open_tokenizer

    files = shared / "data/tokenizers/gpt2"
    return open_tokenizer(
        "GPT2BPETokenizer", vocab_file=files / "gpt2-vocab.json", merge_file=files / "gpt2-merges.txt"
    )


VOCAB = 41


def write_checkpoint(run: Path, *, iteration: int = 10, tokenizer: bool = True, vocab: int = VOCAB) -> Path:
    """A tiny model with random weights, and a tokenizer whose texts are the ids themselves."""
    from mega_model.init import initial_values
    from mega_schema.arch import table
    from mega_schema.checkpoint import boxes
    from mega_schema.commit import Save
    from mega_schema.layout import WHOLE
    from mega_schema.spec import gpt
    from mega_schema.tokenizer import open_tokenizer

    spec = gpt(layers=1, hidden=16, heads=2, vocab=vocab, context=16, init_std=0.3)
    rows = [row for row in table(spec) if row.tied_to is None]
    values = initial_values(rows, seed=1)
    files = run.parent / f"{run.name}-tokenizer"
    open_tokenizer("NullTokenizer", vocab_size=VOCAB - 1).save(files)
    save = Save(run, iteration)
    save.begin()
    whole = [box for row in rows for box in boxes(row.name, row.shape, row.slabs(0, 1), "F32")]
    save.write("model", 0, whole, lambda box: values(box.name, box.slab).numpy())
    return save.commit(spec, layout=WHOLE, trainer={}, tokenizer=files if tokenizer else None)


@pytest.fixture(scope="session")
def checkpoint_writer():
    return write_checkpoint


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval") / "run"
    write_checkpoint(folder)
    return folder
