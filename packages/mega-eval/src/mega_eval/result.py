"""The files of a result: NAME.json, with all that reproduces it, and NAME.samples.jsonl, with its examples.

NAME.json, format 2, is one object:

    format         2
    task           name of the task
    convention     which published definition was followed
    publishable    whether the whole data set was evaluated
    metrics        name -> value, stderr, interval (95 %, low and high), detectable, count, definition,
                   higher_is_better, example_score, scale, max_exponent; those of `mega_eval.metrics.Metric`
    counts         name -> integer
    model          `mega_eval.models.interface.ModelIdentity`
    data           an object for each input file: path, bytes, sha256
    options        the options that change the numbers
    versions       mega-eval, torch, python
    command        the words of the command line
    date           when it was written, UTC, ISO 8601
    tokens_read    tokens the model read, without padding
    seconds, tokens_per_second    of the task, without loading the model
    samples        file name and sha256 of the examples

Each line of NAME.samples.jsonl is one `mega_eval.task_result.Example`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from mega_eval.metrics import Metric
from mega_eval.models.interface import ModelIdentity
from mega_eval.number_format import can_detect, format_number
from mega_eval.outputs import check_folder, write_json
from mega_eval.task_result import Example, TaskResult
from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output, has_keys
from mega_schema.urls import check_local

FORMAT = 2
SUFFIX = ".json"
SAMPLES_SUFFIX = ".samples.jsonl"
KEYS = (
    "format",
    "task",
    "convention",
    "publishable",
    "metrics",
    "counts",
    "model",
    "data",
    "options",
    "versions",
    "command",
    "date",
    "tokens_read",
    "seconds",
    "tokens_per_second",
    "samples",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a result comes from."""

    model: ModelIdentity
    data: list[dict[str, object]]
    options: Mapping[str, object]
    versions: Mapping[str, str]
    command: tuple[str, ...]
    date: str


def fingerprint_files(files: Iterable[Path]) -> list[dict[str, object]]:
    """Return path, size in bytes and SHA-256 of each file."""
    fingerprints: list[dict[str, object]] = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        fingerprints.append({"path": str(path.resolve()), "bytes": path.stat().st_size, "sha256": digest})
    return fingerprints


def build_record(result: TaskResult, provenance: Provenance, seconds: float) -> dict[str, object]:
    """Build the object of the result file, without `samples`; `seconds` is the time the task took."""
    return {
        "format": FORMAT,
        "task": result.task,
        "convention": result.convention,
        "publishable": result.is_whole,
        "metrics": {name: describe_metric(metric) for name, metric in result.metrics.items()},
        "counts": result.counts,
        "model": asdict(provenance.model),
        "data": provenance.data,
        "options": dict(provenance.options),
        "versions": dict(provenance.versions),
        "command": list(provenance.command),
        "date": provenance.date,
        "tokens_read": result.tokens_read,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(result.tokens_read / seconds, 1),
    }


def describe_metric(metric: Metric) -> dict[str, object]:
    """Return the object of a metric in the result file."""
    return {**asdict(metric), "detectable": metric.detectable}


def default_output(
    task: str, convention: str, model: ModelIdentity, data: Sequence[Mapping[str, object]]
) -> Path:
    """Return the name of a result in the current folder: task, convention, the model's hash and dtype.

    If a result of other data has this name, the hash of the data follows.

    Args:
        data: fingerprints of the input files.
    """
    dtype = model.dtype if model.dtype.isalnum() else ""  # a server does not tell its own
    name = "-".join(filter(None, (task, convention, model.sha256[:8], dtype)))
    hashes = [str(file["sha256"]) for file in data]
    if hashes and _recorded_hashes(path := Path(name + SUFFIX)) not in (None, hashes):
        digest = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
        return path.with_stem(f"{name}-{digest[:8]}")
    return Path(name + SUFFIX)


def _recorded_hashes(path: Path) -> list[str] | None:
    """Return the hashes of the data of a result; None if the file is missing or no result."""
    try:
        return [file["sha256"] for file in orjson.loads(path.read_bytes())["data"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def samples_path(output: Path) -> Path:
    """Return the path of the examples of a result."""
    return output.with_name(output.name.removesuffix(SUFFIX) + SAMPLES_SUFFIX)


def check_writable(path: Path, inputs: Iterable[Path] = (), *, overwrite: bool = False) -> None:
    """Check before the evaluation that the result can be written.

    Args:
        inputs: files that the command reads and must not overwrite.
        overwrite: replace an existing result.

    Raises:
        ConfigError: the folder is missing or cannot be written to; or the path is a folder, an input, a file
            that is not a result, a result that may not be replaced, or has no name of a result; or the file
            of the examples would replace a file that has none.
    """
    check_local("--output", path)
    check_folder("--output", path.parent)
    if path.is_dir():
        raise ConfigError("--output", "is a folder", found=path, hint=f"--output {path / 'result.json'}")
    inputs = list(inputs)
    check_output("--output", path, "file", inputs=inputs, is_ours=has_keys(KEYS))
    if path.suffix != SUFFIX:  # the names of the examples and of the page are made from it
        hint = f"--output {path.with_name(path.name + SUFFIX)}"
        raise ConfigError(
            "--output", "not the name of a result", found=path, wanted=f"NAME{SUFFIX}", hint=hint
        )
    is_examples = has_keys(field.name for field in fields(Example))
    check_output("--output", samples_path(path), "file", inputs=inputs, is_ours=is_examples)
    if path.exists() and not overwrite:
        raise ConfigError(
            "--output", "a result of this name exists", found=path, hint="name another, or add --overwrite"
        )


def write_result(path: Path, record: Mapping[str, object], examples: Iterable[Example]) -> None:
    """Write the examples, then the record; each file is replaced whole."""
    samples = samples_path(path)
    content = b"".join(orjson.dumps(asdict(example)) + b"\n" for example in examples)
    with atomic_write(samples) as partial:
        partial.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    write_json(path, {**record, "samples": {"file": samples.name, "sha256": digest}})


def format_table(record: Mapping[str, object]) -> str:
    """Format metrics with their intervals, then counts, as aligned columns."""
    metrics, counts = record["metrics"], record["counts"]
    assert isinstance(metrics, dict)
    assert isinstance(counts, dict)
    rows = [_metric_row(name, metric) for name, metric in metrics.items()]
    rows += [(name.replace("_", " "), f"{value:,}", "") for name, value in counts.items()]
    rows.append(("seconds", f"{record['seconds']:,}", ""))
    rows.append(("tokens per second", f"{record['tokens_per_second']:,}", ""))
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(
        f"{name:<{name_width}}  {value:>{value_width}}  {spread}".rstrip() for name, value, spread in rows
    )


def _metric_row(name: str, metric: Mapping[str, Any]) -> tuple[str, str, str]:
    spread = ""
    interval = metric["interval"]
    if interval is not None:
        assert isinstance(interval, tuple)
        low, high = interval
        spread = f"95 % {format_number(low)} to {format_number(high)}"
        detectable = metric["detectable"]
        if detectable is not None:
            if can_detect(metric["value"], detectable, higher_is_better=metric["higher_is_better"]):
                spread += f"  smallest detectable difference {format_number(detectable)}"
            else:
                spread += f"  no difference is detectable with {metric['count']:,} examples"
    return name.replace("_", " "), format_number(metric["value"]), spread
