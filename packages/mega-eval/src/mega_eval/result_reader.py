"""Read the files of a result, which `mega_eval.result` writes and docs/formats/result.md specifies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from mega_eval.input_paths import build_path_error
from mega_eval.json_text import parse_json
from mega_eval.metrics import Metric
from mega_eval.result import FORMAT, SAMPLES_SUFFIX, SUFFIX
from mega_eval.schema_check import find_violations
from mega_eval.task_result import Example, TargetToken
from mega_schema.errors import CorruptFileError, FormatError

_EVALUATE_AGAIN = "evaluate the model again"


def load_schema() -> dict[str, Any]:
    """Load the JSON Schema of a result."""
    text = resources.files("mega_eval").joinpath("result.schema.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


@dataclass(frozen=True)
class EvaluationResult:
    """A result that was read.

    Attributes:
        path: its file.
        record: the content of the file.
        metrics: by name, the most important first.
    """

    path: Path
    record: Mapping[str, Any]
    metrics: Mapping[str, Metric]

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.record["task"])

    @property
    def convention(self) -> str:
        """Which published definition was followed."""
        return str(self.record["convention"])

    @property
    def data_hashes(self) -> tuple[str, ...]:
        """SHA-256 of each input file, in the order of the command."""
        return tuple(entry["sha256"] for entry in self.record["data"])

    @property
    def model_name(self) -> str:
        """A short name of the model: its run and iteration, or the end of its path or URL."""
        parts = str(self.record["model"]["source"]).rstrip("/").split("/")
        is_iteration = parts[-1].startswith("iter_") and len(parts) > 1
        return "/".join(parts[-2:]) if is_iteration else parts[-1]

    @cached_property
    def examples(self) -> list[Example]:
        """Read the examples.

        Raises:
            FormatError: their file is missing, or a line is not an example.
            CorruptFileError: the file is not the one that was written with the result.
        """
        path = self.path.with_name(self.record["samples"]["file"])
        if not path.is_file():
            raise FormatError(path, "no such file", wanted=f"the examples of {self.path.name}")
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.record["samples"]["sha256"]:
            raise CorruptFileError(
                path,
                f"is not the file that was written with {self.path.name}",
                found=f"sha256 {digest[:12]}",
                wanted=self.record["samples"]["sha256"][:12],
                hint=f"copy both files again, or {_EVALUATE_AGAIN}",
            )
        return _parse_examples(path, content)


def read_result(path: Path) -> EvaluationResult:
    """Read the file of a result; its examples are read on first use.

    Raises:
        FormatError: there is no such file, or it is no result of this format.
    """
    if path.is_dir() or not path.exists():
        raise build_path_error(path, "file", "the JSON file of a result")
    if path.name.endswith(SAMPLES_SUFFIX):
        result = path.name.removesuffix(SAMPLES_SUFFIX) + SUFFIX
        raise FormatError(path, "has the examples of a result", wanted="the result", hint=f"name {result}")
    record = parse_json(path.read_bytes(), path)
    if not isinstance(record, dict) or "format" not in record or "metrics" not in record:
        raise FormatError(path, "is not a result of mega-eval", wanted="an object with format and metrics")
    if record["format"] != FORMAT:
        raise FormatError(path, "format number", found=record["format"], wanted=FORMAT, hint=_EVALUATE_AGAIN)
    schema = load_schema()
    for where, what in find_violations(record, schema, schema):
        raise FormatError(f"{path}: {where}", what, hint=_EVALUATE_AGAIN)
    return EvaluationResult(path, record, {name: _metric(m) for name, m in record["metrics"].items()})


def _metric(values: Mapping[str, Any]) -> Metric:
    keywords = {field.name: values[field.name] for field in fields(Metric)}
    interval = keywords["interval"]
    return Metric(**{**keywords, "interval": None if interval is None else (interval[0], interval[1])})


def _parse_examples(path: Path, content: bytes) -> list[Example]:
    schema = load_schema()
    examples = []
    for number, line in enumerate(content.splitlines(), 1):
        values = parse_json(line, path, number)
        for where, what in find_violations(values, schema["$defs"]["example"], schema):
            raise FormatError(f"{path}:{number} {where}".rstrip(), what)
        tokens = tuple(TargetToken(**token) for token in values.pop("tokens"))
        choices = tuple((text, float(logprob)) for text, logprob in values.pop("choices"))
        examples.append(Example(**values, tokens=tokens, choices=choices))
    return examples
