"""Count the pre-tokenized words of texts; write, merge and read the counts.

A file of counts has a line `WORD<TAB>COUNT` for each word, sorted by the bytes of the words. Words contain
neither white space nor control characters: the pre-tokenizer of a bpe replaces them by letters, that of a
wordpiece splits at them.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Final
from zlib import crc32

from mega_data.output_formats import open_output

SplitWords = Callable[[str], list[str]]
BYTES_PER_PIECE: Final = 512  # of memory, for each different piece of text, until it is written
_BYTES_PER_CHARACTER: Final = 4
_SPACE_LETTER: Final = "\u0120"  # for a space, in byte-level words
_PIECE: Final = re.compile(r"\s*\S+|\s+")
# white space of Python's patterns, but not of all pre-tokenizers
_OTHER_SPACE: Final = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
_READ_BYTES: Final = 1 << 20


def split_pieces(text: str) -> list[str]:
    """Split a text before white space: there pre-tokenizers split, whatever the text before it."""
    return [text] if _OTHER_SPACE.search(text) else _PIECE.findall(text)


def byte_level_splitter() -> SplitWords:
    """Return the function that splits a piece of text into the words of GPT-2's byte-level pre-tokenizer."""
    from tokenizers import pre_tokenizers

    pre_tokenizer: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def split(piece: str) -> list[str]:
        if piece.isascii():  # most pieces are a space and letters; they need no pattern
            if piece[0] == " " and piece[1:].isalpha():
                return [_SPACE_LETTER + piece[1:]]
            if piece.isalpha():
                return [piece]
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(piece)]

    return split


def bert_splitter(*, lowercase: bool) -> SplitWords:
    """Return the function that splits a piece of text into the normalized words of BERT's pre-tokenizer."""
    from tokenizers import normalizers, pre_tokenizers

    normalizer: Any = normalizers.BertNormalizer(lowercase=lowercase)
    pre_tokenizer: Any = pre_tokenizers.BertPreTokenizer()

    def split(piece: str) -> list[str]:
        if piece.isascii() and (word := piece.strip(" \n")).isalpha():
            return [word.lower() if lowercase else word]
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(piece))]

    return split


class WordCounter:
    """Counts words in bounded memory, and writes the counts sorted.

    Attributes:
        texts: number of texts.
        letters: the letters after the first one of a word, in the order of their first occurrence.
    """

    def __init__(self, split: SplitWords, path: Path, memory: int) -> None:
        """Count to `path`; files `path`.0, `path`.1 ... hold the counts that did not fit in memory.

        Args:
            memory: in bytes; a single text may need more.
        """
        self.texts = 0
        self.letters = dict[str, None]()
        self._split = split
        self._path = path
        self._memory = memory
        self._pieces = Counter[str]()
        self._characters = 0
        self._spilled = list[Path]()

    def add(self, text: str) -> None:
        self.texts += 1
        if not text:
            return
        self._pieces.update(split_pieces(text))
        self._characters += len(text)
        size = len(self._pieces) * BYTES_PER_PIECE + self._characters * _BYTES_PER_CHARACTER
        if size > self._memory and len(self._pieces) > 1:
            path = self._path.with_name(f"{self._path.name}.{len(self._spilled)}")
            self._write(path)
            self._spilled.append(path)

    def finish(self) -> int:
        """Write the file of counts; return the number of different words."""
        if not self._spilled:
            return self._write(self._path)
        last = self._path.with_name(f"{self._path.name}.{len(self._spilled)}")
        self._write(last)
        paths = [*self._spilled, last]
        count = merge_counts(paths, self._path)
        for path in paths:
            path.unlink()
        return count

    def _write(self, path: Path) -> int:
        words = Counter[str]()
        for piece, count in self._pieces.items():
            for word in self._split(piece):
                words[word] += count
        self._pieces.clear()
        self._characters = 0
        self.letters.update(dict.fromkeys(letter for word in words for letter in word[1:]))
        lines = sorted(b"%s\t%d\n" % (word.encode("utf-8"), count) for word, count in words.items())
        with open_output(path) as out:
            out.writelines(lines)
        return len(lines)


def merge_counts(paths: Sequence[Path], target: Path) -> int:
    """Write the sums of the counts of sorted files; return the number of different words."""
    total = 0
    with ExitStack() as stack, open_output(target) as out:
        files = [stack.enter_context(path.open("rb", buffering=1 << 16)) for path in paths]
        # a tab is smaller than every byte of a word, so the order of lines is that of words
        entries = (line.rsplit(b"\t", 1) for line in heapq.merge(*files))
        for word, same in groupby(entries, lambda entry: entry[0]):
            out.write(b"%s\t%d\n" % (word, sum(int(count) for _, count in same)))
            total += 1
    return total


def checksum(path: Path) -> list[int]:
    """Return the bytes of a file, and their CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            size += len(block)
            crc = crc32(block, crc)
    return [size, crc]


def read_counts(path: Path, min_frequency: int = 1) -> Iterator[tuple[list[str], list[int]]]:
    """Yield blocks of words and their counts.

    Args:
        min_frequency: leave out words that occur fewer times.
    """
    with path.open("rb") as file:
        for lines in _read_lines(file):
            entries = [(word, int(count)) for word, _, count in (line.rpartition(b"\t") for line in lines)]
            entries = [entry for entry in entries if entry[1] >= min_frequency]
            if entries:
                yield [word.decode("utf-8") for word, _ in entries], [count for _, count in entries]


def _read_lines(file: IO[bytes]) -> Iterable[list[bytes]]:
    while lines := file.readlines(_READ_BYTES):
        yield lines
