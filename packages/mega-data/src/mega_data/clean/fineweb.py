"""Filter documents by the quality rules of FineWeb (arXiv:2406.17557, section 3.6)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mega_data.clean.step import Row, RowFunction, Verdict

# the characters with the Unicode property Sentence_Terminal, and Khmer's end of a section
_TERMINAL_RANGES = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e "
    "1735-1736 17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b4e-1b4f 1b5a-1b5b 1b5e-1b5f "
    "1b7d-1b7f 1c3b-1c3c 1c7e-1c7f 2024 203c-203d 2047-2049 2cf9-2cfb 2e2e 2e3c 2e53-2e54 2e60-2e61 "
    "3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe12 "
    "fe15-fe16 fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 "
    "110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 113d4-113d5 "
    "1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c "
    "11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44 16d6e-16d6f 16e98 1bc9f "
    "1da88 "
)
# runs of letters and digits, and single other characters, approximate the words of spaCy's English tokenizer
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class FinewebQuality:
    """Drop documents with few sentence ends, many short lines, repeated lines, or many line breaks.

    The options and the reasons have datatrove's names and defaults.

    Attributes:
        line_punct_thr: minimum share of lines that end in one of `stop_chars`.
        line_punct_exclude_zero: keep documents without any such line.
        stop_chars: ends of a sentence; empty is the punctuation of all scripts.
        short_line_thr: maximum share of lines of at most `short_line_length` characters.
        char_duplicates_ratio: maximum share of characters in lines that occurred before.
        new_line_ratio: maximum number of line breaks per word.
    """

    line_punct_thr: float = 0.12
    line_punct_exclude_zero: bool = False
    stop_chars: tuple[str, ...] = ()
    short_line_thr: float = 0.67
    short_line_length: int = 30
    char_duplicates_ratio: float = 0.01
    new_line_ratio: float = 0.3

    def start(self) -> RowFunction:
        stop_chars = self.stop_chars or _terminal_punctuation()

        def work(row: Row) -> Verdict:
            return self._reason(row.text, stop_chars) or [row]

        return work

    def _reason(self, text: str, stop_chars: tuple[str, ...]) -> str:
        """Return the reason to drop a text, or ""."""
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        if not lines:
            return "empty"
        ratio = sum(line.endswith(stop_chars) for line in lines) / len(lines)
        if ratio < self.line_punct_thr and not (ratio == 0 and self.line_punct_exclude_zero):
            return "line_punct_ratio"
        if sum(len(line) <= self.short_line_length for line in lines) / len(lines) > self.short_line_thr:
            return "short_line_ratio"
        line_breaks = text.count("\n")
        distinct_lines = set(lines)
        repeated_characters = sum(map(len, lines)) - sum(map(len, distinct_lines))
        if repeated_characters / (len(text) - line_breaks) > self.char_duplicates_ratio:
            return "char_dup_ratio"
        # each piece between spaces is one word or more, so most texts need no search for words
        if line_breaks > self.new_line_ratio * len(text.split()):
            words = len(_WORD.findall(text))
            if line_breaks > self.new_line_ratio * words:
                return "list_ratio"
        return ""


def _terminal_punctuation() -> tuple[str, ...]:
    characters = list[str]()
    for part in _TERMINAL_RANGES.split():
        first, _, last = part.partition("-")
        characters += map(chr, range(int(first, 16), int(last or first, 16) + 1))
    return tuple(characters)
