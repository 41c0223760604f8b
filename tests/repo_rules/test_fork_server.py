"""A fork of a warm process behaves like a separate program: arguments, environment, folder, streams, exit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import fork_server

MODULES = ("json",)


def tell() -> None:
    """Write what this program was given."""
    report = [sys.argv[1:], os.environ.get("TOLD"), os.environ.get("PATH"), str(Path.cwd()), random.random()]
    sys.stdout.write(json.dumps(report))
    sys.stderr.write("noise")


def leave() -> None:
    """End as the argument says."""
    match sys.argv[1]:
        case "exception":
            raise ValueError("a reason")
        case "text":
            sys.exit("a reason")
        case "sleep":
            time.sleep(60)
        case code:
            sys.exit(int(code))


def test_a_program_has_its_arguments_environment_folder_and_streams(tmp_path: Path) -> None:
    target, env = "tests.repo_rules.test_fork_server:tell", {"TOLD": "one"}
    processes = [
        fork_server.run(target, ["a", "b c"], imports=MODULES, cwd=tmp_path, env=env) for _ in range(2)
    ]
    assert [(process.returncode, process.stderr) for process in processes] == [(0, "noise")] * 2
    (*first, drawn), (*second, second_draw) = (json.loads(process.stdout) for process in processes)
    assert first == second == [["a", "b c"], "one", None, str(tmp_path)]
    assert drawn != second_draw


@pytest.mark.parametrize(
    ("word", "code", "last"),
    [("0", 0, ""), ("7", 7, ""), ("text", 1, "a reason"), ("exception", 1, "ValueError: a reason")],
)
def test_a_program_ends_with_the_code_of_an_interpreter(word: str, code: int, last: str) -> None:
    process = fork_server.run("tests.repo_rules.test_fork_server:leave", [word], imports=MODULES)
    assert (process.returncode, process.stderr.strip().rpartition("\n")[2]) == (code, last)


def test_a_module_runs_as_the_main_one() -> None:
    process = fork_server.run("mega_data", ["--version"], imports=MODULES)
    assert (process.returncode, process.stdout.split()[0]) == (0, "mega-data,"), process


def test_a_program_is_ended_by_a_signal_or_at_its_time() -> None:
    program = fork_server.start("tests.repo_rules.test_fork_server:leave", ["sleep"], imports=MODULES)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.1)
    assert program.poll() is None
    program.kill()
    assert program.wait(10) == program.poll() == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        fork_server.run("tests.repo_rules.test_fork_server:leave", ["sleep"], imports=MODULES, timeout=0.1)
