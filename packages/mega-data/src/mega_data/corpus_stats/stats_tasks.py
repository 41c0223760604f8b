"""Count the documents of files and datasets, a task for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from mega_data.clean.language import Language
from mega_data.clean.stats import utf8_bytes
from mega_data.clean.step import Row
from mega_data.clean.urls import ascii_url, host_of
from mega_data.corpus_stats.frequent_values import FrequentValues
from mega_data.corpus_stats.length_bins import LengthBins
from mega_data.error_limit import error_counts
from mega_data.jsonl_shards import fail_on_row, file_bytes, file_states, read_documents
from mega_data.length_histogram import document_lengths
from mega_data.readers.nested_keys import value_or_none
from mega_data.task_stages import TaskResult, TaskStage, open_run_folder, read_results
from mega_data.texts import text_of
from mega_schema.dataset.indexed_dataset import IndexedDataset, sibling
from mega_schema.errors import FormatError
from mega_schema.outputs import dataset_files
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

_BATCH_CHARACTERS: Final = 1 << 20  # encoded at a time
NO_HOST: Final = "(none)"  # documents without a URL
DOMAINS: Final = "domains"
LANGUAGES: Final = "languages"


@dataclass(frozen=True, slots=True)
class CountedValues:
    """What to count besides characters and bytes.

    Attributes:
        json_key: key of the text.
        url_key: key of the address; "" counts no domains.
        languages: identify the language of each text.
        language_model: a fastText file; "" uses py3langid.
        keys: keys whose values are counted.
        tokenizer: type and files as of `open_tokenizer`; None counts no tokens.
    """

    json_key: str = "text"
    url_key: str = ""
    languages: bool = False
    language_model: str = ""
    keys: tuple[str, ...] = ()
    tokenizer: tuple[tuple[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class CorpusStats:
    """A run that counts the documents of files and of datasets.

    Attributes:
        skip: count lines that are not documents; otherwise the first one ends the run.
    """

    inputs: tuple[Path, ...]
    datasets: tuple[IndexedDataset, ...]
    values: CountedValues
    work: Path
    skip: bool

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run, or a library or file is missing.
        """
        if self.values.languages:
            self._language().start()
        files = [file for data in self.datasets for file in dataset_files(data.prefix) if file.exists()]
        values = {name: str(value) for name, value in asdict(self.values).items()}
        wanted = {"inputs": file_states([*self.inputs, *files]), "values": values, "skip": self.skip}
        open_run_folder(self.work, {**wanted, "datasets": [str(data.prefix) for data in self.datasets]})

    def stages(self) -> list[TaskStage]:
        """Return the stage."""
        sizes = [*map(file_bytes, self.inputs)]
        sizes += [file_bytes(sibling(data.prefix, ".idx")) for data in self.datasets]
        return [TaskStage("count", len(sizes), self.count, sizes=tuple(sizes))]

    def count(self, task: int) -> TaskResult:
        """Count the documents of a file or a dataset."""
        if task >= len(self.inputs):
            return self._count_dataset(self.datasets[task - len(self.inputs)])
        path = self.inputs[task]
        lengths = {name: LengthBins() for name in ("characters", "bytes")}
        frequent = dict[str, FrequentValues]()
        if self.values.url_key:
            frequent[DOMAINS] = FrequentValues()
        if self.values.languages:
            frequent[LANGUAGES] = FrequentValues()
        frequent |= {key: FrequentValues() for key in self.values.keys}
        tokens = _TokenCounter(self.values.tokenizer)
        errors = _SkippedLines(path)
        identify = self._language().start() if self.values.languages else None
        key = self.values.json_key
        for number, _, values in read_documents(path, key, errors if self.skip else fail_on_row):
            text = text_of(values, key)
            lengths["characters"].add(len(text))
            lengths["bytes"].add(utf8_bytes(text))
            tokens.add(text)
            if self.values.url_key:
                frequent[DOMAINS].add(_domain(value_or_none(values, self.values.url_key)))
            if identify:
                verdict = identify(Row(values, key, task, number))
                assert not isinstance(verdict, str), "keeps all languages"
                frequent[LANGUAGES].add(str(verdict[0].values["language"]))
            for name in self.values.keys:
                frequent[name].add(_text_of_value(value_or_none(values, name)))
        bins = {**lengths, **({"tokens": tokens.finish()} if self.values.tokenizer else {})}
        documents = lengths["characters"].count
        return {
            "lengths": {name: counts.to_dict() for name, counts in bins.items()},
            "frequent": {name: counts.to_dict() for name, counts in frequent.items()},
            "read": file_bytes(path),
            "documents": documents,
            "skipped": errors.count,
            **error_counts(errors.count, errors.first, documents + errors.count),
        }

    def _language(self) -> Language:
        return Language(model=self.values.language_model)

    def _count_dataset(self, data: IndexedDataset) -> TaskResult:
        lengths = LengthBins()
        for chunk in document_lengths(data):
            for length, times in zip(*np.unique(chunk, return_counts=True), strict=True):
                lengths.add(int(length), int(times))
        size = file_bytes(sibling(data.prefix, ".idx"))
        counts = {"read": size, "documents": lengths.count, "skipped": 0}
        return {"lengths": {"tokens": lengths.to_dict()}, "frequent": {}, **counts}

    def report(self) -> dict[str, Any]:
        """Return the statistics of all tasks, and the counts of each input."""
        results = read_results(self.stages()[0], self.work)
        names = [*self.inputs, *(data.prefix for data in self.datasets)]
        return {
            "documents": sum(result["documents"] for result in results),
            "skipped": sum(result["skipped"] for result in results),
            "lengths": {
                name: LengthBins.sum_of(result["lengths"][name] for result in part).summary()
                for name, part in _by_name(results, "lengths")
            },
            "frequent": {
                name: FrequentValues.sum_of(result["frequent"][name] for result in part).summary(_TOP)
                for name, part in _by_name(results, "frequent")
            },
            "inputs": [
                {
                    "input": str(name),
                    "documents": result["documents"],
                    **{kind: counts["total"] for kind, counts in result["lengths"].items()},
                }
                for name, result in zip(names, results, strict=True)
            ],
        }


