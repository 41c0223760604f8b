"""What `--input` means: files, globs, folders, datasets saved or by name, or stdin, each with its form."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mega_data.readers.hub import PREFIX, Named
from mega_data.readers.packed import PACKED, unpacked_name
from mega_schema.errors import ConfigError

log = logging.getLogger("mega.data")

STDIN = "-"
FORMS = ("jsonl", "text", "table")
NAMED = "named"
# what clean and dedup write beside the documents they keep
DROPPED, QUARANTINE, REPORT = "dropped", "quarantine", "report.json"
_NOT_KEPT = frozenset({DROPPED, QUARANTINE, REPORT})
_FORM_OF = MappingProxyType(
    {
        ".arrow": "table",
        ".json": "jsonl",
        ".jsonl": "jsonl",
        ".ndjson": "jsonl",
        ".parquet": "table",
        ".txt": "text",
    }
)


@dataclass(frozen=True, slots=True)
class Input:
    """A file, or stdin when its path is `-`, or a dataset by its name.

    Attributes:
        form: one of FORMS, or NAMED.
    """

    path: Path
    form: str

    @property
    def stdin(self) -> bool:
        return str(self.path) == STDIN

    @property
    def named(self) -> Named:
        """What a path that is a name means."""
        return Named.parse(str(self.path))

    @property
    def packing(self) -> str:
        """The ending of its compression, "" without one."""
        return self.path.suffix if self.path.suffix in PACKED else ""

    @property
    def size(self) -> int:
        """Bytes on disk; 0 where they are not known."""
        return 0 if self.stdin or self.form == NAMED else self.path.stat().st_size

    def state(self) -> list[str | int]:
        """What tells that it is still the same: of a file its path, size and time of change."""
        if self.form == NAMED:
            return [str(self.path), self.named.state()]
        stat = self.path.stat()
        return [str(self.path.resolve()), stat.st_size, stat.st_mtime_ns, self.form]


def found(words: Sequence[str], form: str | None = None) -> list[Input]:
    """The files that the words name, in their order; those of a glob or a folder in the order of their names.

    Args:
        form: of all of them; None goes by the ending of each name, and any other name holds JSON lines.

    Raises:
        ConfigError: a word names nothing.
    """
    inputs = list[Input]()
    for word in words:
        if word.startswith(PREFIX):
            inputs.append(Input(Path(Named.parse(word).word), NAMED))
            continue
        paths = list(_paths(word))
        if not paths:
            wanted = "a file, a glob, a folder with .jsonl, .json, .txt or .parquet files, or - for stdin"
            raise ConfigError("--input", "no files there", found=word, wanted=wanted)
        inputs += [Input(path, form or form_of(path)) for path in paths]
    return inputs


def form_of(path: Path) -> str:
    """The form that a file's name tells."""
    if str(path).startswith(PREFIX):
        return NAMED
    return _FORM_OF.get(_ending(path), "jsonl")


def _paths(word: str) -> Iterable[Path]:
    path = Path(word)
    if word == STDIN or path.is_file():
        return [path]
    if path.is_dir():
        inner = _files_in(path)
        if (path / "state.json").exists():  # a dataset that Hugging Face's save_to_disk wrote
            return [p for p in inner if p.suffix == ".arrow"]
        return [p for p in inner if _ending(p) in _FORM_OF]
    return sorted(Path(name) for name in glob.glob(word, recursive=True) if Path(name).is_file())  # noqa: PTH207


def _files_in(folder: Path) -> list[Path]:
    """All files below a folder, but for hidden ones and those of documents that were not kept."""
    found, passed = list[Path](), set[str]()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if not_kept := _NOT_KEPT.intersection(parts):
            passed |= not_kept
        elif path.is_file() and not any(part.startswith(".") for part in parts):
            found.append(path)
    if passed:
        log.warning("%s: read without %s: what was not kept", folder, " and ".join(sorted(passed)))
    return found


def _ending(path: Path) -> str:
    return Path(unpacked_name(path)).suffix
