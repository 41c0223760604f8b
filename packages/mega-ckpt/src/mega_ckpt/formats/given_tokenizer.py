"""The tokenizer that a person names, in the place of a checkpoint's own."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer import Tokenizer, open_folder, open_tokenizer
from mega_schema.tokenizer_identity import IDENTITY

NO_TOKENIZER: Final = "mega-ckpt convert --no-tokenizer leaves it behind"
"""The hint of a tokenizer that lies beside a model it does not fit."""


def of(folder: Path, spec: ModelSpec) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote to `folder`, or that of a Hugging Face folder.

    Raises:
        ConfigError: there is no such folder.
        FormatError: there is none, it is damaged, or it has ids that the model has not.
    """
    if not folder.exists():
        wanted = "a folder with tokenizer.json, or PREFIX.tokenizer of a dataset"
        raise ConfigError("--tokenizer", "no such folder", found=folder, wanted=wanted)
    saved = (folder / IDENTITY).exists()
    tokenizer = open_folder(folder) if saved else open_tokenizer("HuggingFaceTokenizer", model=folder)
    return fitting(tokenizer, spec, folder)


def fitting(tokenizer: Tokenizer, spec: ModelSpec, where: object, *, hint: str = "") -> Tokenizer:
    """The tokenizer, whose ids the model has.

    Args:
        where: its file or folder, to begin messages with.
        hint: of the message.

    Raises:
        FormatError: the model has not all of them.
    """
    size = tokenizer.identity.vocab_size
    if size > spec.vocab:
        wanted = f"at most the model's {spec.vocab}"
        raise FormatError(where, "has ids that the model has not", found=size, wanted=wanted, hint=hint)
    return tokenizer
