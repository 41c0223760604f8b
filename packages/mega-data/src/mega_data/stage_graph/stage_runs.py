"""Run the stages of a pipeline, and record each so that it is not run again while nothing has changed.

OUTPUT/.pipeline/NAME.json     fingerprint of the stage's command line and input files, and its result
OUTPUT/.pipeline/NAME/         counts of the stage's command, and the logs of its Slurm jobs
OUTPUT/NAME/...                what the stage writes
OUTPUT/.NAME.earlier/          its earlier output, until the new one is complete; .pipeline/.NAME.earlier.json
OUTPUT/report.json, .html      the report of all stages
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from mega_data import __version__
from mega_data.jsonl_shards import file_bytes, file_states
from mega_data.output_folder import REPORT_PAGE
from mega_data.stage_graph.pipeline_file import SPEED_OPTIONS, PipelineFile, PipelineStage, input_files
from mega_data.stage_graph.slurm_jobs import SlurmJobs, check_slurm
from mega_data.task_stages import remove_folder, write_file
from mega_schema.outputs import check_output

RECORDS: Final = ".pipeline"
_REFUSED: Final = 2  # exit code of a command whose options or inputs are refused


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
        options = {name: value for name, value in stage.options.items() if name not in SPEED_OPTIONS}
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

        A run that was stopped resumes, unless its command line or inputs have changed. Then the earlier
        output is kept aside until the new one is complete. It is restored if the command is refused and wrote
        no file.

        Args:
            echo: called with the lines that the command prints.
        """
        fingerprint = self.fingerprint(stage)
        earlier = self.record(stage)
        if earlier is not None and earlier.fingerprint != fingerprint:
            self._put_aside(stage, earlier)
        record = StageRecord(fingerprint, self.command_line(stage))
        record.bytes_in = sum(map(file_bytes, input_files(stage, self.pipeline.results)))
        self._write_record(stage, record)
        stage.folder.mkdir(parents=True, exist_ok=True)
        started_at = time.monotonic()
        folder = self._record_file(stage).with_suffix("")
        remove_folder(folder)
        folder.mkdir()
        result = folder / "result.json"
        arguments = self.arguments(stage)
        if stage.array_size:
            code, record.printed = self._run_on_slurm(stage, arguments, result, echo)
        else:
            code, record.printed = _run_command(arguments, result, echo)
        record.seconds = time.monotonic() - started_at
        if code == 0:
            files = [path for path in stage.folder.rglob("*") if path.is_file()]
            record.bytes_out = sum(file_bytes(path) for path in files if not path.name.startswith("."))
            for name, value in _read_result(result).items():
                setattr(record, name, value)
            record.is_finished = True
            self._remove_earlier(stage)
            self._write_record(stage, record)
        elif code == _REFUSED:
            self._restore_earlier(stage)
        return code

    def _put_aside(self, stage: PipelineStage, record: StageRecord) -> None:
        """Clear the folder of a stage, and keep a finished output aside; a killed process may repeat it."""
        earlier_folder, earlier_record = self._earlier(stage)
        if record.is_finished and not earlier_folder.is_dir() and stage.folder.is_dir():
            stage.folder.rename(earlier_folder)
        remove_folder(stage.folder)
        if record.is_finished:
            self._record_file(stage).replace(earlier_record)
        else:
            self._record_file(stage).unlink()

    def _restore_earlier(self, stage: PipelineStage) -> None:
        """Replace a folder without files by the earlier output."""
        earlier_folder, earlier_record = self._earlier(stage)
        if not (earlier_folder.is_dir() and earlier_record.is_file()):
            return
        if any(path.is_file() for path in stage.folder.rglob("*")):
            return
        # in this order, a process killed between two of these leaves no record of an output that is not there
        remove_folder(stage.folder)
        earlier_record.replace(self._record_file(stage))
        earlier_folder.rename(stage.folder)

    def _remove_earlier(self, stage: PipelineStage) -> None:
        earlier_folder, earlier_record = self._earlier(stage)
        earlier_record.unlink(missing_ok=True)
        remove_folder(earlier_folder)

    def _earlier(self, stage: PipelineStage) -> tuple[Path, Path]:
        """Return the paths of a stage's earlier output and its record; no stage has such a name."""
        name = f".{stage.name}.earlier"
        return stage.folder.with_name(name), self.pipeline.output / RECORDS / f"{name}.json"

    def _run_on_slurm(
        self, stage: PipelineStage, arguments: list[str], result: Path, echo: Callable[[str], object]
    ) -> tuple[int, str]:
        """Plan the tasks of a command here, and run them on Slurm; see `_run_command`."""
        code, printed = _run_command([*arguments, "--stage", "plan"], result, echo)
        if code:
            return code, printed
        stages = _read_result(result)["stages"]
        result.unlink()
        jobs = SlurmJobs(stage.name, result.parent, stage.array_size, stage.options.get("workers"))
        return jobs.run(stages, arguments, result, echo)

    def check_programs(self) -> None:
        """Refuse a machine that cannot submit the jobs of a stage.

        Raises:
            ConfigError: a stage needs Slurm.
        """
        for stage in self.pipeline.stages:
            if stage.array_size:
                check_slurm(f"{self.pipeline.path}: stage {stage.name}: executor")

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


def _read_result(result: Path) -> dict[str, Any]:
    """Read what a command wrote to its result file; empty if it has no counts."""
    values: dict[str, Any] = json.loads(result.read_bytes()) if result.is_file() else {}
    return values


def _run_command(arguments: list[str], result: Path, echo: Callable[[str], object]) -> tuple[int, str]:
    """Run `mega-data` in a process of its own; return its exit code and what it printed.

    Args:
        result: file for the counts of the command.
    """
    command = [sys.executable, "-m", "mega_data", "--result-file", str(result), *arguments]
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
