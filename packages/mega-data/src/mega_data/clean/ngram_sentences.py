"""Split a text into the sentences of an n-gram model, equally for its training and its scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from mega_data.clean.ccnet_text import normalize_text
from mega_data.readers.versions import FileVersion, file_version
from mega_schema.errors import ConfigError

NORMALIZATIONS = ("ccnet",)
Split = Callable[[str], Iterator[list[bytes]]]


def open_splitter(tokenizer: str, normalize: str, prefix: str) -> Split:
    """Return the function that splits a text into lines, and lines into words.

    Args:
        tokenizer: a SentencePiece model that splits lines into words; empty splits at ASCII white space.
        normalize: "ccnet" first converts the text as CCNet does, to one line; empty changes nothing.
        prefix: of the names of options in messages.

    Raises:
        ConfigError: the normalization is unknown, or the tokenizer is no SentencePiece model.
    """
    if normalize and normalize not in NORMALIZATIONS:
        raise ConfigError(f"{prefix}normalize", "unknown", found=normalize, wanted=" | ".join(NORMALIZATIONS))
    words_of = _open_tokenizer(tokenizer, prefix) if tokenizer else _split_at_spaces

    def split(text: str) -> Iterator[list[bytes]]:
        return map(words_of, [normalize_text(text)] if normalize else text.split("\n"))

    return split


def _split_at_spaces(line: str) -> list[bytes]:
    return line.encode("utf-8", "replace").split()


def _open_tokenizer(tokenizer: str, prefix: str) -> Callable[[str], list[bytes]]:
    path = Path(tokenizer)
    if not path.is_file():
        raise ConfigError(f"{prefix}tokenizer", "no such file", found=tokenizer)
    try:
        encode = _load_sentencepiece(tokenizer, file_version(path))
    except (OSError, RuntimeError) as error:
        found = str(error).splitlines()[0]
        raise ConfigError(f"{prefix}tokenizer", "not a SentencePiece model", found=found) from None
    # the library refuses characters without UTF-8
    return lambda line: [piece.encode() for piece in encode(line.encode("utf-8", "replace").decode("utf-8"))]


@lru_cache(maxsize=2)
def _load_sentencepiece(path: str, version: FileVersion) -> Callable[[str], list[str]]:
    """Return the function that splits a text into pieces; `version` of the file is part of the cache key."""
    from sentencepiece import SentencePieceProcessor

    encode: Callable[[str], list[str]] = SentencePieceProcessor(model_file=path).encode_as_pieces
    return encode
