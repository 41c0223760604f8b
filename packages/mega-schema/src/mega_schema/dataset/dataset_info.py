"""Metadata of a dataset, `PREFIX.json`, and the file names of a prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mega_schema.errors import FormatError
from mega_schema.tokenizer.identity import TokenizerIdentity

INFO_FORMAT = 1
COPY_AGAIN: Final = "copy it again; a dataset without this file opens too, and its tokenizer is not known"


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """The content of `PREFIX.json`.

    Attributes:
        tokenizer: the tokenizer that made the ids.
        documents, sequences, tokens: counts; IndexedWriter fills them in.
        sources: the files the text came from.
        options: other options that decided the content (the key of the text, whether an eod was appended,
            ...).
        format: version of this file's format.
    """

    tokenizer: TokenizerIdentity
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    sources: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    format: int = INFO_FORMAT

    def to_dict(self) -> dict[str, object]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        options, sources = dict(self.options), list(self.sources)
        return {**values, "tokenizer": self.tokenizer.to_dict(), "sources": sources, "options": options}

    @classmethod
    def from_dict(cls, values: object, where: object) -> DatasetInfo:
        """Build the info from a mapping of its fields.

        Raises:
            FormatError: a field is missing, unknown, or invalid.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        number = values.get("format") if isinstance(values, dict) else None
        if number != INFO_FORMAT:
            raise FormatError(where, "format number", found=number, wanted=INFO_FORMAT, hint=COPY_AGAIN)
        assert isinstance(values, dict)
        if set(values) != names:
            raise FormatError(where, "keys", found=sorted(values), wanted=sorted(names), hint=COPY_AGAIN)
        for name in ("documents", "sequences", "tokens"):
            if type(values[name]) is not int or values[name] < 0:
                raise FormatError(f"{where}: {name}", "not a count", found=values[name], hint=COPY_AGAIN)
        if not isinstance(values["options"], dict) or not isinstance(values["sources"], list):
            wanted = "an object and a list"
            raise FormatError(where, "options and sources", wanted=wanted, hint=COPY_AGAIN)
        tokenizer = TokenizerIdentity.from_dict(values["tokenizer"], f"{where}: tokenizer")
        return cls(**{**values, "tokenizer": tokenizer, "sources": tuple(map(str, values["sources"]))})


def sibling(prefix: Path, suffix: str) -> Path:
    """Return `PREFIX` + suffix, such as `PREFIX.idx`; the prefix may contain dots."""
    return prefix.with_name(prefix.name + suffix)
