"""Cut texts into tokens and hash every span of a number of tokens, in numpy.

Words: a run of letters, marks and digits is a token, and so is every other visible character; ideographs are
tokens of their own. White space is not compared. Characters: every code point is a token.

A hash of a span combines the hashes of its two halves: spans of 2, 4, 8 ... tokens come from those of half
the length, and the last step joins two overlapping ones. Each step mixes the bits, so a hash is not a linear
function of the tokens, as that of a rolling hash is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]
Places = NDArray[np.int64]
Codes = NDArray[np.uint8] | NDArray[np.uint32]
Unit = Literal["words", "characters"]
PIECE_CHARACTERS: Final = 1 << 18  # of a text that are processed at once, at about 60 bytes each
MAX_SPAN: Final = 1 << 20  # tokens
_INDEX_BITS: Final = 24  # of a token in a block; a piece and the tokens before it have fewer

_SPACE, _WORD, _SINGLE = range(3)
_TABLE_SIZE: Final = 1 << 16  # characters beyond it are tokens of their own
# a text can be split before these without changing a token
_BREAK = re.compile("[ \t\n\r\u3400-\u9fff]")
_IDEOGRAPHS: Final = ((0x3040, 0x3100), (0x3400, 0xA000), (0xF900, 0xFB00))  # and kana
# of the two lanes; odd. The first two are splitmix64's
_FACTORS: Final = ((0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (0xD6E8FEB86659FD93, 0xA0761D6478BD642F))
_POWER: Final = 0x9E3779B97F4A7C15  # odd, from the golden ratio


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Consecutive tokens of some texts.

    Attributes:
        lanes: 64-bit hashes of the tokens, up to two different ones.
        texts: number of the text of each token.
        starts: place of each token in its text, in characters.
        carried: number of tokens at the start that the previous block contains.
    """

    lanes: tuple[Numbers, ...]
    texts: Places
    starts: Places
    carried: int = 0


class Tokenization:
    """Cut texts into tokens.

    Args:
        span: tokens of the spans to hash; a block of the middle of a long text begins with the `span` - 1
            tokens before it.
        lanes: hashes per token, 0 to 2.
    """

    def __init__(self, unit: Unit, span: int, lanes: int) -> None:
        assert 1 <= span <= MAX_SPAN
        self._unit = unit
        self._span = span
        self._tables = [_hash_table(unit, lane) for lane in range(lanes)]
        self._powers = self._inverse_powers = np.empty(0, np.uint64)
        # glibc reuses freed memory up to twice the largest mmapped block that was freed, at first 128 KiB
        np.empty(31 << 20, np.uint8)

    def blocks(self, texts: Sequence[str], piece: int = PIECE_CHARACTERS) -> Iterator[TokenBlock]:
        """Yield the tokens of texts in their order; one of more than `piece` characters in its own blocks."""
        first = 0
        for number, text in enumerate(texts):
            if len(text) > piece:
                if first < number:
                    yield self._block(texts[first:number], first)
                yield from self._long_text(text, number, piece)
                first = number + 1
        if first < len(texts):
            yield self._block(texts[first:], first)

    def _long_text(self, text: str, number: int, piece: int) -> Iterator[TokenBlock]:
        previous: TokenBlock | None = None
        start = 0
        while start < len(text):
            end = start + piece
            if self._unit == "words":
                match = _BREAK.search(text, end)
                end = match.start() if match else len(text)
            block = self._block([text[start:end]], number, start)
            if previous is not None:
                tail = slice(max(0, len(previous.starts) - self._span + 1), None)
                block = TokenBlock(
                    tuple(
                        np.concatenate([old[tail], new])
                        for old, new in zip(previous.lanes, block.lanes, strict=True)
                    ),
                    np.concatenate([previous.texts[tail], block.texts]),
                    np.concatenate([previous.starts[tail], block.starts]),
                    len(previous.starts[tail]),
                )
            yield block
            previous = block
            start = end

    def _block(self, texts: Sequence[str], first: int, offset: int = 0) -> TokenBlock:
        """Cut whole texts.

        Args:
            first: number of the first text.
            offset: place of its first character.
        """
        separator = "\n" if self._unit == "words" else ""
        joined = "".join([text + separator for text in texts])
        codes = _code_points(joined)
        ends = np.cumsum([len(text) + len(separator) for text in texts])
        starts: Places = np.arange(len(codes))
        if self._unit == "words":
            classes = _classify(joined, codes)
            is_word = classes == _WORD
            is_start = classes != _SPACE
            is_start[1:] &= ~(is_word[1:] & is_word[:-1])
            starts = np.flatnonzero(is_start)
        counts = np.diff(np.searchsorted(starts, ends), prepend=0)
        numbers = np.repeat(np.arange(len(texts)), counts)
        lanes = tuple(self._hashes(codes, starts, lane) for lane in range(len(self._tables)))
        places = starts - np.repeat(np.concatenate([[0], ends[:-1]]) - offset, counts)
        return TokenBlock(lanes, numbers + first, places)

    def _hashes(self, codes: Codes, starts: Places, lane: int) -> Numbers:
        """Hash the tokens that begin at some of the characters."""
        values = self._hash_characters(codes, lane)
        if self._unit == "characters" or not len(starts):
            return values[starts]
        if len(self._powers) < len(values):
            self._powers = _powers(_POWER, len(values))
            self._inverse_powers = _powers(pow(_POWER, -1, 1 << 64), len(values))
        # a sum of value times power of the place in the token, by sums from the first token on
        values *= self._powers[: len(values)]
        np.cumsum(values, out=values)
        token_ends = np.append(starts[1:], len(values)) - 1  # white space adds nothing
        sums: Numbers = np.diff(values[token_ends], prepend=np.uint64(0))
        sums *= self._inverse_powers[starts]
        sums ^= sums >> np.uint64(31)
        sums *= np.uint64(_FACTORS[lane][1])
        return sums

    def _hash_characters(self, codes: Codes, lane: int) -> Numbers:
        """Return a number for each code point; with words it is zero for white space."""
        table = self._tables[lane]
        values: Numbers
        if not len(codes) or int(codes.max()) < _TABLE_SIZE:
            values = table.take(codes)
            return values
        values = _mix_codes(codes, lane)
        is_in_table = codes < _TABLE_SIZE
        values[is_in_table] = table[codes[is_in_table]]
        return values


