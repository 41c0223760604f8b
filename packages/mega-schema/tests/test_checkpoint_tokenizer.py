"""The tokenizer of a checkpoint, and its two errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mega_schema.checkpoint.checkpoint_dir import TOKENIZER
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, Checkpoint
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.errors import FormatError
from mega_schema.parallel_layout import WHOLE
from mega_schema.sharding import Slab
from mega_schema.spec import gpt
from mega_schema.tokenizer.tokenizer import open_tokenizer


def write_checkpoint(run: Path, *, vocab: int, tokenizer: Path | None) -> Checkpoint:
    """A checkpoint whose only tensor is an embedding of zeros."""
    spec = gpt(layers=1, hidden=4, heads=1, vocab=vocab, max_seq_len=4)
    save = CheckpointWriter(run, 1)
    save.begin()
    box = BoxToWrite("embed.weight", (vocab, 4), Slab((0, 0), (vocab, 4), (0, 0)), "F32")
    save.write(MODEL, 0, [box], lambda box: np.zeros(box.slab.shape, np.float32))
    return Checkpoint(save.commit(spec, layout=WHOLE, trainer={}, tokenizer=tokenizer))


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """The folder of a tokenizer with 10 ids."""
    open_tokenizer("NullTokenizer", vocab_size=9).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("vocab", [10, 16])
def test_a_tokenizer_that_fits_is_opened(tmp_path: Path, tokenizer_folder: Path, vocab: int) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", vocab=vocab, tokenizer=tokenizer_folder)
    assert open_checkpoint_tokenizer(checkpoint).identity.vocab_size == 10


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", vocab=9, tokenizer=tokenizer_folder)
    message = f"{TOKENIZER}: the tokenizer has more tokens than the model: found 10, wanted at most 9"
    with pytest.raises(FormatError, match=message):
        open_checkpoint_tokenizer(checkpoint)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", vocab=10, tokenizer=None)
    with pytest.raises(FormatError, match=f"{TOKENIZER}: the checkpoint has no tokenizer; hint: cp -r "):
        open_checkpoint_tokenizer(checkpoint)
