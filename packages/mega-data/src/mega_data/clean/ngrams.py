"""Words of evaluation tasks out of training text: tools/openwebtext/filter_ngrams.py, with its windows.

A task's text gives its 13-grams of words, or itself where it has 8 to 12. Where one of them stands in a
document, it is cut out together with about 200 characters on each side, up to a sentence's end. N-grams that
the corpus has 10 times or more are phrases of the language and stay: so the corpus is counted before it is
cut.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from mega_data.clean.rows import Row, Verdict, Work
from mega_data.shards import lines, output_name
from mega_schema.errors import ConfigError, FormatError

_WORD = re.compile(r"\w+")
_KEYS = ("text", "question", "goal", "sentence", "content", "premise", "context")
_TABLE_BITS, _STEP = 24, np.uint64(0x9E3779B97F4A7C15)
_SENTENCE_END = re.compile(r"[.!?]")


@dataclass(frozen=True, slots=True)
class Decontaminate:
    """Cut n-grams of task files out of documents.

    Attributes:
        tasks: JSON lines with the text under text, question, goal, sentence, content, premise or context; or
        plain
            text, a line each.
        longest: words of an n-gram.
        shortest: a shorter task text is passed over.
        phrase: an n-gram seen so often is a phrase, and stays.
        window: characters to cut on each side; a piece left of no more than so many goes too.
        pieces: a document that falls into more goes whole.
        counts: how often the corpus has each n-gram; filled in by the run.
    """

    tasks: tuple[str, ...] = ()
    longest: int = 13
    shortest: int = 8
    phrase: int = 10
    window: int = 200
    pieces: int = 10
    counts: Mapping[str, int] = field(default_factory=dict)

    def start(self) -> Work:
        grams = Grams((g for g in self.grams() if self.counts.get(g, 0) < self.phrase), self.longest)
        name = "-".join(Path(output_name(Path(task))).stem for task in self.tasks)

        def work(row: Row) -> Verdict:
            if not grams.may_have(row.text):
                return [row]
            pieces = self.cut(row.text, grams)
            if pieces == [row.text]:
                return [row]
            if len(pieces) > self.pieces:
                return f"falls into more than {self.pieces} pieces"
            if not pieces:
                return "nothing left beside task text"
            old = f"{row.values['split_id']}-" if "split_id" in row.values else ""
            made = f"{old}{name}-{row.shard:05d}-{row.line:010d}"
            return [
                row.having(**{row.key: piece, "split_id": f"{made}-{number:04d}"})
                for number, piece in enumerate(pieces)
            ]

        return work

    def count(self, texts: Iterable[str]) -> dict[str, int]:
        """How often each n-gram of the tasks stands in the texts; those that do not are left out."""
        grams, counted = Grams(self.grams(), self.longest), Counter[str]()
        for text in texts:
            if grams.may_have(text):
                counted.update(gram for _, gram in grams.hits(text))
        return dict(sorted(counted.items()))

    def grams(self) -> Iterator[str]:
        """The n-grams of all tasks, words joined by one space; one may come several times."""
        if not self.tasks:
            raise ConfigError("step decontaminate: tasks", "missing", hint='tasks = ["lambada_test.jsonl"]')
        for task in self.tasks:
            for text in _texts(Path(task)):
                words = _words(text)
                if len(words) < self.shortest:
                    continue
                size = min(len(words), self.longest)
                for at in range(len(words) - size + 1):
                    yield " ".join(words[at : at + size])

    def cut(self, text: str, grams: Grams) -> list[str]:
        """The clean pieces of a text."""
        pieces, rest = list[str](), text
        while (hit := next(grams.hits(rest), None)) is not None:
            at, gram = hit
            ends = [match.start() for match in _SENTENCE_END.finditer(rest, 0, max(0, at - self.window + 1))]
            left = rest[: ends[-1] + 1] if ends and ends[-1] > 0 else ""
            if len(left) > self.window:
                pieces.append(left)
            after = _SENTENCE_END.search(rest, at + len(gram) + self.window)
            rest = rest[after.end() :] if after else ""
            if len(rest) <= self.window:
                return pieces
        return [*pieces, rest]


class Grams:
    """A set of n-grams, looked for in texts.

    A table of hashes of their first words tells at which few places of a text to look; there the strings
    decide.
    """

    def __init__(self, grams: Iterable[str], longest: int) -> None:
        self.longest = longest
        self._all = frozenset(grams)
        sizes = {gram.count(" ") + 1 for gram in self._all}
        self._sizes = sorted(sizes - {longest})
        self._first = min(sizes, default=longest)  # words that are hashed
        self._table = np.zeros(1 << _TABLE_BITS, bool)
        for gram in self._all:
            self._table[self._hashes(gram.split(" ")[: self._first])] = True

    def may_have(self, text: str) -> bool:
        """False is certain, True is not."""
        return bool(len(self._places(_words(text))))

    def hits(self, text: str) -> Iterator[tuple[int, str]]:
        """Where n-grams begin, in characters, and which: at one word the longest size first, then the shorter
        ones from the shortest on. As in filter_ngrams.py a text of fewer than 13 words has none, and one of
        13 none in its last words.
        """
        words = _words(text)
        places = self._places(words)
        if not len(places):
            return
        starts = [match.start() for match in _WORD.finditer(text)]
        for at in places.tolist():
            sizes = [self.longest, *self._sizes] if at + self.longest <= len(words) else self._sizes
            for size in sizes:
                gram = " ".join(words[at : at + size])
                if at + size <= len(words) and gram in self._all:
                    yield starts[at], gram
                    break

    def _places(self, words: Sequence[str]) -> NDArray[np.int64]:
        """The words where an n-gram may begin."""
        if len(words) < self.longest:
            return np.empty(0, np.int64)
        places = np.flatnonzero(self._table[self._hashes(words)])
        return places if len(words) > self.longest else places[places == 0]

    def _hashes(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Of each so many words that follow each other, a place in the table."""
        one = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
        count = max(0, len(one) - self._first + 1)
        found = np.zeros(count, np.uint64)
        for offset in range(self._first):
            found *= _STEP
            found += one[offset : offset + count]
        found *= _STEP
        return (found >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)


def _words(text: str) -> list[str]:
    # a capital letter may be several characters in lower case, which are no word: so words first
    if text.isascii():
        return _WORD.findall(text.lower())
    return [word.lower() for word in _WORD.findall(text)]


def _texts(task: Path) -> Iterator[str]:
    if not task.is_file():
        raise ConfigError("step decontaminate: tasks", "no such file", found=task)
    for number, line in enumerate(lines(task), 1):
        if not line.strip():
            continue
        if not output_name(task).endswith((".jsonl", ".json")):
            yield line.decode("utf-8", "replace")
            continue
        try:
            values = orjson.loads(line)
            yield next(values[key] for key in _KEYS if isinstance(values.get(key), str))
        except (orjson.JSONDecodeError, AttributeError, StopIteration):
            wanted = f"an object with a string under {' or '.join(_KEYS)}"
            raise FormatError(f"{task}:{number}", "not a task's line", wanted=wanted) from None