def span_hashes(tokens: Numbers, span: int, lane: int = 0) -> Numbers:
    """Hash every span of consecutive tokens; the hash at a place is that of the span that begins there."""
    if len(tokens) < span:
        return np.empty(0, np.uint64)
    size = 1
    while 2 * size <= span:
        tokens = _combine(tokens, size, lane)
        size *= 2
    return tokens if size == span else _combine(tokens, span - size, lane)


def _combine(hashes: Numbers, distance: int, lane: int) -> Numbers:
    first, second = (np.uint64(factor) for factor in _FACTORS[lane])
    combined = hashes[:-distance] * first
    combined += hashes[distance:]
    combined ^= combined >> np.uint64(32)
    combined *= second
    return combined


@dataclass(frozen=True, slots=True)
class SpanAnchors:
    """The anchor of every span of a block: the shorter span in it that has the smallest hash.

    Equal spans have equal anchors at equal distances, so a span that is repeated has a repeated anchor, and
    anchors are few: about 4 per span length (Schleimer et al., Winnowing, SIGMOD 2003).

    Attributes:
        spans: the first token of each span that is in one text.
        anchors: the first token of the anchor of each of these spans; ascends.
        keys: hash of the anchor that begins at each token.
    """

    spans: Places
    anchors: Places
    keys: Numbers


def find_anchors(block: TokenBlock, span: int) -> SpanAnchors:
    """Find the anchor of every span of a block. An anchor has half the tokens of a span."""
    assert len(block.starts) < 1 << _INDEX_BITS
    anchor_tokens = (span + 1) // 2
    keys = span_hashes(block.lanes[0], anchor_tokens)
    count = len(block.starts) - span + 1
    if count <= 0:
        empty = np.empty(0, np.int64)
        return SpanAnchors(empty, empty, keys)
    # the last of equal hashes; a span decides alone, so places count from the right
    mask = np.uint64((1 << _INDEX_BITS) - 1)
    smallest = keys | mask
    smallest -= np.arange(len(keys), dtype=np.uint64)
    width = span - anchor_tokens + 1
    size = 1
    while 2 * size <= width:
        smallest = np.minimum(smallest[:-size], smallest[size:])
        size *= 2
    if size < width:
        smallest = np.minimum(smallest[: size - width], smallest[width - size :])
    spans = np.flatnonzero(block.texts[:count] == block.texts[span - 1 :])
    anchors = (mask - (smallest[spans] & mask)).astype(np.int64)
    return SpanAnchors(spans, anchors, keys)


def _code_points(text: str) -> Codes:
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32)


def _classify(text: str, codes: Codes) -> NDArray[np.uint8]:
    """Return the class of each character of a text."""
    table = _character_classes()
    if text.isascii():
        return np.frombuffer(text.encode("ascii").translate(table[:256].tobytes()), np.uint8)
    classes: NDArray[np.uint8] = table[np.minimum(codes, _TABLE_SIZE - 1)]
    return classes


def _mix_codes(codes: Codes, lane: int) -> Numbers:
    """Return a number that is not zero for each code point."""
    first, second = (np.uint64(factor) for factor in _FACTORS[lane])
    values = codes.astype(np.uint64)
    values += np.uint64(1)
    values *= first
    values ^= values >> np.uint64(29)
    values *= second
    values ^= values >> np.uint64(32)
    return values


def _powers(base: int, count: int) -> Numbers:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    result: Numbers = np.multiply.accumulate(powers)
    return result


@cache
def _hash_table(unit: Unit, lane: int) -> Numbers:
    """Return the numbers of the first 2^16 code points; cached in the process."""
    table = _mix_codes(np.arange(_TABLE_SIZE, dtype=np.uint32), lane)
    if unit == "words":
        table[_character_classes() == _SPACE] = 0
    table.flags.writeable = False
    return table


@cache
def _character_classes() -> NDArray[np.uint8]:
    """Classify the first 2^16 code points; the last stands for all beyond. Cached in the process."""
    kinds = (unicodedata.category(chr(code)) for code in range(_TABLE_SIZE))
    class_of = {"L": _WORD, "M": _WORD, "N": _WORD, "Z": _SPACE, "Cc": _SPACE, "Cf": _SPACE}
    table = np.array([class_of.get(kind, class_of.get(kind[0], _SINGLE)) for kind in kinds], np.uint8)
    for first, end in _IDEOGRAPHS:
        table[first:end] = np.where(table[first:end] == _WORD, _SINGLE, table[first:end])
    table[-1] = _SINGLE
    table.flags.writeable = False
    return table
