"""Local processes, Slurm arrays and Ray give the same bytes, even if workers are killed."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.commands.task_progress import TaskProgress
from mega_data.executors.slurm import array_element
from mega_data.output_folder import lock_folder
from mega_data.task_stages import TaskStage, open_run_folder
from mega_schema.app.progress import ProgressBar
from mega_schema.errors import ConfigError, MegaError

SLURM = Path(__file__).resolve().parents[3] / "infra/slurm"
STAGES = "keys sort pairs paired sets groups filter"


def corpus(folder: Path, shards: int) -> Path:
    """Shards of documents, half of which are like another one."""
    rng, texts = random.Random(1), list[str]()
    folder.mkdir()
    for number in range(shards):
        for _ in range(6):
            words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(60)]
            if texts and rng.random() < 0.5:
                words = rng.choice(texts).split()
                words[rng.randrange(60)] = "changed"
            texts.append(" ".join(words))
        lines = [json.dumps({"text": text}) for text in texts[-6:]]
        (folder / f"{number:02d}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def flags(inputs: Path, output: Path) -> list[str]:
    work = str(output.with_suffix(".work"))
    return ["--input", str(inputs), "--output", str(output), "--work-dir", work, "--preset", "megatron"]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def invoke(command: str, *arguments: str) -> str:
    outcome = CliRunner().invoke(commands, [command, *arguments])
    if isinstance(outcome.exception, MegaError):
        raise outcome.exception
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def deduplicate(inputs: Path, output: Path, *more: str) -> dict[str, bytes]:
    invoke("dedup", *flags(inputs, output), *more)
    return files(output)


@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("step", [1, 3])
def test_the_elements_of_an_array_have_places_from_0_on(first: int, step: int) -> None:
    array = {"SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": str(first)}
    array["SLURM_ARRAY_TASK_STEP"] = str(step)
    numbers = range(first, first + 4 * step, step)
    elements = [array_element({**array, "SLURM_ARRAY_TASK_ID": str(number)}) for number in numbers]
    assert elements == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_process_outside_an_array_and_an_array_with_gaps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SLURM_ARRAY_TASK_ID: is not set.*sbatch --array"):
        array_element({})
    gaps = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "2"}
    with pytest.raises(ConfigError, match=r"element 7 of 2: the numbers have gaps"):
        array_element(gaps)


@pytest.mark.parametrize(
    ("command", "more", "stages"),
    [
        ("dedup", [], "keys | sort | pairs | groups | filter"),
        ("extract", ["--from", "html"], "extract | join"),
        ("clean", ["--step", "whitespace"], "00-pass/pass"),
        (
            "clean",
            ["--step", "whitespace", "--step", "spans"],
            "00-pass/pass | 01-spans/spans | 01-spans/repeats | 01-spans/cut",
        ),
    ],
)
def test_an_element_of_an_array_that_names_no_stage_is_refused_before_it_writes(
    command: str, more: list[str], stages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ID", "1"), ("MIN", "0"), ("COUNT", "2")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    inputs, output = str(corpus(tmp_path / "in", 2)), tmp_path / "out"
    words = ["--input", f"{inputs}/*.jsonl", "--output", str(output), *more, "--executor", "slurm-array"]
    for others in (False, True):  # elements that began at the same time
        lock = lock_folder(output, shared=True) if others else nullcontext()
        with lock, pytest.raises(ConfigError) as refused:
            invoke(command, *words)
        assert str(refused.value) == (
            f"--stage: an element of a job array does one stage: wanted {stages}; "
            "hint: infra/slurm/data.sh submits an array per stage, and a job that ends the run"
        )
        assert sorted(tmp_path.iterdir()) == [tmp_path / "in"]


def test_an_array_per_stage_gives_the_bytes_of_one_process(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", 5)
    once = deduplicate(inputs, tmp_path / "once")
    (tmp_path / "bin").mkdir()
    for name, words in (
        ("sbatch", str(Path(__file__).with_name("sbatch.py"))),
        ("mega-data", "-m mega_data"),
    ):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        program.chmod(stat.S_IRWXU)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "JOBS": str(tmp_path / "bin")}
    output = tmp_path / "array"
    words = ["bash", str(SLURM / "data.sh"), "2", STAGES, "dedup", *flags(inputs, output)]
    process = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    logs = [(tmp_path / "bin" / f"{job}.said").read_text() for job in range(1, len(STAGES.split()) + 2)]
    assert process.returncode == 0, process.stderr + "".join(logs)
    assert files(output) == once
    prefixes = sorted(line.partition(":")[0] for line in logs[0].splitlines())
    assert prefixes == ["keys 1/2", "keys 1/3", "keys 2/2", "keys 2/3", "keys 3/3"]
    assert "of 30 documents" in logs[-1].splitlines()[-1]


@pytest.mark.parametrize("script", ["data.sh", "data.sbatch"])
def test_the_scripts_for_slurm_are_what_bash_reads(script: str) -> None:
    process = subprocess.run(["bash", "-n", str(SLURM / script)], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


def test_elements_that_begin_at_once_agree_on_one_plan(tmp_path: Path) -> None:
    for turn in range(20):
        folder, wanted = tmp_path / str(turn), {"inputs": [turn]}
        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(open_run_folder, folder, wanted) for _ in range(8)]:
                future.result()
        assert [file.name for file in folder.iterdir()] == ["plan.json"]
        with pytest.raises(ConfigError, match="contains a run with other inputs"):
            open_run_folder(folder, {"inputs": []})


def test_progress_tells_bytes_documents_rate_and_time_left_of_what_was_left_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage = TaskStage("extract", 4, lambda task: {}, sizes=(9_000_000, 10_000_000, 20_000_000, 10_000_000))
    clock = iter([100.0, 100.0, 105.0, 110.0, 120.0])
    bar = ProgressBar("extract", 40_000_000, now=lambda: next(clock))
    progress = TaskProgress("extract", stage, [1, 2, 3], bar)
    for size in (20_000_000, 10_000_000, 10_000_000):
        progress({"read": size, "documents": 700})
    assert capsys.readouterr().err.splitlines() == [
        "extract 2/4: 20.0 of 40.0 MB, 700 documents, 4.0 MB/s, 5 s left",
        "extract 3/4: 30.0 of 40.0 MB, 1,400 documents, 3.0 MB/s, 3 s left",
        "extract 4/4: 40.0 of 40.0 MB, 2,100 documents, 2.0 MB/s, 0 s left",
    ]


def test_progress_of_tasks_whose_bytes_are_not_known_has_the_time_left_and_few_lines_in_a_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage = TaskStage("pairs", 14, lambda task: {})
    ends = [102.0, 104.0, 112.0, 113.0, 128.0, 129.0, 130.0]
    clock = iter([100.0, 100.0, *ends])
    bar = ProgressBar("pairs", 14, unit=None, now=lambda: next(clock))
    progress = TaskProgress("pairs", stage, range(7, 14), bar)
    for _ in ends:
        progress({"pairs": 1})
    assert capsys.readouterr().err.splitlines() == [
        "pairs 10/14: 16 s left",
        "pairs 12/14: 11 s left",
        "pairs 14/14: 0 s left",
    ]


def test_a_terminal_shows_the_stages_of_a_command_and_keeps_their_last_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    words = ["dedup", *flags(corpus(tmp_path / "in", 2), tmp_path / "out"), "--workers", "1"]
    commands.main(words, standalone_mode=False)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    lines = [line.rpartition("\r")[2] for line in shown.split("\n")]
    ends = [line.split()[:2] for line in lines if line]
    before = [["keys", "2/2"], ["sort", "1/1"], ["pairs", "10/10"], ["paired", "1/1"]]
    assert ends == [*before, ["sets", "2/2"], ["groups", "1/1"], ["filter", "2/2"]]


def test_a_stage_that_takes_no_time_is_one_line_in_a_log(tmp_path: Path) -> None:
    words = ["dedup", *flags(corpus(tmp_path / "in", 2), tmp_path / "out")]
    log = CliRunner().invoke(commands, words).stderr
    names = [line.partition(":")[0] for line in log.splitlines()]
    before = ["keys 1/2", "keys 2/2", "sort 1/1", "pairs 10/10", "paired 1/1"]
    assert names == [*before, "sets 1/2", "sets 2/2", "groups 1/1", "filter 1/2", "filter 2/2"]


def test_without_ray_the_flag_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--executor: ray is not installed.*mega-data\[ray\]"):
        deduplicate(corpus(tmp_path / "in", 1), tmp_path / "out", "--executor", "ray")


def test_ray_gives_the_bytes_of_one_process(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    # in a process of its own, for Ray starts others and leaves files open
    inputs = corpus(tmp_path / "in", 4)
    once = deduplicate(inputs, tmp_path / "once")
    words = [sys.executable, "-m", "mega_data", "dedup", *flags(inputs, tmp_path / "ray")]
    words += ["--executor", "ray", "--workers", "2"]
    process = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr
    assert files(tmp_path / "ray") == once


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    with socket.socket() as listener:  # bound, and nobody listens
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"RAY_ADDRESS: no cluster to use: found {address}: .*refused"):
            deduplicate(corpus(tmp_path / "in", 1), tmp_path / "out", "--executor", "ray")


def test_workers_end_with_who_started_them_and_whoever_is_killed_the_bytes_are_the_same(
    tmp_path: Path,
) -> None:
    inputs = corpus(tmp_path / "in", 16)
    once = deduplicate(inputs, tmp_path / "once")
    rng, output = random.Random(3), tmp_path / "killed"
    words = [sys.executable, "-m", "mega_data", "dedup", *flags(inputs, output), "--workers", "2"]
    for turn in range(6):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        with process.stderr:
            for _ in range(rng.randrange(1, 7)):  # tasks that end
                assert process.stderr.readline()
            victim = process.pid if turn % 2 else rng.choice(_workers(process.pid))
            os.kill(victim, signal.SIGKILL)
            log = process.stderr.read()  # to its end: nobody holds it any more
        assert process.wait() == (-signal.SIGKILL if turn % 2 else 2), log
        assert "Traceback" not in log
    assert deduplicate(inputs, output, "--workers", "2") == once


def _workers(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
