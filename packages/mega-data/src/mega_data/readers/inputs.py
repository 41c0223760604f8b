"""Expand `--input` to files, globs, folders, datasets saved or by name, or stdin, each with its format."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from mega_data.readers.adapters import Adapter
from mega_data.readers.compression import strip_extension
from mega_data.readers.file_tree import DROPPED, QUARANTINE, REPORT, FileResolver
from mega_data.readers.hub import HUB_PREFIX, HubDataset
from mega_data.readers.magic import HEAD_BYTES, check_format, detect_compression, name_compression
from mega_data.readers.versions import FileVersion, check_version, file_version, report_unreadable
from mega_schema.errors import CorruptFileError
from mega_schema.remote_files import is_remote

__all__ = [
    "DROPPED",
    "INPUT_FORMATS",
    "HUB_FORMAT",
    "QUARANTINE",
    "REPORT",
    "STDIN",
    "InputFile",
    "format_of_name",
    "expand_inputs",
]

log = logging.getLogger("mega.data")

STDIN = "-"
INPUT_FORMATS = ("jsonl", "text", "table", "csv")
HUB_FORMAT = "named"
WANTED_INPUT = "a file, a glob, a folder with .jsonl, .json, .csv, .txt or .parquet files, or - for stdin"
_FORMAT_OF = MappingProxyType(
    {
        ".arrow": "table",
        ".csv": "csv",
        ".json": "jsonl",
        ".jsonl": "jsonl",
        ".jsonlines": "jsonl",
        ".ndjson": "jsonl",
        ".parquet": "table",
        ".tsv": "csv",
        ".txt": "text",
    }
)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, a pipe, stdin when its path is `-`, or a dataset by its name.

    Attributes:
        format: one of INPUT_FORMATS, or HUB_FORMAT.
        adapter: converts its rows to documents; None: they are documents.
    """

    path: Path
    format: str
    adapter: Adapter | None = None

    @property
    def is_stdin(self) -> bool:
        return str(self.path) == STDIN

    @property
    def is_stream(self) -> bool:
        """Return whether its bytes can be read once: stdin, or a pipe such as `<(zcat a.gz)`."""
        return self.is_stdin or (self.format != HUB_FORMAT and self.path.is_fifo())

    @property
    def hub_dataset(self) -> HubDataset:
        """Parse the path of a dataset by name."""
        return HubDataset.parse(str(self.path))

    @property
    def compression(self) -> str:
        """Return its compression, by name or first bytes, as a file extension; "" for none."""
        return "" if self.is_stream or self.format == HUB_FORMAT else detect_compression(self.path)

    @property
    def size(self) -> int:
        """Return the bytes on disk; 0 if unknown."""
        return 0 if self.is_stream or self.format == HUB_FORMAT else self.path.stat().st_size

    def state(self) -> list[str | int]:
        """Return the identity of the content: path, size and mtime of a file; and the adapter's code."""
        code = [self.adapter.code] if self.adapter else []
        if self.format == HUB_FORMAT:
            return [str(self.path), self.hub_dataset.state(), *code]
        stat = self.path.stat()
        return [str(self.path.resolve()), stat.st_size, stat.st_mtime_ns, self.format, *code]

    def version(self) -> FileVersion:
        """Return size, inode and mtime of a file; () if it is missing, a stream or a hub dataset."""
        return () if self.is_stream or self.format == HUB_FORMAT else file_version(self.path)

    def check_version(self, before: FileVersion) -> None:
        """Check that no other process changed the file since `version` was `before`.

        Raises:
            FormatError: the file was rewritten, truncated, replaced or removed.
        """
        if before:
            check_version(self.path, before)


def expand_inputs(
    words: Sequence[str],
    file_format: str | None = None,
    wanted: str = WANTED_INPUT,
    adapter: Adapter | None = None,
) -> list[InputFile]:
    """Return the files that the words name, in order; those of a glob or a folder sorted by name.

    Args:
        file_format: format of all files; None uses the extension of each name, else JSON lines.
        wanted: description of valid words, for the error message.
        adapter: converts the rows of all files.

    Raises:
        ConfigError: a word names no file, or one of an unsupported format; see `readers.file_tree`.
    """
    files = FileResolver(lambda path: _extension(path) in _FORMAT_OF, wanted)
    inputs = dict[str, InputFile]()
    for word in words:
        if word == STDIN:
            inputs.setdefault(word, InputFile(Path(word), file_format or "jsonl"))
        elif word.startswith(HUB_PREFIX) and not is_remote(word):
            inputs.setdefault(word, InputFile(Path(HubDataset.parse(word).word), HUB_FORMAT))
        else:
            for path in files.resolve(word):
                inputs[str(path)] = _check_head(InputFile(path, file_format or format_of_name(path)))
    files.log_repeats()
    return [replace(item, adapter=adapter) for item in inputs.values()]


def _check_head(item: InputFile) -> InputFile:
    # a request for each file would take long; a remote file of another format is an error when it is read
    if not item.is_stream and not is_remote(item.path):
        if (ending := name_compression(item.path)) and item.path.is_file() and not item.size:
            log.warning("%s: 0 bytes, not even the header of %s: read as no document", item.path, ending)
        with suppress(CorruptFileError), report_unreadable(item.path):  # reported when it is read
            if not item.compression:
                with item.path.open("rb") as file:
                    check_format(item.path, item.format, file.read(HEAD_BYTES))
    return item


def format_of_name(path: Path) -> str:
    """Return the format that a file's name implies."""
    if str(path).startswith(HUB_PREFIX) and not is_remote(path):
        return HUB_FORMAT
    return _FORMAT_OF.get(_extension(path), "jsonl")


def _extension(path: Path) -> str:
    return Path(strip_extension(path)).suffix
