"""Open the tokenizer of a checkpoint, for the programs that run its model on text."""

from __future__ import annotations

from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer_folder


def open_checkpoint_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Open the tokenizer that is stored in the checkpoint.

    Raises:
        FormatError: the checkpoint has no tokenizer, or the tokenizer has ids without a row of the embedding.
    """
    folder = checkpoint.tokenizer_folder
    tokenizer = open_tokenizer_folder(folder)
    if tokenizer.identity.vocab_size > checkpoint.spec.vocab:
        raise FormatError(
            folder,
            "the tokenizer has more tokens than the model",
            found=tokenizer.identity.vocab_size,
            wanted=f"at most {checkpoint.spec.vocab}",
        )
    return tokenizer
