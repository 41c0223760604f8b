"""What `--input` means: files, globs, folders, datasets saved or by name, or stdin, each with its form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mega_data.readers.file_tree import DROPPED, QUARANTINE, REPORT, FileResolver
from mega_data.readers.hub import PREFIX, Named
from mega_data.readers.magic import HEAD_BYTES, check_form, compression
from mega_data.readers.packed import Version, check_version, file_version, unpacked_name

__all__ = ["DROPPED", "FORMS", "NAMED", "QUARANTINE", "REPORT", "STDIN", "Input", "form_of", "found"]

STDIN = "-"
FORMS = ("jsonl", "text", "table")
NAMED = "named"
_FORM_OF = MappingProxyType(
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
class Input:
    """A file, a pipe, stdin when its path is `-`, or a dataset by its name.

    Attributes:
        form: one of FORMS, or NAMED.
    """

    path: Path
    form: str

    @property
    def stdin(self) -> bool:
        return str(self.path) == STDIN

    @property
    def stream(self) -> bool:
        """Whether its bytes can be read once: stdin, or a pipe such as `<(zcat a.gz)`."""
        return self.stdin or (self.form != NAMED and self.path.is_fifo())

    @property
    def named(self) -> Named:
        """What a path that is a name means."""
        return Named.parse(str(self.path))

    @property
    def packing(self) -> str:
        """Its compression, by its name or first bytes, as the ending of a name; "" without one."""
        return "" if self.stream or self.form == NAMED else compression(self.path)

    @property
    def size(self) -> int:
        """Bytes on disk; 0 where they are not known."""
        return 0 if self.stream or self.form == NAMED else self.path.stat().st_size

    def state(self) -> list[str | int]:
        """What tells that it is still the same: of a file its path, size and time of change."""
        if self.form == NAMED:
            return [str(self.path), self.named.state()]
        stat = self.path.stat()
        return [str(self.path.resolve()), stat.st_size, stat.st_mtime_ns, self.form]

    def version(self) -> Version:
        """Size, inode and time of change of a file; () of one that is gone, of a stream and of a name."""
        return () if self.stream or self.form == NAMED else file_version(self.path)

    def check_version(self, before: Version) -> None:
        """See that no other process changed the file since `version` was `before`.

        Raises:
            FormatError: it was rewritten, cut off, replaced or removed.
        """
        if before:
            check_version(self.path, before)


def found(words: Sequence[str], form: str | None = None) -> list[Input]:
    """The files that the words name, in their order; those of a glob or a folder in the order of their names.

    Args:
        form: of all of them; None goes by the ending of each name, and any other name holds JSON lines.

    Raises:
        ConfigError: a word names nothing, or a file of a form that is not read; see `resolve_files`.
    """
    wanted = "a file, a glob, a folder with .jsonl, .json, .txt or .parquet files, or - for stdin"
    files, inputs = FileResolver(lambda path: _ending(path) in _FORM_OF, wanted), dict[str, Input]()
    for word in words:
        if word == STDIN:
            inputs.setdefault(word, Input(Path(word), form or "jsonl"))
        elif word.startswith(PREFIX):
            inputs.setdefault(word, Input(Path(Named.parse(word).word), NAMED))
        else:
            for path in files.resolve(word):
                inputs[str(path)] = _checked(Input(path, form or form_of(path)))
    files.log_repeats()
    return list(inputs.values())


def _checked(given: Input) -> Input:
    if not given.stream and not given.packing:
        with given.path.open("rb") as file:
            check_form(given.path, given.form, file.read(HEAD_BYTES))
    return given


def form_of(path: Path) -> str:
    """The form that a file's name tells."""
    if str(path).startswith(PREFIX):
        return NAMED
    return _FORM_OF.get(_ending(path), "jsonl")


def _ending(path: Path) -> str:
    return Path(unpacked_name(path)).suffix
