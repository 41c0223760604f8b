"""The tokenizer that a person names, for a checkpoint that has none of its own."""

from __future__ import annotations

from pathlib import Path

from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer import IDENTITY, Tokenizer, open_folder, open_tokenizer


def of(folder: Path, spec: ModelSpec) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote to `folder`, or that of a Hugging Face folder.

    Raises:
        ConfigError: it has ids that the model has not.
        FormatError: there is none, or it is damaged.
    """
    saved = (folder / IDENTITY).exists()
    tokenizer = open_folder(folder) if saved else open_tokenizer("HuggingFaceTokenizer", model=folder)
    if tokenizer.identity.vocab_size > spec.vocab:
        raise ConfigError(
            "--tokenizer",
            "has ids that the model has not",
            found=tokenizer.identity.vocab_size,
            wanted=f"at most the model's {spec.vocab}",
        )
    return tokenizer
