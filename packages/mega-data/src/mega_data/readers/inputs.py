"""What `--input` means: files, globs, folders, datasets saved or by name, or stdin, each with its form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mega_data.readers.compression import strip_extension
from mega_data.readers.file_tree import DROPPED, QUARANTINE, REPORT, FileResolver
from mega_data.readers.hub import HUB_PREFIX, HubDataset
from mega_data.readers.magic import HEAD_BYTES, check_format, detect_compression
from mega_data.readers.versions import FileVersion, check_version, file_version

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

STDIN = "-"
INPUT_FORMATS = ("jsonl", "text", "table")
HUB_FORMAT = "named"
_FORMAT_OF = MappingProxyType(
    {
        ".arrow": "table",
        ".json": "jsonl",
        ".jsonl": "jsonl",
        ".jsonlines": "jsonl",
        ".ndjson": "jsonl",
        ".parquet": "table",
        ".txt": "text",
    }
)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, a pipe, stdin when its path is `-`, or a dataset by its name.

    Attributes:
        form: one of FORMS, or NAMED.
    """

    path: Path
    format: str

    @property
    def is_stdin(self) -> bool:
        return str(self.path) == STDIN

    @property
    def is_stream(self) -> bool:
        """Whether its bytes can be read once: stdin, or a pipe such as `<(zcat a.gz)`."""
        return self.is_stdin or (self.format != HUB_FORMAT and self.path.is_fifo())

    @property
    def hub_dataset(self) -> HubDataset:
        """What a path that is a name means."""
        return HubDataset.parse(str(self.path))

    @property
    def compression(self) -> str:
        """Its compression, by its name or first bytes, as the ending of a name; "" without one."""
        return "" if self.is_stream or self.format == HUB_FORMAT else detect_compression(self.path)

    @property
    def size(self) -> int:
        """Bytes on disk; 0 where they are not known."""
        return 0 if self.is_stream or self.format == HUB_FORMAT else self.path.stat().st_size

    def state(self) -> list[str | int]:
        """What tells that it is still the same: of a file its path, size and time of change."""
        if self.format == HUB_FORMAT:
            return [str(self.path), self.hub_dataset.state()]
        stat = self.path.stat()
        return [str(self.path.resolve()), stat.st_size, stat.st_mtime_ns, self.format]

    def version(self) -> FileVersion:
        """Size, inode and time of change of a file; () of one that is gone, of a stream and of a name."""
        return () if self.is_stream or self.format == HUB_FORMAT else file_version(self.path)

    def check_version(self, before: FileVersion) -> None:
        """See that no other process changed the file since `version` was `before`.

        Raises:
            FormatError: it was rewritten, cut off, replaced or removed.
        """
        if before:
            check_version(self.path, before)


def expand_inputs(words: Sequence[str], file_format: str | None = None) -> list[InputFile]:
    """The files that the words name, in their order; those of a glob or a folder in the order of their names.

    Args:
        form: of all of them; None goes by the ending of each name, and any other name holds JSON lines.

    Raises:
        ConfigError: a word names nothing, or a file of a form that is not read; see `resolve_files`.
    """
    wanted = "a file, a glob, a folder with .jsonl, .json, .txt or .parquet files, or - for stdin"
    files, inputs = FileResolver(lambda path: _extension(path) in _FORMAT_OF, wanted), dict[str, InputFile]()
    for word in words:
        if word == STDIN:
            inputs.setdefault(word, InputFile(Path(word), file_format or "jsonl"))
        elif word.startswith(HUB_PREFIX):
            inputs.setdefault(word, InputFile(Path(HubDataset.parse(word).word), HUB_FORMAT))
        else:
            for path in files.resolve(word):
                inputs[str(path)] = _check_head(InputFile(path, file_format or format_of_name(path)))
    files.log_repeats()
    return list(inputs.values())


def _check_head(item: InputFile) -> InputFile:
    if not item.is_stream and not item.compression:
        with item.path.open("rb") as file:
            check_format(item.path, item.format, file.read(HEAD_BYTES))
    return item


def format_of_name(path: Path) -> str:
    """The form that a file's name tells."""
    if str(path).startswith(HUB_PREFIX):
        return HUB_FORMAT
    return _FORMAT_OF.get(_extension(path), "jsonl")


def _extension(path: Path) -> str:
    return Path(strip_extension(path)).suffix
