"""A small SentencePiece tokenizer for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer


def train_sentencepiece(folder: Path, **settings: object) -> Tokenizer:
    """Train a model of 320 pieces with byte fallback; skip the test without the library.

    Args:
        settings: further arguments of SentencePiece's trainer.
    """
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(["the quick brown fox jumps over the lazy dog", "hello world again"] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "words"),
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        minloglevel=3,
        **settings,
    )
    return open_tokenizer("Llama2Tokenizer", model=folder / "words.model")
