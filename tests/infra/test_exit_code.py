"""mega-torchrun, which the pods start, exits with the code of the failed rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.repo_rules.repository import ROOT

MEGA_TORCHRUN = ROOT / "infra/docker/mega-torchrun"
RANKS = ("--standalone", "--nproc-per-node=2")
LEAVE = """import os, sys, time
from mega_train.fault_tolerance.error_reporting import write_error_file
if os.environ["RANK"] == "1":
    time.sleep(60)
if sys.argv[1]:
    write_error_file(sys.argv[1])
sys.exit(int(sys.argv[2]))"""


def start(*words: str, programs: Path | None = None) -> subprocess.Popen[str]:
    """The program as a shell starts it, with the torchrun of this environment or of the folder `programs`."""
    before = [*([str(programs)] if programs else []), str(Path(sys.executable).parent)]
    variables = {
        "PATH": os.pathsep.join([*before, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [str(MEGA_TORCHRUN), *words],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a shell gives what it starts in the background a SIGINT that is ignored, which no trap can undo
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def status(job: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = job.communicate(timeout=100)
    return job.returncode, output


def test_a_mistake_of_the_run_ends_it_with_2() -> None:
    code, output = status(start(*RANKS, "-m", "mega_train", "gpt", "--no-such-flag"))
    assert (code, "--no-such-flag" in output, "Root Cause" in output) == (2, True, True), output


@pytest.mark.parametrize(
    ("line", "leaves", "ends"),
    [
        ('error: a text with "errorCode": 7, in it', 3, 3),
        ("", 2, 1),  # a program that leaves no error file may mean anything by 2
    ],
)
def test_the_code_is_that_of_a_rank_which_left_an_error_file(line: str, leaves: int, ends: int) -> None:
    code, output = status(start(*RANKS, "--no-python", sys.executable, "-c", LEAVE, line, str(leaves)))
    assert code == ends, output


@pytest.mark.parametrize(
    ("torchrun", "ends"),
    [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 2", 2),  # its own options
        ('echo \'{"message": {"errorCode": 2}}\' > "$TORCHELASTIC_ERROR_FILE"; exit 0', 0),
        ('echo \'{"message": {"errorCode": -9}}\' > "$TORCHELASTIC_ERROR_FILE"; exit 1', 1),
        ('echo \'{"message": {"errorCode": 999}}\' > "$TORCHELASTIC_ERROR_FILE"; exit 1', 1),
        ('echo \'{"message": {"errorCode": 2}}\' > "$TORCHELASTIC_ERROR_FILE"; exit 1', 2),
    ],
)
def test_without_a_code_of_a_rank_the_status_of_torchrun_stays(
    torchrun: str, ends: int, tmp_path: Path
) -> None:
    code, output = status(start(programs=_stand_in(tmp_path, torchrun)))
    assert (code, output) == (ends, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_gets_the_signal_of_the_container_and_the_time_to_leave(
    number: signal.Signals, tmp_path: Path
) -> None:
    body = (
        f"trap 'sleep 0.5; echo saved; exit 143' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    )
    job = start(programs=_stand_in(tmp_path, body))
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    began = time.monotonic()
    job.send_signal(number)
    assert status(job) == (143, "saved\n")
    assert time.monotonic() - began > 0.4


def _stand_in(folder: Path, body: str) -> Path:
    (folder / "torchrun").write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / "torchrun").chmod(0o755)
    return folder
