"""Parse the datasets of each split from the flags of Megatron's scripts.

--data-path P                               one dataset, divided in three by --split
--data-path 0.3 A 0.7 B                     a blend of two by weight, each divided in three
--data-path A B                             a blend by size
--train-data-path … --valid-data-path …     whole datasets, or blends of them, for each split
--train-weighted-split-paths "T: 0.3 0:0.9 A, 0.7 0:1 B" …    BigScience's: a range of each dataset
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mega_schema.dataset.dataset_info import sibling
from mega_schema.errors import ConfigError
from mega_schema.remote_files import is_remote, path_of
from mega_train.config import DataConfig
from mega_train.config.data import BlendRule, SplitRule
from mega_train.data.splits import Range, fraction_range, parse_split, split_ranges

DEFAULT_SPLIT = "969, 30, 1"
USES = ("training", "validation", "test")
# BigScience shuffles the last epoch separately below this fraction of it, Megatron below 0.80
BIGSCIENCE_SEPARATE_BELOW = 0.95


@dataclass(frozen=True, slots=True)
class SplitFraction:
    """The range that --split gives one split: 0 training, 1 validation, 2 test."""

    split: str
    rule: SplitRule
    index: int

    def sequence_range(self, sequences: int) -> Range:
        return split_ranges(self.split, sequences, self.rule)[self.index]


@dataclass(frozen=True, slots=True)
class FractionRange:
    """The range between two fractions of a dataset."""

    begin: float = 0.0
    end: float = 1.0

    def sequence_range(self, sequences: int) -> Range:
        return fraction_range(self.begin, self.end, sequences)


@dataclass(frozen=True, slots=True)
class DatasetRange:
    """A range of a dataset's sequences."""

    prefix: Path
    fraction: SplitFraction | FractionRange


