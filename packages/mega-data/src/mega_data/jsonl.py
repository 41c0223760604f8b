"""The texts of inputs, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mega_data.readers.inputs import Input, form_of
from mega_data.readers.streams import blocks


def texts(paths: Iterable[Path], key: str) -> Iterator[str]:
    """The text under `key` of every row of the files, whatever their form.

    Raises:
        FormatError: a row has no string there; the message begins with file and line.
    """
    for path in paths:
        first = 1
        for block in blocks(Input(path, form_of(path)), keys=[key]):
            rows = block.rows([key])
            for fault in rows.faults:
                raise fault.error(path, first)
            for (text,) in rows.texts:
                yield from [text] if isinstance(text, str) else text
            first += rows.count
