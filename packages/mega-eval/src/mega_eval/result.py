"""What an evaluation leaves behind: a table to read and a JSON file to reproduce it from.

The file, format 1, is one object:

    format         1
    task           "lambada" | "wikitext103" | "perplexity"
    scores         name -> number; see the task's module for what each one is
    counts         name -> whole number
    checkpoint     path, iteration
    data           one object a file read: path, bytes, sha256
    options        the options that decide the numbers
    versions       mega-eval, torch, python
    device         where the model ran
    tokens_read    tokens the model read, padding not counted
    seconds, tokens_per_second    of the task, opening the checkpoint not counted
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from mega_schema.disk import replacing
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
class Outcome:
    """What a task found.

    Attributes:
        scores, counts: the numbers, under the names they have in the result file.
        tokens_read: tokens the model read to get them.
    """

    task: str
    scores: dict[str, float]
    counts: dict[str, int]
    tokens_read: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which model was asked about which bytes, by what."""

    checkpoint: Path
    iteration: int
    data: list[dict[str, object]]
    options: Mapping[str, object]
    versions: Mapping[str, str]
    device: str


def fingerprints(files: Iterable[Path]) -> list[dict[str, object]]:
    """Path, size in bytes and sha256 of each file."""
    prints = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        prints.append({"path": str(path.resolve()), "bytes": path.stat().st_size, "sha256": digest})
    return prints


def record(outcome: Outcome, provenance: Provenance, seconds: float) -> dict[str, object]:
    """The object of the result file."""
    return {
        "format": FORMAT,
        "task": outcome.task,
        "scores": outcome.scores,
        "counts": outcome.counts,
        "checkpoint": {"path": str(provenance.checkpoint.resolve()), "iteration": provenance.iteration},
        "data": provenance.data,
        "options": dict(provenance.options),
        "versions": dict(provenance.versions),
        "device": provenance.device,
        "tokens_read": outcome.tokens_read,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(outcome.tokens_read / seconds, 1),
    }


def check_writable(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Find out before the work, not after it, whether the result can be written.

    Args:
        inputs: files that the command reads, and does not overwrite.

    Raises:
        ConfigError: the folder does not exist, the path is a folder, a file that is read or a file that holds
            no result, or neither may be written to.
    """
    check_local("--output", path)
    if not path.parent.is_dir():
        raise ConfigError("--output", "no such folder", found=path.parent, hint=f"mkdir -p {path.parent}")
    if path.is_dir():
        raise ConfigError("--output", "is a folder", found=path, hint=f"--output {path / 'result.json'}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("--output", "may not write to the folder", found=path.parent)
    check_output("--output", path, "file", inputs=inputs, is_ours=has_keys(KEYS))


def write(path: Path, values: Mapping[str, object]) -> None:
    """Write the object whole or not at all, over what was there."""
    with replacing(path) as partial:
        partial.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def table(values: Mapping[str, object]) -> str:
    """Scores and counts in two columns, aligned for a terminal."""
    scores, counts = values["scores"], values["counts"]
    assert isinstance(scores, dict)
    assert isinstance(counts, dict)
    rows = [(name.replace("_", " "), f"{value:,.4f}") for name, value in scores.items()]
    rows += [(name.replace("_", " "), f"{value:,}") for name, value in counts.items()]
    rows.append(("seconds", f"{values['seconds']:,}"))
    rows.append(("tokens per second", f"{values['tokens_per_second']:,}"))
    left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:<{left}}  {value:>{right}}" for name, value in rows)