@dataclass(frozen=True, slots=True)
class SplitSource:
    """The datasets of one split.

    Attributes:
        name: of the split ("training"), or the name of a group.
        flag: the flag that names them.
        weights: of the parts; None weighs them by their size.
        separate_below: fraction of the last epoch that must be needed for it to be shuffled with the others.
        blend_rule: whether the blend uses all samples that are built of its parts.
    """

    name: str
    flag: str
    parts: tuple[DatasetRange, ...]
    weights: tuple[float, ...] | None = None
    separate_below: float = 0.80
    blend_rule: BlendRule = "surplus"


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The datasets of all splits; there may be several or no validation and test groups."""

    training: SplitSource
    validation: tuple[SplitSource, ...] = ()
    test: tuple[SplitSource, ...] = ()

    def __iter__(self) -> Iterator[SplitSource]:
        yield from (self.training, *self.validation, *self.test)


def parse_data_spec(data: DataConfig) -> DataSpec:
    """Parse the data flags into the datasets of each split.

    Raises:
        ConfigError: no datasets are named, or flags exclude each other, or a value cannot be parsed.
    """
    by_split = _flag_words("--data-path", data.path, "--data-args-path", data.path_file)
    by_use = _per_split_words(data)
    groups = [
        _flag_words(f"--{use}-weighted-split-paths", group_words, f"--{use}-weighted-split-paths-path", file)
        for use, group_words, file in (
            ("train", data.train_group, data.train_group_file),
            ("valid", data.valid_groups, data.valid_groups_file),
            ("test", data.test_groups, data.test_groups_file),
        )
    ]
    flag_used = {
        "--data-path": bool(by_split),
        "--train-data-path": any(by_use),
        "--train-weighted-split-paths": any(groups),
    }
    flags = [flag for flag, used in flag_used.items() if used]
    if len(flags) > 1:
        raise ConfigError(flags[1], "excludes " + flags[0], found="both", wanted="only one of them")
    if not flags:
        raise ConfigError(
            "--data-path", "missing", wanted="prefix of an indexed dataset", hint="--data-path P"
        )
    if data.split is not None and not by_split:
        raise ConfigError(
            "--split",
            f"splits the datasets of --data-path, but {flags[0]} already defines the splits",
            found=repr(data.split),
            hint="leave --split out",
        )
    if by_split:
        return _split_in_three(by_split, data)
    if any(by_use):
        training, *optional = (
            _whole_datasets(use, words, data.blend_rule) for use, words in enumerate(by_use)
        )
        return DataSpec(
            _require_training(training, "--train-data-path"),
            *((source,) if source else () for source in optional),
        )
    return _parse_groups(groups)


def _split_in_three(words: Sequence[str], data: DataConfig) -> DataSpec:
    split = DEFAULT_SPLIT if data.split is None else data.split
    prefixes, weights = _parse_blend("--data-path", words)
    training, validation, test = (
        SplitSource(
            name,
            "--data-path",
            tuple(DatasetRange(prefix, SplitFraction(split, data.split_rule, use)) for prefix in prefixes),
            weights,
            blend_rule=data.blend_rule,
        )
        for use, name in enumerate(USES)
    )
    with_shares = [share > 0 for share in parse_split(split)]
    return DataSpec(training, (validation,) * with_shares[1], (test,) * with_shares[2])


def _whole_datasets(use: int, words: Sequence[str], rule: BlendRule) -> SplitSource | None:
    if not words:
        return None
    flag = f"--{('train', 'valid', 'test')[use]}-data-path"
    prefixes, weights = _parse_blend(flag, words)
    parts = tuple(DatasetRange(prefix, FractionRange()) for prefix in prefixes)
    # a single dataset is no blend here, whatever its weight; with --data-path it is one
    return SplitSource(USES[use], flag, parts, weights if len(parts) > 1 else None, blend_rule=rule)


def _require_training(training: SplitSource | None, flag: str) -> SplitSource:
    if training is None:
        raise ConfigError(flag, "missing", wanted="training data", hint=f"{flag} P")
    return training


def _per_split_words(data: DataConfig) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    file = data.split_paths_file
    words_of_splits = (data.train_path, data.valid_path, data.test_path)
    if file is None:
        return words_of_splits
    if any(words_of_splits):
        raise ConfigError(
            "--per-split-data-args-path", "excludes --train-data-path", found="both", wanted="one of them"
        )
    try:
        content = json.loads(_read_text("--per-split-data-args-path", file))
    except ValueError as error:
        raise ConfigError(file, "is not JSON", found=error) from None
    if not isinstance(content, dict) or not set(content) <= {"train", "valid", "test"}:
        found = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ConfigError(file, "keys", found=found, wanted="train, valid and test")
    lists = [content.get(use) or [] for use in ("train", "valid", "test")]
    for use, words in zip(("train", "valid", "test"), lists, strict=True):
        if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
            raise ConfigError(f"{file}: {use}", "not a list of words", found=words)
    train, valid, test = ([_find_beside(file, str(word)) for word in words] for words in lists)
    return train, valid, test


def _find_beside(file: Path, word: str) -> str:
    """Return a word of a file of lists; a relative prefix with the file's folder if it has such a dataset.

    Other relative prefixes begin at the current folder, as in Megatron.

    Raises:
        ConfigError: there is a different dataset of this name in each of the two folders.
    """
    prefix = file.parent / word
    if _parse_number(word) is not None or is_remote(word) or not sibling(prefix, ".idx").exists():
        return word
    index = sibling(Path(word), ".idx")
    if index.exists() and not index.samefile(sibling(prefix, ".idx")):
        what, hint = "names two datasets", f"write one of them: {prefix.resolve()}"
        raise ConfigError(f"{file}: {word}", what, found=f"{prefix} and {index.with_suffix('')}", hint=hint)
    return str(prefix)


def _parse_blend(flag: str, words: Sequence[str]) -> tuple[list[Path], tuple[float, ...] | None]:
    """Parse prefixes, with weights if every other word is a number.

    As in Megatron core, an odd number of words, or a word in a weight's place that is no number, means
    prefixes only. A number without a dataset of that name is then an error.
    """
    if any(not word.strip() for word in words):
        raise ConfigError(flag, "has an empty word", wanted="a prefix", hint="is a shell variable unset?")
    numbers = [_parse_number(word) for word in words]
    if len(words) > 1 and len(words) % 2 == 0 and None not in numbers[::2]:
        weights = [number for number in numbers[::2] if number is not None]
        for word, weight in zip(words[::2], weights, strict=True):
            if not 0 < weight < math.inf:
                raise ConfigError(flag, "not a weight", found=word, wanted="a number above 0")
        return [path_of(word.strip()) for word in words[1::2]], tuple(weights)
    for position, number in enumerate(numbers):
        if number is not None and not sibling(Path(words[position]), ".idx").exists():
            _raise_unpaired(flag, words, numbers)
    return [path_of(word.strip()) for word in words], None


def _raise_unpaired(flag: str, words: Sequence[str], numbers: Sequence[float | None]) -> NoReturn:
    """Raise an error at the position where weights and prefixes stop alternating."""
    position = next((i for i, number in enumerate(numbers) if (number is None) == (i % 2 == 0)), len(words))
    context = f"after {' '.join(words[max(0, position - 2) : position])}" if position else "first"
    raise ConfigError(
        flag,
        "weights and prefixes do not alternate",
        found=f"{repr(words[position]) if position < len(words) else 'nothing'} {context}",
        wanted="a prefix" if position % 2 else "a weight",
        hint=f"{flag} 0.3 A 0.7 B",
    )


def _parse_groups(groups: Sequence[Sequence[str]]) -> DataSpec:
    flags = [f"--{use}-weighted-split-paths" for use in ("train", "valid", "test")]
    if len(groups[0]) != 1:
        raise ConfigError(
            flags[0],
            "only one training group is allowed",
            found=f"{len(groups[0])} groups",
            wanted="'NAME: WEIGHT START:END PREFIX, ...'",
            hint="quotes around the group",
        )
    parsed = [[_parse_group(flag, text) for text in texts] for flag, texts in zip(flags, groups, strict=True)]
    for flag, sources in zip(flags, parsed, strict=True):
        names = [source.name for source in sources]
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(flag, "two groups of one name", found=duplicate)
    return DataSpec(parsed[0][0], tuple(parsed[1]), tuple(parsed[2]))


def _parse_group(flag: str, text: str) -> SplitSource:
    """Parse BigScience's "NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX"."""
    name, colon, datasets_text = text.partition(":")
    ranges, weights = [], []
    for part in datasets_text.split(","):
        words = part.split()
        weight = _parse_number(words[0]) if len(words) == 3 else None
        ends = [_parse_number(end) for end in words[1].split(":")] if len(words) == 3 else []
        if not colon or weight is None or not 0 < weight < math.inf or len(ends) != 2 or None in ends:
            raise ConfigError(
                flag,
                "not a part of a group",
                found=repr(part.strip() if colon else text),
                wanted="NAME: WEIGHT START:END PREFIX, ...",
                hint=f"{flag} 'TRAIN: 0.3 0:0.6 A, 0.7 0:1 B'",
            )
        begin, end = (number for number in ends if number is not None)
        if not 0 <= begin < end <= 1:
            raise ConfigError(
                flag, "not a range", found=words[1], wanted="two fractions from 0 to 1, the smaller first"
            )
        ranges.append(DatasetRange(path_of(words[2]), FractionRange(begin, end)))
        weights.append(weight)
    # a single dataset gets no surplus of 0.5 %
    weight_tuple = tuple(weights) if len(ranges) > 1 else None
    return SplitSource(name.strip(), flag, tuple(ranges), weight_tuple, BIGSCIENCE_SEPARATE_BELOW)


def _flag_words(flag: str, values: Sequence[str], file_flag: str, file: Path | None) -> Sequence[str]:
    """Return the words of a flag, or of the file given in its place."""
    if file is None:
        return values
    if values:
        raise ConfigError(file_flag, f"excludes {flag}", found="both", wanted="one of them")
    try:
        words = shlex.split(_read_text(file_flag, file))
    except ValueError as error:
        raise ConfigError(file, "quotes are left open", found=error) from None
    if not words:
        raise ConfigError(file, "is empty", wanted=f"what would follow {flag}")
    return words


def _read_text(flag: str, file: Path) -> str:
    if not file.is_file():
        raise ConfigError(flag, "no such file", found=file)
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(file, "is not text", found=error.reason) from None


def _parse_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
