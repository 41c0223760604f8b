"""The sources of a mix: datasets with weights, and how often each is read."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_schema.dataset.indexed_dataset import IndexedDataset, open_dataset, sibling
from mega_schema.errors import ConfigError

OPTION = "--data-path"
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class MixSource:
    """A dataset and its share.

    Attributes:
        weight: relative share of the tokens; None: as many as the dataset has.
    """

    data: IndexedDataset
    weight: float | None

    @property
    def prefix(self) -> Path:
        return self.data.prefix

    @property
    def documents(self) -> int:
        return len(self.data.documents) - 1


@dataclass(frozen=True, slots=True)
class DocumentRange:
    """Documents `first` to `last` - 1 of a source: the input of a task."""

    source: int
    first: int
    last: int


def parse_weights(option: str, words: Sequence[str], suffix: str) -> list[tuple[Path, float | None]]:
    """Parse prefixes or files, with a weight before each or before none.

    Args:
        suffix: a number is a name if there is a file with this suffix.

    Raises:
        ConfigError: weights and names do not alternate, or a weight is not above 0.
    """
    numbers = [_parse_number(word) for word in words]
    if len(words) > 1 and len(words) % 2 == 0 and None not in numbers[::2]:
        pairs = [(Path(word), number) for word, number in zip(words[1::2], numbers[::2], strict=True)]
    else:
        for position, number in enumerate(numbers):
            if number is not None and not sibling(Path(words[position]), suffix).exists():
                what, wanted = "weights and prefixes do not alternate", "a weight before each prefix, or none"
                found, hint = " ".join(words), f"{option} 0.3 A 0.7 B"
                raise ConfigError(option, what, found=found, wanted=wanted, hint=hint)
        pairs = [(Path(word), None) for word in words]
    for path, number in pairs:
        if number is not None and not 0 < number < math.inf:
            raise ConfigError(option, "not a weight", found=f"{number:g} {path}", wanted="a number above 0")
    return pairs


def parse_sources(words: Sequence[str]) -> tuple[MixSource, ...]:
    """Open the datasets of a blend as `mega-train --data-path` takes it: prefixes, or WEIGHT PREFIX pairs.

    Raises:
        ConfigError: as `parse_weights`, or a dataset is named twice or has no tokens.
        FormatError: a dataset is missing or damaged.
    """
    pairs = parse_weights(OPTION, words, ".idx")
    sources = tuple(MixSource(open_dataset(path), weight) for path, weight in pairs)
    seen = set[Path]()
    for source in sources:
        if (path := source.prefix.resolve()) in seen:
            hint = "name it once, with the sum of the weights"
            raise ConfigError(OPTION, "names a dataset twice", found=source.prefix, hint=hint)
        seen.add(path)
        if not source.data.tokens:
            raise ConfigError(OPTION, "names a dataset without tokens", found=source.prefix)
    return sources


def _parse_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_fractions(split: str) -> tuple[float, ...]:
    """Parse `--split`, numbers such as 969,30,1, into fractions of SPLITS that add up to 1.

    Raises:
        ConfigError: the text is something else.
    """
    try:
        numbers = [float(number) for number in split.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(0 <= n < math.inf for n in numbers) or not numbers[0]:
        wanted = "up to three numbers, the first above 0, such as 969,30,1"
        raise ConfigError("--split", "is not three shares", found=repr(split), wanted=wanted)
    numbers += [0.0] * (3 - len(numbers))
    return tuple(number / sum(numbers) for number in numbers)


def training_epochs(
    sources: Sequence[MixSource], training_fraction: float, tokens: int | None
) -> tuple[float, ...]:
    """Return how often each source's training documents are read, so that the shares follow the weights.

    Args:
        training_fraction: of the documents.
        tokens: training tokens of the mix; None: as many as all sources have together.
    """
    available = [source.data.tokens * training_fraction for source in sources]
    return balance_epochs(available, [source.weight for source in sources], tokens)


def balance_epochs(
    available: Sequence[float], weights: Sequence[float | None], total: float | None
) -> tuple[float, ...]:
    """Return how often each source is read, so that the shares of the sizes follow the weights.

    Args:
        available: size of each source.
        weights: None: the size.
        total: size of the mix; None: that of all sources.
    """
    total = sum(available) if total is None else total
    shares = [size if weight is None else weight for weight, size in zip(weights, available, strict=True)]
    return tuple(
        total * share / sum(shares) / size if size else 0.0
        for share, size in zip(shares, available, strict=True)
    )


def divide_source(source: MixSource, number: int, size: int, documents: int) -> list[DocumentRange]:
    """Divide a source into ranges of about `size` bytes of ids, of at most `documents` documents.

    A document that is larger is a range of its own. Reads a few entries of the index for each range.
    """
    data = source.data
    ranges = list[DocumentRange]()
    first = 0
    while first < source.documents:
        end_byte = _byte_of(data, first) + size
        limit = min(first + documents, source.documents)
        # bisect and not searchsorted, which would copy the whole index: it is not aligned
        last = bisect_left(range(limit + 1), end_byte + 1, first, limit, key=lambda d: _byte_of(data, d)) - 1
        last = limit if _byte_of(data, limit) <= end_byte else max(first + 1, last)
        ranges.append(DocumentRange(number, first, last))
        first = last
    return ranges


def _byte_of(data: IndexedDataset, document: int) -> int:
    """Return the byte of the .bin at which a document begins, or the last one ends."""
    sequence = int(data.documents[document])
    return int(data.pointers[sequence]) if sequence < len(data) else data.tokens * data.dtype.itemsize
