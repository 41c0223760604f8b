"""Split a text into the sentences of an n-gram model, equally for its training and its scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mega_data.clean.ccnet_text import normalize_text
from mega_data.readers.versions import FileVersion, file_version
from mega_schema.errors import ConfigError

NORMALIZATIONS = ("ccnet",)


@dataclass(frozen=True, slots=True)
class LineSplitter:
    """Splits a text into lines, and lines into words.

    Attributes:
        tokenizer: a SentencePiece model that splits lines into words; empty splits at ASCII white space.
        normalize: "ccnet" first converts the text as CCNet does, to one line; empty changes nothing.
    """

    tokenizer: str = ""
    normalize: str = ""

    def check(self, prefix: str) -> None:
        """Check both, and load the tokenizer.

        Args:
            prefix: of the names of options in messages.

        Raises:
            ConfigError: the normalization is unknown, or the tokenizer is no SentencePiece model.
        """
        if self.normalize and self.normalize not in NORMALIZATIONS:
            wanted = " | ".join(NORMALIZATIONS)
            raise ConfigError(f"{prefix}normalize", "unknown", found=self.normalize, wanted=wanted)
        if not self.tokenizer:
            return
        if not Path(self.tokenizer).is_file():
            raise ConfigError(f"{prefix}tokenizer", "no such file", found=self.tokenizer)
        try:
            self._load()
        except (OSError, RuntimeError) as error:
            found = str(error).splitlines()[0]
            raise ConfigError(f"{prefix}tokenizer", "not a SentencePiece model", found=found) from None

    def split(self, text: str) -> Iterator[list[bytes]]:
        """Yield the words of each line."""
        lines = [normalize_text(text)] if self.normalize else text.split("\n")
        if not self.tokenizer:
            for line in lines:
                yield line.encode("utf-8", "replace").split()
            return
        encode = self._load()
        for line in lines:  # the library refuses characters without UTF-8
            yield [piece.encode() for piece in encode(line.encode("utf-8", "replace").decode("utf-8"))]

    def _load(self) -> Callable[[str], list[str]]:
        return _load_sentencepiece(self.tokenizer, file_version(Path(self.tokenizer)))


@lru_cache(maxsize=2)
def _load_sentencepiece(path: str, version: FileVersion) -> Callable[[str], list[str]]:
    """Return the function that splits a text into pieces; `version` of the file is part of the cache key."""
    from sentencepiece import SentencePieceProcessor

    encode: Callable[[str], list[str]] = SentencePieceProcessor(model_file=path).encode_as_pieces
    return encode
