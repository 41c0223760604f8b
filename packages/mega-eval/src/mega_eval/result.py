"""The result of an evaluation: a table on the terminal, and a JSON file with all settings to reproduce it.

The file, format 1, is one object:

    format         1
    task           "lambada" | "wikitext103" | "perplexity"
    scores         name -> number; the docstring of the task's module defines each
    counts         name -> integer
    checkpoint     path, iteration
    data           an object for each input file: path, bytes, sha256
    options        the options that change the numbers
    versions       mega-eval, torch, python
    device         device of the model
    tokens_read    tokens the model read, without padding
    seconds, tokens_per_second    of the task, without loading the checkpoint
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_local, check_output, has_keys

FORMAT = 1
KEYS = (
    "format",
    "task",
    "scores",
    "counts",
    "checkpoint",
    "data",
    "options",
    "versions",
    "device",
    "tokens_read",
    "seconds",
    "tokens_per_second",
)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The numbers that a task computed.

    Attributes:
        scores, counts: the numbers by their names in the result file.
        tokens_read: tokens the model read, without padding.
    """

    task: str
    scores: dict[str, float]
    counts: dict[str, int]
    tokens_read: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """The checkpoint, input files, options and software versions of a result."""

    checkpoint: Path
    iteration: int
    data: list[dict[str, object]]
    options: Mapping[str, object]
    versions: Mapping[str, str]
    device: str


def fingerprint_files(files: Iterable[Path]) -> list[dict[str, object]]:
    """Return path, size in bytes and SHA-256 of each file."""
    fingerprints = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        fingerprints.append({"path": str(path.resolve()), "bytes": path.stat().st_size, "sha256": digest})
    return fingerprints


def build_record(result: TaskResult, provenance: Provenance, seconds: float) -> dict[str, object]:
    """Build the object of the result file; `seconds` is the time the task took."""
    return {
        "format": FORMAT,
        "task": result.task,
        "scores": result.scores,
        "counts": result.counts,
        "checkpoint": {"path": str(provenance.checkpoint.resolve()), "iteration": provenance.iteration},
        "data": provenance.data,
        "options": dict(provenance.options),
        "versions": dict(provenance.versions),
        "device": provenance.device,
        "tokens_read": result.tokens_read,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(result.tokens_read / seconds, 1),
    }


def check_writable(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Check before the evaluation that the result can be written.

    Args:
        inputs: files that the command reads and must not overwrite.

    Raises:
        ConfigError: the folder is missing or not writable, or the path is a folder, an input, a file that is
            not a result, or a file without write permission.
    """
    check_local("--output", path)
    if not path.parent.is_dir():
        raise ConfigError("--output", "no such folder", found=path.parent, hint=f"mkdir -p {path.parent}")
    if path.is_dir():
        raise ConfigError("--output", "is a folder", found=path, hint=f"--output {path / 'result.json'}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("--output", "may not write to the folder", found=path.parent)
    check_output("--output", path, "file", inputs=inputs, is_ours=has_keys(KEYS))


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Write the record atomically; an existing file is replaced."""
    with atomic_write(path) as partial:
        partial.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def format_table(record: Mapping[str, object]) -> str:
    """Format scores and counts as two aligned columns."""
    scores = record["scores"]
    counts = record["counts"]
    assert isinstance(scores, dict)
    assert isinstance(counts, dict)
    rows = [(name.replace("_", " "), f"{value:,.4f}") for name, value in scores.items()]
    rows += [(name.replace("_", " "), f"{value:,}") for name, value in counts.items()]
    rows.append(("seconds", f"{record['seconds']:,}"))
    rows.append(("tokens per second", f"{record['tokens_per_second']:,}"))
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:<{name_width}}  {value:>{value_width}}" for name, value in rows)
