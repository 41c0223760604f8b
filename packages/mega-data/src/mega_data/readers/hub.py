"""Read datasets by the name that Hugging Face's `load_dataset` takes: on the hub, or a folder of data files.

    hf:NAME    hf:NAME:KEY=VALUE,KEY=VALUE    with the keys split (train), config and revision

Rows are streamed and not stored. Only a part of a split (`split=train[:1%]`) cannot be streamed: the library
downloads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, MegaError

HUB_PREFIX = "hf:"
_KEYS = ("split", "config", "revision")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A word of `--input` that names a dataset.

    Attributes:
        word: the complete word.
    """

    word: str
    name: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, word: str) -> HubDataset:
        """Parse a word `hf:NAME:KEY=VALUE,KEY=VALUE`.

        Raises:
            ConfigError: a key is unknown.
        """
        name, _, options = word.removeprefix(HUB_PREFIX).partition(":")
        values = dict[str, str]()
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            if key not in _KEYS or not value:
                from mega_schema.app.config import did_you_mean  # a tenth of the startup time, rarely needed

                hint = (did_you_mean(key, list(_KEYS)) if value else "") or f"{HUB_PREFIX}{name}:split=train"
                wanted = " | ".join(f"{key}=..." for key in _KEYS)
                raise ConfigError(
                    "--input", f"no option of {HUB_PREFIX}{name}", found=option, wanted=wanted, hint=hint
                )
            values[key] = value
        return cls(word, name, **values)

    def state(self) -> str:
        """Return the identity of the rows: the files of a folder, or the commit on the hub.

        Raises:
            ConfigError: there is no such dataset, or the hub cannot be reached.
        """
        with self._report_errors():
            return str(self._builder().hash)

    def batches(self, keys: Sequence[str] | None, start: int) -> Iterator[Any]:
        """Yield the columns `keys`, or all, of the rows from number `start`, as Arrow record batches.

        Raises:
            ConfigError: there is no such dataset, split or column, or the hub cannot be reached.
            MegaError: the dataset could not be read to its end.
        """
        with self._report_errors():
            builder = self._builder()
            if "[" in self.split:
                builder.download_and_prepare()
                rows = builder.as_dataset(split=self.split)
                rows = rows.select(range(min(start, len(rows)), len(rows)))
            else:
                rows = builder.as_streaming_dataset(split=self.split)
                rows = rows.skip(start) if start else rows
            names = list(rows.column_names or keys or ())
        heads = (key if key in names else key.partition(".")[0] for key in keys or ())
        columns = dict.fromkeys(names if keys is None else heads)
        if missing := [key for key in columns if key not in names]:
            found = ", ".join(names)
            raise ConfigError(self.word, f"no column {missing[0]!r}", found=found, hint="see --json-key")
        try:
            rows = rows.select_columns(list(columns)) if columns else rows
            for table in rows.with_format("arrow").iter(1000):
                yield from table.to_batches()
        except Exception as error:  # errors of many protocols without a common base class
            hint = "run the same command again to resume"
            raise MegaError(self.word, "not read to its end", found=_error_line(error), hint=hint) from None

    def _builder(self) -> Any:
        try:
            datasets = import_module("datasets")
        except ImportError:
            what, hint = "needs a library that is not installed", install_hint("mega-data", "datasets")
            raise ConfigError(self.word, what, wanted="datasets", hint=hint) from None
        return datasets.load_dataset_builder(self.name, self.config, revision=self.revision)

    @contextmanager
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except MegaError:
            raise
        except Exception as error:  # as above
            exists = Path(self.name).exists() or not isinstance(error, OSError)
            hint = (
                f"{HUB_PREFIX}NAME:config=...,split=..."
                if exists
                else "a folder or file needs no hf:; is the network there?"
            )
            raise ConfigError(
                self.word, "not a dataset that can be read", found=_error_line(error), hint=hint
            ) from None


def _error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
