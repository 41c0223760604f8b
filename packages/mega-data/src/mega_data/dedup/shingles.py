"""Hash the shingles of many texts at once.

A shingle is one 64-bit key: its document's number in the batch in the upper 20 bits, a 44-bit hash below.
Sorted keys are therefore each document's shingle set, ordered by hash.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.kernels import HashKernels, load_kernels
from mega_data.dedup.kernels.reference import (
    DIGIT,
    DROPPED,
    FIRST,
    HASH_BITS,
    IDEOGRAPH,
    LETTER,
    MULTIPLIER,
    SPACE,
    Keys,
    Numbers,
)
from mega_data.dedup.presets import Preset

MAX_DOCUMENTS = 1 << (64 - HASH_BITS)  # per batch
PIECE_CHARACTERS = 1 << 18  # of a text that are processed at once, at about 52 bytes each
# A text can be split before these without changing a word, its lower case or its marks: ASCII white space,
# and ideographs, each of which is a word
_BREAK = re.compile("[ \t\n\r\u3400-\u9fff]")

_TABLE_SIZE = 1 << 16  # characters beyond it are letters
_POWERS = 1 << 12  # a longer word reuses them from the first


class Shingles:
    """Compute the shingle sets of documents for a preset."""

    def __init__(self, preset: Preset, kernels: HashKernels | None = None) -> None:
        self.preset = preset
        self._kernels = kernels or load_kernels()
        # glibc reuses freed memory up to twice the largest mmapped block that was freed, at first 128 KiB.
        # Without this block, half of the time is page faults of new arrays
        np.empty(31 << 20, np.uint8)
        self._seed = (preset.seed * int(FIRST) + 1) % 2**64
        words = preset.unit == "words"
        self._classes = _character_classes() if words else np.empty(0, np.uint8)
        powers = np.full(_POWERS if words else 0, MULTIPLIER, np.uint64)
        self._powers = np.multiply.accumulate(powers)

    def keys_in_pieces(self, texts: Sequence[str], piece: int = PIECE_CHARACTERS) -> Iterator[Keys]:
        """Yield the keys of all texts; those of a text of more than `piece` characters in parts.

        With words as units, a run of letters without white space and ideographs is not split.
        """
        long_texts = [number for number, text in enumerate(texts) if len(text) > piece]
        if not long_texts:
            yield self.keys(texts)
            return
        yield self.keys([text if len(text) <= piece else "" for text in texts])
        split_keys = (
            self._keys_of_long_words if self.preset.unit == "words" else self._keys_of_long_characters
        )
        for number in long_texts:
            for keys in split_keys(texts[number], piece):
                yield keys | np.uint64(number << HASH_BITS)

    def shingle_sets(self, texts: Sequence[str], piece: int = PIECE_CHARACTERS) -> Keys:
        """Return the keys of all texts in the order of the texts, those of a long text once."""
        if all(len(text) <= piece for text in texts):
            return self.keys(texts)
        parts = list[Keys]()
        for number, text in enumerate(texts):
            unique_keys = np.unique(
                np.concatenate([np.unique(keys) for keys in self.keys_in_pieces([text], piece)])
            )
            parts.append(unique_keys | np.uint64(number << HASH_BITS))
        return np.concatenate(parts)

    def _keys_of_long_characters(self, text: str, piece: int) -> Iterator[Keys]:
        for start in range(0, len(text), piece):
            yield self.keys([text[start : start + piece + self.preset.size]])

    def _keys_of_long_words(self, text: str, piece: int) -> Iterator[Keys]:
        previous = np.empty(0, np.uint64)
        start = 0
        while start < len(text):
            match = _BREAK.search(text, start + piece)
            end = match.start() if match else len(text)
            words = np.concatenate([previous, self._word_hashes([text[start:end]])[1]])
            yield self._shingle_keys(np.zeros(len(words), np.int64), words)
            # the first shingles of the next piece begin with these words
            previous = words[max(0, len(words) - self.preset.size + 1) :]
            start = end

    def keys(self, texts: Sequence[str]) -> Keys:
        """Return the keys of all shingles of all texts in their order, with repetitions.

        Words are runs of letters and digits in lower case, without accents, with numbers replaced by 0; each
        CJK character is a word, as in datatrove's simplify_text. Characters are those of the unchanged text;
        as in Megatron's find_duplicates.py the last shingle of a text is not in its set.

        Args:
            texts: at most 2^20 of them.
        """
        assert len(texts) <= MAX_DOCUMENTS
        if self.preset.unit == "words":
            documents, units = self._word_hashes(texts)
        else:
            documents, units = _character_codes(texts)
        return self._shingle_keys(documents, units)

    def _shingle_keys(self, documents: Numbers, units: Keys) -> Keys:
        """Return the keys of all shingles of these units."""
        size = self.preset.size
        # a window of characters ends one before the text's end, see `keys`
        last = size if self.preset.unit == "characters" else size - 1
        return self._kernels.shingle_keys(documents, units, size, last, self._seed)

    def _word_hashes(self, texts: Sequence[str]) -> tuple[Numbers, Keys]:
        """Return the document and the hash of each word."""
        # a line break between documents ends the word before it
        folded = [
            text.lower() if text.isascii() else unicodedata.normalize("NFD", text.lower()) for text in texts
        ]
        ends = np.cumsum([len(text) + 1 for text in folded])
        codes = _code_points("\n".join(folded) + "\n")
        return self._kernels.hash_words(codes, ends, self._classes, self._powers)


def text_digests(texts: Sequence[str]) -> Keys:
    """Return (texts, 2) words of a 128-bit hash of each text; zeros for an empty one."""
    hashes = (
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() if text else bytes(16)
        for text in texts
    )
    return np.frombuffer(b"".join(hashes), "<u8").reshape(-1, 2)


def _character_codes(texts: Sequence[str]) -> tuple[Numbers, Keys]:
    """Return the document and the code point of each character."""
    documents = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    return documents, _code_points("".join(texts)).astype(np.uint64)


def _code_points(text: str) -> NDArray[np.uint8] | NDArray[np.uint32]:
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


@cache
def _character_classes() -> NDArray[np.uint8]:
    """Classify the first 2^16 characters; cached in the process."""
    class_of = {"L": LETTER, "N": DIGIT, "M": LETTER}
    kinds = (unicodedata.category(chr(code)) for code in range(_TABLE_SIZE))
    table = np.array([DROPPED if k == "Mn" else class_of.get(k[0], SPACE) for k in kinds], np.uint8)
    for first, end in ((0x3040, 0x3100), (0x3400, 0xA000), (0xF900, 0xFB00)):  # kana and ideographs
        table[first:end] = np.where(table[first:end] == LETTER, IDEOGRAPH, table[first:end])
    table[-1] = LETTER  # for all characters beyond the table
    table.flags.writeable = False
    return table
