"""Keep, drop or change documents by a pattern, and keep a share of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from mega_data.clean.python_step import DocumentError
from mega_data.clean.step import Row, RowFunction, Verdict
from mega_data.cpu_limit import TimeLimitReached, limit_cpu_seconds
from mega_data.readers.nested_keys import value_or_none
from mega_schema.app.config import did_you_mean
from mega_schema.errors import ConfigError

_NO_RATE = -1.0  # a number that no user can give
_SECONDS = 20.0  # of CPU time for the pattern, per document
_SECONDS_PER_MEGABYTE = 5.0  # more
_ACTIONS = ("drop", "keep", "replace")


@dataclass(frozen=True, slots=True)
class RegexStep:
    """Drop or keep documents in which a pattern of Python's `re` occurs, or replace its occurrences.

    A document for which the pattern needs minutes ends the run: the time of some patterns grows exponentially
    with the text.

    Attributes:
        action: drop, keep or replace.
        replacement: text for each occurrence, with groups as in `re.sub`: \\1, \\g<name>.
        key: key of the value to search; empty is the text. A value that is no string has no occurrence.
    """

    pattern: str = ""
    action: str = "drop"
    replacement: str = ""
    key: str = ""

    def start(self) -> RowFunction:
        pattern = self._compile()

        def value_of(row: Row) -> str | None:
            if not self.key:
                return row.text
            value = value_or_none(row.values, self.key)
            return value if isinstance(value, str) else None

        def drop(row: Row) -> Verdict:
            value = value_of(row)
            return [row] if value is None or not pattern.search(value) else f"matches {self.pattern}"

        def keep(row: Row) -> Verdict:
            value = value_of(row)
            return [row] if value is not None and pattern.search(value) else f"no match of {self.pattern}"

        def substitute(row: Row) -> Verdict:
            if (value := value_of(row)) is None:
                return [row]
            new_value = pattern.sub(self.replacement, value)
            return [row] if new_value == value else [row.with_values(**{self.key or row.key: new_value})]

        functions: dict[str, Callable[[Row], Verdict]] = {"drop": drop, "keep": keep, "replace": substitute}
        apply = functions[self.action]

        def work(row: Row) -> Verdict:
            seconds = _SECONDS + _SECONDS_PER_MEGABYTE * len(row.text) / 1e6
            try:
                with limit_cpu_seconds(seconds):
                    return apply(row)
            except TimeLimitReached:
                where, what = "step regex: pattern", f"needs more than {seconds:.0f} seconds for a document"
                hint = "no repeat within a repeat, such as (a+)+"
                raise DocumentError(where, what, found=self.pattern, hint=hint) from None

        return work

    def _compile(self) -> re.Pattern[str]:
        """Compile the pattern.

        Raises:
            ConfigError: an option is missing or wrong.
        """
        if not self.pattern:
            raise ConfigError("step regex: pattern", "missing", hint="pattern = '(?i)lorem ipsum'")
        if self.action not in _ACTIONS:
            wanted, hint = " | ".join(_ACTIONS), did_you_mean(self.action, _ACTIONS)
            raise ConfigError("step regex: action", "unknown", found=self.action, wanted=wanted, hint=hint)
        if self.replacement and self.action != "replace":
            raise ConfigError("step regex: replacement", "has no effect", hint="action = 'replace'")
        try:
            pattern = re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError("step regex: pattern", "not a pattern", found=error) from None
        try:
            # a pattern that matches the empty string before its own alternatives parses the replacement
            re.compile(f"(?:{self.pattern})|").sub(self.replacement, "")
        except (re.error, IndexError) as error:
            raise ConfigError("step regex: replacement", "not a replacement", found=error) from None
        return pattern


@dataclass(frozen=True, slots=True)
class SampleStep:
    """Keep a share of the documents, selected by a hash of the seed and of each document's text or id.

    Documents with equal values share one decision. With one seed, a lower rate keeps a part of the documents
    of a higher one.

    Attributes:
        rate: share to keep, above 0 and at most 1.
        key: key of the hashed value, for example id; empty, or a document without it, uses the text.
    """

    rate: float = _NO_RATE
    seed: int = 0
    key: str = ""

    def start(self) -> RowFunction:
        if not 0 < self.rate <= 1:
            where, wanted = "step sample: rate", "above 0, at most 1"
            if self.rate == _NO_RATE:
                raise ConfigError(where, "missing", wanted=wanted, hint="--step sample:rate=0.1")
            raise ConfigError(where, "not a share", found=self.rate, wanted=wanted)
        limit = int(self.rate * 2.0**64)
        seed = blake2b(str(self.seed).encode(), digest_size=16).digest()

        def work(row: Row) -> Verdict:
            value = value_or_none(row.values, self.key) if self.key else None
            value = row.text if value is None else value
            # the ids 7 and "7" share a decision
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            data = text.encode("utf-8", "surrogatepass")
            number = int.from_bytes(blake2b(data, digest_size=8, key=seed).digest(), "little")
            return [row] if number < limit else "not in the sample"

        return work
