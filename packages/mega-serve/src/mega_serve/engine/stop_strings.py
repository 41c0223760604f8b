"""Find stop strings in a text that arrives in parts (Knuth-Morris-Pratt, one automaton per string)."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Watches a text for the stop string that is complete first; of several, the longest.

    Args:
        stop: not empty strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "a stop string is empty"
        # the longest first: it begins first if several end at one character
        self._stop = sorted(set(stop), key=lambda string: (-len(string), string))
        self._failures = [_failure_table(string) for string in self._stop]
        self._matched = [0] * len(self._stop)

    @property
    def possible_chars(self) -> int:
        """Number of last characters that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def advance(self, char: str) -> str | None:
        """Append one character; return the stop string that it completes."""
        for i, (string, failure) in enumerate(zip(self._stop, self._failures, strict=True)):
            matched = self._matched[i]
            while matched and string[matched] != char:
                matched = failure[matched - 1]
            matched += string[matched] == char
            if matched == len(string):
                return string
            self._matched[i] = matched
        return None


def _failure_table(string: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is its suffix too."""
    table = [0] * len(string)
    for i in range(1, len(string)):
        length = table[i - 1]
        while length and string[length] != string[i]:
            length = table[length - 1]
        table[i] = length + (string[length] == string[i])
    return table
