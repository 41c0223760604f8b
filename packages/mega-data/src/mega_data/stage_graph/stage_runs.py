"""Run the stages of a pipeline, and record each so that it is not run again while nothing has changed.

OUTPUT/.pipeline/NAME.json     fingerprint of the stage's command line and input files, and its result
OUTPUT/NAME/...                what the stage writes
OUTPUT/report.json, .html      the report of all stages
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from mega_data import __version__
from mega_data.jsonl_shards import file_bytes, file_states
from mega_data.output_folder import REPORT_PAGE
from mega_data.readers.inputs import REPORT
from mega_data.stage_graph.pipeline_file import PipelineFile, PipelineStage, input_files
from mega_data.task_stages import remove_folder, write_file
from mega_schema.outputs import check_output

RECORDS: Final = ".pipeline"
# names of options that change the speed of a command and not its output
_SPEED: Final = frozenset({"workers", "executor", "memory"})
# the last line of a command's result -> its documents
_COUNTS: Final = MappingProxyType(
    {
        "extract": re.compile(r": (?P<out>[\d,]+) documents, .* from [\d,]+ files"),
        "dedup": re.compile(r": kept (?P<out>[\d,]+) of (?P<into>[\d,]+) documents"),
        "preprocess": re.compile(r": (?P<out>[\d,]+) documents, [\d,]+ tokens"),
        "merge": re.compile(r": [\d,]+ datasets, (?P<out>[\d,]+) documents"),
        "stats": re.compile(r": (?P<into>[\d,]+) documents, see"),
    }
)
_LEFT_OUT: Final = re.compile(r"^  left out ([\d,]+): (.*)$", re.MULTILINE)


@dataclass(slots=True)
class StageRecord:
    """What is known of a stage.

    Attributes:
        fingerprint: of its command line and inputs when it began.
        is_finished: its output is complete.
        seconds: wall time of the process that finished it.
        printed: what the command printed.
        documents_in, documents_out: None if the command does not count them.
        bytes_in, bytes_out: sizes of the files.
        dropped: documents by reason.
    """

    fingerprint: str
    command: str
    is_finished: bool = False
    seconds: float = 0.0
    printed: str = ""
    documents_in: int | None = None
    documents_out: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageRuns:
    """The runs of the stages of a pipeline."""

    pipeline: PipelineFile

    def arguments(self, stage: PipelineStage) -> list[str]:
        return stage.arguments(self.pipeline.results)

    def command_line(self, stage: PipelineStage) -> str:
        return shlex.join(["mega-data", *self.arguments(stage)])

    def fingerprint(self, stage: PipelineStage) -> str:
        """Hash the command line and the states of the files that it reads."""
        options = {name: value for name, value in stage.options.items() if name not in _SPEED}
        files = file_states(input_files(stage, self.pipeline.results))
        values = [__version__, stage.command, options, str(stage.output.resolve()), files]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def record(self, stage: PipelineStage) -> StageRecord | None:
        """Return what is known of a stage; None if it has not begun."""
        try:
            return StageRecord(**json.loads(self._record_file(stage).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def is_current(self, stage: PipelineStage) -> bool:
        """Return whether the stage is finished, and its command line and inputs have not changed since."""
        record = self.record(stage)
        if record is None or not record.is_finished or not stage.folder.is_dir():
            return False
        return record.fingerprint == self.fingerprint(stage)

    def plan_stages(self) -> Iterator[tuple[PipelineStage, bool]]:
        """Yield each stage and whether it would run: it has changed, or a stage that it reads would run."""
        names = set[str]()
        for stage in self.pipeline.stages:
            is_pending = not names.isdisjoint(stage.references) or not self.is_current(stage)
            if is_pending:
                names.add(stage.name)
            yield stage, is_pending

    def run(self, stage: PipelineStage, echo: Callable[[str], object]) -> int:
        """Run the command of a stage; return its exit code.

        A run that was stopped resumes, unless its command line or inputs have changed.

        Args:
            echo: called with the lines that the command prints.
        """
        fingerprint = self.fingerprint(stage)
        earlier = self.record(stage)
        if earlier is not None and earlier.fingerprint != fingerprint:
            remove_folder(stage.folder)
            self._record_file(stage).unlink()
        record = StageRecord(fingerprint, self.command_line(stage))
        record.bytes_in = sum(map(file_bytes, input_files(stage, self.pipeline.results)))
        self._write_record(stage, record)
        stage.folder.mkdir(parents=True, exist_ok=True)
        started_at = time.monotonic()
        code, record.printed = _run_command(self.arguments(stage), echo)
        record.seconds = time.monotonic() - started_at
        if code == 0:
            _count(stage, record)
            record.is_finished = True
            self._write_record(stage, record)
        return code

    def check_folders(self) -> None:
        """Refuse an output folder with files of other programs.

        Raises:
            ConfigError: the folder is refused, or a stage would write into a folder that is not its own.
        """
        records = self.pipeline.output / RECORDS
        inputs = [file for stage in self.pipeline.stages for file in self._outer_inputs(stage)]
        key = f"{self.pipeline.path}: output"
        check_output(key, self.pipeline.output, "folder", inputs=inputs, is_ours=lambda _: records.is_dir())
        for stage in self.pipeline.stages:
            if self.record(stage) is None:
                check_output(f"{self.pipeline.path}: stage {stage.name}", stage.folder, "folder")

    def _outer_inputs(self, stage: PipelineStage) -> list[Path]:
        """Return the files that a stage reads and that no stage writes."""
        folders = [writer.folder for writer in self.pipeline.stages]
        files = input_files(stage, self.pipeline.results)
        return [file for file in files if not any(file.is_relative_to(folder) for folder in folders)]

    def report(self, states: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the records of all stages with their states.

        Args:
            states: of the stages that this run has reached.
        """
        rows = list[dict[str, Any]]()
        for stage in self.pipeline.stages:
            record = self.record(stage) or StageRecord("", self.command_line(stage))
            page = stage.folder / REPORT_PAGE
            link = f"{stage.folder.name}/{page.name}" if page.is_file() else ""
            state = states.get(stage.name, "not reached")
            rows.append({"name": stage.name, "state": state, "report": link, **asdict(record)})
        return rows

    def _record_file(self, stage: PipelineStage) -> Path:
        return self.pipeline.output / RECORDS / f"{stage.name}.json"

    def _write_record(self, stage: PipelineStage, record: StageRecord) -> None:
        write_file(self._record_file(stage), json.dumps(asdict(record), indent=1, ensure_ascii=False))


