"""Checkpoints with random weights and a tokenizer of bytes, for servers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, boxes_to_write
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.parallel_layout import WHOLE
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

EOD = "<|endoftext|>"


def open_byte_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer like GPT-2's: 256 bytes, a double line break (ĊĊ) and an end-of-document token.

    Args:
        folder: for its two files.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in printing] + [chr(256 + i) for i in range(256 - len(printing))]
    vocab = {word: number for number, word in enumerate([*letters, "ĊĊ", EOD])}
    vocab_file = folder / "vocab.json"
    merge_file = folder / "merges.txt"
    vocab_file.write_text(json.dumps(vocab), "utf-8")
    merge_file.write_text("#version: 0.2\nĊ Ċ\n", "utf-8")
    return open_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)


def save_random_checkpoint(
    run: Path, spec: ModelSpec, tokenizer: Path, *, iteration: int = 7, seed: int = 3
) -> None:
    """Write a checkpoint of a run.

    Args:
        tokenizer: folder of a saved tokenizer.
    """
    rng = np.random.default_rng(seed)

    def values(box: BoxToWrite) -> np.ndarray:
        return rng.normal(1.0 if "norm.weight" in box.name else 0.0, 0.3, box.slab.shape).astype(np.float32)

    save = CheckpointWriter(run, iteration)
    save.begin()
    rows = [row for row in table(spec) if row.tied_to is None]
    boxes = [box for row in rows for box in boxes_to_write(row.name, row.shape, row.slabs(0, 1), "F32")]
    save.write(MODEL, 0, boxes, values)
    save.commit(spec, layout=WHOLE, trainer={}, tokenizer=tokenizer)
