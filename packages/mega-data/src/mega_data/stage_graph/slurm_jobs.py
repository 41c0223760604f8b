"""Run a command on a Slurm cluster: a job array for each stage of its tasks, then a job that publishes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from mega_data.task_stages import write_file
from mega_schema.errors import ConfigError, MegaError

_SUBMIT: Final = "sbatch"
_CANCEL: Final = "scancel"
_SCRIPT: Final = """#!/bin/sh
export OMP_NUM_THREADS=1
exec {python} -m mega_data "$@" --workers "${{SLURM_CPUS_PER_TASK:-1}}"
"""


def check_slurm(key: str) -> None:
    """Refuse a machine that cannot submit jobs.

    Args:
        key: of the value that asks for Slurm.

    Raises:
        ConfigError: there is no sbatch.
    """
    if shutil.which(_SUBMIT) is None:
        raise ConfigError(key, f"no {_SUBMIT} on this machine", hint='executor = "local"')


@dataclass(slots=True)
class SlurmJobs:
    """The jobs of one command. sbatch takes other options from variables such as SBATCH_PARTITION.

    Attributes:
        name: of the jobs in the queue.
        folder: for the script and the logs of the jobs.
        array_size: elements of each array.
        cpus: of each element; None: Slurm's default.
        job_ids: of the submitted jobs.
    """

    name: str
    folder: Path
    array_size: int
    cpus: int | None
    job_ids: list[str] = field(default_factory=list)

    def run(
        self, stages: Sequence[str], arguments: Sequence[str], result: Path, echo: Callable[[str], object]
    ) -> tuple[int, str]:
        """Submit the jobs and wait for the last one; return its exit code and what it printed.

        Each job starts when the one before has succeeded. Jobs that have not ended are cancelled if this
        process is interrupted.

        Args:
            stages: of the tasks of the command, in order.
            arguments: command line after `mega-data`.
            result: file for the counts of the command.
            echo: called with the lines that the last job prints.

        Raises:
            MegaError: a job could not be submitted.
        """
        script = self.folder / "job.sh"
        write_file(script, _SCRIPT.format(python=shlex.quote(sys.executable)))
        logs = list[Path]()
        try:
            for stage in stages:
                log = self.folder / f"{stage.replace('/', '-')}-%a.log"
                flags = ["--array", f"0-{self.array_size - 1}", "--output", str(log)]
                words = [*arguments, "--executor", "slurm-array", "--stage", stage]
                with self._submit(flags, script, words):
                    pass
                logs.append(log)
            log, errors = self.folder / "last.log", self.folder / "last.err"
            flags = ["--wait", "--output", str(log), "--error", str(errors)]
            with self._submit(flags, script, ["--result-file", str(result), *arguments]) as process:
                code = process.wait()
        except BaseException:
            self._cancel()
            raise
        printed = _read_text(log)
        for line in printed.splitlines():
            echo(line)
        click.echo(_read_text(errors), nl=False, err=True)
        if code and not errors.is_file():
            click.echo(f"error: {self._failed_array(logs)}", err=True)
        return code, printed

    @contextmanager
    def _submit(
        self, flags: Sequence[str], script: Path, arguments: Sequence[str]
    ) -> Iterator[subprocess.Popen[str]]:
        """Yield the process of sbatch when it has submitted a job.

        Raises:
            MegaError: it has submitted none.
        """
        words = [_SUBMIT, "--parsable", "--job-name", f"mega-data-{self.name}", "--ntasks", "1"]
        if self.cpus is not None:
            words += ["--cpus-per-task", str(self.cpus)]
        if self.job_ids:
            words += ["--dependency", f"afterok:{self.job_ids[-1]}", "--kill-on-invalid-dep", "yes"]
        words += [*flags, str(script), *arguments]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                job_id = process.stdout.readline().strip().partition(";")[0]
                if not job_id:
                    reason = process.stderr.read().strip().splitlines() or [f"exit code {process.wait()}"]
                    raise MegaError(_SUBMIT, "the job was not submitted", found=reason[-1])
                self.job_ids.append(job_id)
                yield process
            except BaseException:
                process.terminate()
                raise

    def _cancel(self) -> None:
        if self.job_ids:
            with suppress(OSError):
                subprocess.run([_CANCEL, *self.job_ids], check=False, capture_output=True)

    def _failed_array(self, logs: Sequence[Path]) -> MegaError:
        """Return the error of the first array with one in its logs, after which no other job ran."""
        for pattern in logs:
            for log in sorted(self.folder.glob(pattern.name.replace("%a", "*"))):
                for line in _read_text(log).splitlines():
                    if line.startswith("error: "):
                        return MegaError(log, "a job failed", found=line.removeprefix("error: "))
        what = "a job failed or was cancelled"
        return MegaError(self.folder, what, hint=f"sacct --jobs {','.join(self.job_ids)}")


def _read_text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.is_file() else ""