_TOP: Final = 1000  # values in the report


def _by_name(results: Sequence[TaskResult], kind: str) -> Iterable[tuple[str, list[TaskResult]]]:
    """Yield each name of counts and the results that have it, in the order of the first."""
    for name in dict.fromkeys(name for result in results for name in result[kind]):
        yield name, [result for result in results if name in result[kind]]


class _TokenCounter:
    """Counts the tokens of texts in batches; memory holds about a megabyte of text."""

    def __init__(self, options: tuple[tuple[str, Any], ...] | None) -> None:
        self._tokenizer = None if options is None else _open_cached(options)
        self._lengths = LengthBins()
        self._texts = list[str]()
        self._characters = 0

    def add(self, text: str) -> None:
        if self._tokenizer is None:
            return
        self._texts.append(text)
        self._characters += len(text)
        if self._characters >= _BATCH_CHARACTERS:
            self.finish()

    def finish(self) -> LengthBins:
        """Encode the waiting texts; return the counts."""
        if self._tokenizer is not None:
            for ids in self._tokenizer.encode_batch(self._texts):
                self._lengths.add(len(ids))
        self._texts.clear()
        self._characters = 0
        return self._lengths


@lru_cache(maxsize=1)
def _open_cached(options: tuple[tuple[str, Any], ...]) -> Tokenizer:
    return open_tokenizer(**dict(options))


class _SkippedLines:
    """Counts the lines of a file that are not documents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.first = ""

    def __call__(self, number: int, error: FormatError, line: bytes) -> None:
        self.first = self.first or f"{self.path}:{number}, {error.what}"
        self.count += 1


def _domain(url: object) -> str:
    return host_of(ascii_url(url)).removeprefix("www.") or NO_HOST if isinstance(url, str) else NO_HOST


def _text_of_value(value: object) -> str:
    return value if isinstance(value, str) else NO_HOST if value is None else str(value)
