"""A tokenizer for text that already consists of ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mega_schema.errors import RequestError
from mega_schema.tokenizer.identity import TokenizerIdentity


class NullTokenizer:
    """Converts integers in decimal, separated by spaces, to ids."""

    def __init__(self, identity: TokenizerIdentity) -> None:
        self.identity = identity

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            # 18 digits: int() of a longer word could take long, and no vocabulary is that large
            digits = word.isascii() and word.isdigit() and len(word) <= 18
            if not digits or int(word) >= self.identity.vocab_size:
                wanted = f"integers below {self.identity.vocab_size}"
                raise RequestError(
                    "text", "not ids for a NullTokenizer", found=repr(word[:40]), wanted=wanted
                )
            ids.append(int(word))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.pieces(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(int(i)) for i in ids]

    def save(self, folder: Path) -> None:
        from mega_schema.tokenizer.tokenizer import save_folder

        save_folder(folder, self.identity, {})