def _run_command(arguments: list[str], echo: Callable[[str], object]) -> tuple[int, str]:
    """Run `mega-data` in a process of its own; return its exit code and what it printed."""
    command = [sys.executable, "-m", "mega_data", *arguments]
    lines = list[str]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                echo(line.rstrip("\n"))
        except BaseException:
            process.terminate()  # it keeps what is finished
            raise
    return process.returncode, "".join(lines)


def _count(stage: PipelineStage, record: StageRecord) -> None:
    """Fill in the counts of a finished stage, from its report or from what it printed."""
    files = [path for path in stage.folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    record.bytes_out = sum(map(file_bytes, files))
    report = stage.folder / REPORT
    values = json.loads(report.read_bytes()) if report.is_file() else {}
    if stage.command == "clean":
        steps = values["steps"]
        record.documents_in = steps[0]["documents_in"] + values["skipped"]
        record.documents_out = steps[-1]["documents_out"]
        record.dropped = _clean_reasons(values)
    elif stage.command == "mix":
        rows = [row for rows in values["splits"].values() for row in rows]
        record.documents_in = sum(row["available_documents"] for row in rows)
        record.documents_out = sum(row["documents"] for row in rows)
    elif (pattern := _COUNTS.get(stage.command)) and (match := pattern.search(record.printed)):
        counts = {name: _number(text) for name, text in match.groupdict().items()}
        record.documents_in, record.documents_out = counts.get("into"), counts.get("out")
    if stage.command == "dedup" and record.documents_in is not None and record.documents_out is not None:
        record.dropped = {"like an earlier one": record.documents_in - record.documents_out}
    if stage.command == "extract":
        record.dropped = {reason: _number(count) for count, reason in _LEFT_OUT.findall(record.printed)}
        record.documents_in = (record.documents_out or 0) + sum(record.dropped.values())


def _clean_reasons(values: Mapping[str, Any]) -> dict[str, int]:
    reasons = {
        f"{step['step']}: {reason}": count
        for step in values["steps"]
        for reason, count in step["reasons"].items()
    }
    return {**reasons, **({"not a document": values["skipped"]} if values["skipped"] else {})}


def _number(text: str) -> int:
    return int(text.replace(",", ""))
