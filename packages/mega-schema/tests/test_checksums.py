"""The checksums of a checkpoint's values: sound, a flipped bit anywhere, a file that became shorter."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_schema.checkpoint.checksums import verify_namespace
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.errors import CorruptFileError
from mega_schema.spec import gpt
from tests.serving.random_checkpoint import open_byte_tokenizer, save_random_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    words = tmp_path / "words"
    words.mkdir()
    open_byte_tokenizer(words).save(tmp_path / "tokenizer")
    # the embedding has more than one block of a mebibyte
    spec = gpt(layers=1, hidden=64, heads=4, vocab=5000, max_seq_len=8, init_std=0.3)
    save_random_checkpoint(tmp_path / "run", spec, tmp_path / "tokenizer")
    return Checkpoint.open(tmp_path / "run")


def test_sound_values_are_read_once(checkpoint: Checkpoint) -> None:
    assert verify_namespace(checkpoint, MODEL) == sum(piece.bytes for *_, piece in checkpoint.pieces())


def test_a_flipped_bit_of_any_tensor_is_found_and_named(checkpoint: Checkpoint) -> None:
    for _, name, _, piece in checkpoint.pieces():
        path = checkpoint.folder / piece.file
        for place in (piece.offset, piece.offset + piece.bytes - 1):
            with path.open("r+b") as file:
                file.seek(place)
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes([byte ^ 1]))
            with pytest.raises(CorruptFileError) as error:
                verify_namespace(checkpoint, MODEL)
            with path.open("r+b") as file:
                file.seek(place)
                file.write(bytes([byte]))
            assert f"{path}: model {name}: values are not those that were written" in str(error.value)
            assert "hint: copy the file again" in str(error.value)
    verify_namespace(checkpoint, MODEL)


def test_a_file_that_became_shorter_is_found(checkpoint: Checkpoint) -> None:
    _, _, _, piece = max(checkpoint.pieces(), key=lambda entry: entry[3].offset)
    path = checkpoint.folder / piece.file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="values are not those that were written"):
        verify_namespace(checkpoint, MODEL)
