"""A pipeline's stages as Slurm job arrays, on a fake sbatch."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mega_data.cli import commands
from mega_schema.app.cli_runner import run_command

PIPELINE = """
output = "OUTPUT"

[[stage]]
name = "text"
command = "clean"
input = "raw"
step = ["length:minimum=4"]
executor = "EXECUTOR"
"""
SLURM = 'slurm"\narray-size = 2\nworkers = 1\nmemory = "64'


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(stat.S_IRWXU)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JOBS", str(tmp_path / "bin"))
    program(tmp_path / "bin/sbatch", f'exec {sys.executable} {Path(__file__).with_name("sbatch.py")} "$@"')
    Path("raw").mkdir()
    for name in "abc":
        lines = [json.dumps({"text": f"{name} {number}"[: 2 + number % 3]}) for number in range(20)]
        Path(f"raw/{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(executor: str, output: str, *words: str, code: int = 0) -> None:
    Path("p.toml").write_text(PIPELINE.replace("EXECUTOR", executor).replace("OUTPUT", output))
    with pytest.raises(SystemExit) as end:
        run_command(commands, ["run", "p.toml", *words])
    assert end.value.code == code


def read_texts(output: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(output).glob("text/*.jsonl")}


def stage(output: str) -> dict:
    (row,) = json.loads(Path(output, "report.json").read_text())["stages"]
    return row


def test_arrays_write_the_files_and_the_report_of_one_process(folder: Path, capfd) -> None:
    run("local", "local")
    run(SLURM, "slurm", "--dry-run")
    assert "--memory 64 --output slurm/text  # Slurm arrays of 2\n" in capfd.readouterr().out
    run(SLURM, "slurm")
    assert read_texts("slurm") == read_texts("local")
    for name in ("documents_in", "documents_out", "dropped"):
        assert stage("slurm")[name] == stage("local")[name]
    assert stage("slurm")["documents_in"] == 60
    jobs = [path.read_text().split() for path in sorted((folder / "bin").glob("*.flags"))]
    assert [("--array" in flags, "--wait" in flags) for flags in jobs] == [(True, False), (False, True)]
    assert "afterok:1" in jobs[1]
    assert "slurm/text: " in capfd.readouterr().out
    run(SLURM.replace("2", "3"), "slurm")
    assert stage("slurm")["state"] == "unchanged"


def test_the_error_of_a_failed_element_is_printed(folder: Path, capfd) -> None:
    Path("raw/b.jsonl").write_text("wrong\n")
    run(SLURM, "slurm", code=1)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        "error: slurm/.pipeline/text/00-pass-pass-1.log: a job failed: found raw/b.jsonl:1"
    )
    assert stage("slurm")["state"] == "failed, exit code 1"
    assert not read_texts("slurm")


def test_a_refused_job_ends_the_run(folder: Path, capfd) -> None:
    program(folder / "bin/sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    run(SLURM, "slurm", code=2)
    error = capfd.readouterr().err.splitlines()[-1]
    assert error == "error: sbatch: the job was not submitted: found sbatch: error: invalid partition"


def test_a_machine_without_slurm_is_refused(folder: Path, capfd, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run(SLURM, "slurm", code=2)
    error = 'error: p.toml: stage text: executor: no sbatch on this machine; hint: executor = "local"\n'
    assert capfd.readouterr().err == error
    assert not Path("slurm").exists()


def test_the_jobs_of_a_terminated_run_are_cancelled(folder: Path) -> None:
    waits = 'case "$*" in *--wait*) echo 8; touch waits; exec sleep 60;; esac; echo 7'
    program(folder / "bin/sbatch", waits)
    program(folder / "bin/scancel", 'echo "$@" > cancelled')
    Path("p.toml").write_text(PIPELINE.replace("EXECUTOR", SLURM).replace("OUTPUT", "slurm"))
    words = [sys.executable, "-m", "mega_data", "run", "p.toml"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        while not Path("waits").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 143
    assert error.splitlines()[-1].startswith("terminated")
    assert Path("cancelled").read_text() == "7 8\n"
