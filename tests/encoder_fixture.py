"""The toy vocabulary of the reference samples, and datasets of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, IndexedWriter, sibling
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.data.encoder.vocabulary import MaskingVocabulary

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
FIRST_WORD = len(SPECIAL)


def toy_pieces(sentinels: int = 100) -> list[str]:
    """The tokens by id: every third is the continuation of a word."""
    words = [f"##w{i}" if i % 3 == 0 else f"w{i}" for i in range(FIRST_WORD, 202)]
    return [*SPECIAL, *words, "[BOS]", "[EOS]", *(f"<extra_id_{i}>" for i in range(sentinels))]


def toy_vocabulary(sentinels: int = 100) -> MaskingVocabulary:
    return MaskingVocabulary.from_pieces(toy_pieces(sentinels), "toy")


def write_sentences(prefix: Path, documents: Sequence[Sequence[int]], seed: int = 5) -> IndexedDataset:
    """Write documents of sentences of these lengths, of random words."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.uint16) as out:
        for document in documents:
            for length in document:
                out.add(rng.integers(FIRST_WORD, 202, length))
            out.end_document()
    return IndexedDataset(prefix)


def write_corpus(prefix: Path, documents: int = 60, *, described: bool = True, sentinels: int = 0) -> Path:
    """Write documents of three to eight sentences that count up; a number tells the next.

    Args:
        described: with the tokenizer beside the dataset.
        sentinels: of the tokenizer, which with any has a begin and an end too.

    Returns:
        the prefix.
    """
    vocab = prefix.with_name("vocab.txt")
    vocab.write_text("\n".join(toy_pieces(sentinels=0)[:-2]) + "\n", "utf-8")
    tokenizer = open_tokenizer("BertWordPieceCase", vocab_file=vocab, vocab_extra_ids=sentinels)
    info = DatasetInfo(tokenizer=tokenizer.identity) if described else None
    rng = np.random.default_rng(3)
    with IndexedWriter(prefix, np.uint16, info=info) as out:
        for _ in range(documents):
            begin = int(rng.integers(0, 197))
            for length in rng.integers(2, 9, rng.integers(3, 9)).tolist():
                out.add(FIRST_WORD + (begin + np.arange(length)) % 197)
                begin += length
            out.end_document()
    if described:
        tokenizer.save(sibling(prefix, ".tokenizer"))
    return prefix
