"""Hash all n-grams of a text or of a stream of token ids, vectorised.

Hashes are 64-bit integers modulo 2^64. Equal n-grams have equal hashes; a caller compares the n-grams
themselves where hashes agree.
"""

from __future__ import annotations

import string

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, and so invertible modulo 2^64
_MODULUS = 1 << 64
_LOWER = bytes.maketrans(
    string.ascii_uppercase.encode() + string.whitespace.encode(),
    string.ascii_lowercase.encode() + b" " * len(string.whitespace),
)
_PUNCTUATION = string.punctuation.encode()


def normalize_text(text: str) -> bytes:
    """Return a text in lower case, without ASCII punctuation, with spaces for ASCII white space, in UTF-8.

    Words are what spaces separate, as in the decontamination of GPT-3 (arXiv:2005.14165, appendix C).
    """
    return text.lower().encode("utf-8", "replace").translate(_LOWER, _PUNCTUATION)


def mix_hashes(values: Hashes) -> Hashes:
    """Spread the bits of 64-bit integers (the finalizer of SplitMix64, Steele et al. 2014)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class WordHasher:
    """Hashes the words of normalized texts; keeps tables of powers as long as the longest text so far."""

    def __init__(self) -> None:
        self._powers = np.ones(1, np.uint64)
        self._inverses = np.ones(1, np.uint64)

    def hash_words(self, text: bytes) -> tuple[Hashes, Positions, Positions]:
        """Return the hash, the first byte and the end of each word.

        The hash of a word is Σ (byte + 1) · M^position, from its first byte, with its bits mixed.
        """
        content = np.frombuffer(text, np.uint8)
        if not len(content):
            return np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._extend(len(content) + 1)
        in_word = np.zeros(len(content) + 2, np.int8)
        in_word[1:-1] = content != ord(" ")
        edges = np.diff(in_word)
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        sums = np.zeros(len(content) + 1, np.uint64)
        np.cumsum((content.astype(np.uint64) + np.uint64(1)) * self._powers[: len(content)], out=sums[1:])
        hashes = (sums[ends] - sums[starts]) * self._inverses[starts]
        return mix_hashes(hashes), starts, ends

    def _extend(self, length: int) -> None:
        if length <= len(self._powers):
            return
        size = 1 << (length - 1).bit_length()
        for name, factor in (("_powers", _MULTIPLIER), ("_inverses", pow(_MULTIPLIER, -1, _MODULUS))):
            table = np.full(size, factor, np.uint64)
            table[0] = 1
            np.cumprod(table, out=table)
            setattr(self, name, table)


def hash_ngrams(items: Hashes, length: int) -> Hashes:
    """Return the hash of every n-gram of `length` consecutive items, (len(items) - length + 1,).

    An n-gram of hash g and one of hash h after it, of k items, have the hash g · M^k + h together; the
    lengths double until they add up.
    """
    count = len(items) - length + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    power = 1
    block = items  # hashes of n-grams of `power` items
    total: Hashes | None = None  # of the items before `offset`
    offset = 0
    remaining = length
    while remaining:
        if remaining & 1:
            part = block[offset : offset + count]
            factor = np.uint64(pow(_MULTIPLIER, power, _MODULUS))
            total = part if total is None else total * factor + part
            offset += power
        remaining >>= 1
        if remaining:
            factor = np.uint64(pow(_MULTIPLIER, power, _MODULUS))
            block = block[:-power] * factor + block[power:]
            power *= 2
    assert total is not None
    return mix_hashes(total)
