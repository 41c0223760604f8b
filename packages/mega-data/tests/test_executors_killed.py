"""Sixteen shards on local processes, a Slurm array and a Ray cluster whose workers are killed at random.

Every run ends: with the bytes of one process, or with a line that names the killed worker.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from mega_data.executors.ray import _run_task

SLURM = Path(__file__).resolve().parents[3] / "infra/slurm"
SHARDS = 16
KILLS = [2, pytest.param(7, marks=pytest.mark.long)]  # of the workers of each executor
LONGEST = 300  # seconds, for what may not hang
PROGRAM = [sys.executable, "-m", "mega_data"]


def dumps(folder: Path) -> Path:
    """Small dumps of some megabytes in all."""
    rng = random.Random(1)
    words = [f"[[{word}|{word}s]]" if n % 9 == 0 else word for n, word in enumerate(map(str, range(5000)))]
    folder.mkdir()
    for shard in range(SHARDS):
        texts = (" ".join(rng.choices(words, k=3000)) for _ in range(20))
        pages = (
            f"<page><title>{n}</title><ns>0</ns><id>{n}</id><text>{text}</text></page>"
            for n, text in enumerate(texts)
        )
        (folder / f"{shard:02d}.xml").write_text(f"<mediawiki>{''.join(pages)}</mediawiki>")
    return folder


def flags(inputs: Path, output: Path) -> list[str]:
    work = str(output.with_suffix(".work"))
    return ["extract", "--input", str(inputs), "--output", str(output), "--work-dir", work]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.jsonl"))}


def extract_once(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """The folder of the dumps, and the files that one process writes of them."""
    inputs = dumps(folder / "in")
    subprocess.run([*PROGRAM, *flags(inputs, folder / "once")], check=True, capture_output=True)
    return inputs, files(folder / "once")


def descendants(pid: int, mark: bytes) -> list[int]:
    """The processes that were started under one, and have a mark in their command line."""
    pids, ahead = list[int](), [pid]
    while ahead:
        current = ahead.pop()
        for task in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                ahead += map(int, task.read_text().split())
                pids += [current] if mark in Path(f"/proc/{current}/cmdline").read_bytes() else []
            except OSError:  # it has ended
                continue
    return sorted(set(pids) - {pid})


def run_with_kills(
    words: list[str], rng: random.Random, kills: int, victims: Callable[[int], list[int]], **more: object
) -> tuple[int, str, int]:
    """Run a command and kill some of its workers; return exit code, output and number of kills."""
    killed, started = 0, time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, **more)  # type: ignore[call-overload]
        while process.poll() is None:
            time.sleep(rng.uniform(0.01, 0.15))
            assert time.monotonic() - started < LONGEST, "it hangs"
            if killed < kills and rng.random() < 0.5 and (candidates := victims(process.pid)):
                try:
                    os.kill(rng.choice(candidates), signal.SIGKILL)
                except ProcessLookupError:  # it had done its work
                    continue
                killed += 1
        log.seek(0)
        return process.returncode, log.read(), killed


@contextmanager
def ray_head(environment: dict[str, str], cpus: int = 2) -> Iterator[tuple[int, str]]:
    """A cluster of this machine that others started: its process, and its address."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # names of sockets have to be short
    words = ["start", "--head", "--port=0", f"--num-cpus={cpus}", "--include-dashboard=false", "--block"]
    words = [sys.executable, "-m", "ray.scripts.scripts", *words, "--temp-dir", str(folder)]
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        started = time.monotonic()
        while not (folder / "ray_current_cluster").exists():
            assert process.poll() is None
            assert time.monotonic() - started < LONGEST
            time.sleep(0.1)
        yield process.pid, (folder / "ray_current_cluster").read_text()
    finally:
        process.terminate()
        process.wait(LONGEST)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("kills", KILLS)
def test_workers_killed_at_random_are_replaced_or_told_and_the_bytes_are_the_same(
    tmp_path: Path, kills: int
) -> None:
    inputs, once = extract_once(tmp_path)
    rng = random.Random()
    assert len(once) == SHARDS
    local, killed = [*PROGRAM, *flags(inputs, tmp_path / "local"), "--workers", "2"], 0
    while killed < kills:
        code, log, more = run_with_kills(local, rng, 1, lambda pid: descendants(pid, b"spawn_main"))
        killed += more
        assert code == (2 if more else 0), log
        assert not more or "error: --workers: a process was killed" in log.splitlines()[-1]
        if code == 0:  # done before it could be killed: once more from the start
            assert files(tmp_path / "local") == once
            shutil.rmtree(tmp_path / "local.work")
    run_with_kills(local, rng, 0, lambda pid: [])
    assert files(tmp_path / "local") == once

    (tmp_path / "jobs").mkdir()
    for name, word in (("sbatch", str(Path(__file__).with_name("sbatch.py"))), ("mega-data", "-m mega_data")):
        program = tmp_path / "jobs" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {word} "$@"\n')
        program.chmod(stat.S_IRWXU)
    path = f"{tmp_path / 'jobs'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "JOBS": str(tmp_path / "jobs")}
    array = ["bash", str(SLURM / "data.sh"), "4", "extract join", *flags(inputs, tmp_path / "array")]
    killed = 0
    while killed < kills:
        code, log, more = run_with_kills(
            array, rng, 3, lambda pid: descendants(pid, b"-m\0mega_data"), env=environment
        )
        killed += more
        assert code == 0, log  # the jobs are submitted; which of them end well is another matter
    run_with_kills(array, rng, 0, lambda pid: [], env=environment)
    assert files(tmp_path / "array") == once


@pytest.mark.long
def test_a_ray_cluster_whose_workers_are_killed_gives_the_bytes_of_one_process(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    inputs, once = extract_once(tmp_path)
    rng = random.Random()
    # code that only who gives the work has: titles tell whose was run
    for name in ("mega_data", "mega_schema"):
        shutil.copytree(Path(str(import_module(name).__file__)).parent, tmp_path / "code" / name)
    code = tmp_path / "code/mega_data/extract/pipeline.py"
    code.write_text(code.read_text().replace('"title": page.title', '"title": "of the giver"'))
    wanted = {name: re.sub(rb'"title":"\d+"', b'"title":"of the giver"', data) for name, data in once.items()}
    assert wanted != once
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    kills, killed, output = 7, 0, tmp_path / "ray"
    words = [*PROGRAM, *flags(inputs, output), "--executor", "ray"]
    process_name = f"ray::{_run_task.__name__}".encode()
    with ray_head(environment) as (head, address):
        environment |= {"RAY_ADDRESS": address, "PYTHONPATH": str(tmp_path / "code")}
        ended, runs = 2, 0
        while killed < kills or ended:
            runs += 1
            assert runs < 50, f"{killed} tasks were killed in {runs} runs"
            kills_left = kills - killed
            ended, log, more = run_with_kills(
                words, rng, kills_left, lambda _: descendants(head, process_name), env=environment
            )
            killed += more
            assert ended in (0, 2), log
            assert not ended or "error: --executor: Ray lost a task of extract" in log, log
            if killed < kills and not ended:  # done before it could be killed so often
                assert files(output) == wanted
                shutil.rmtree(output.with_suffix(".work"))
        assert files(output) == wanted
        (inputs / "03.xml").write_text("<other/>")
        words[words.index(str(output.with_suffix(".work")))] = str(tmp_path / "other.work")
        ended, log, _ = run_with_kills(words, rng, 0, lambda _: [], env=environment)
        assert ended == 2
        assert f"error: {inputs}/03.xml: unknown format" in log.splitlines()[-1]


@contextmanager
def ray_nodes(address: str, environment: dict[str, str]) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """A function that adds a node of one CPU to a cluster; all of them are ended after the block."""
    nodes: list[subprocess.Popen[bytes]] = []
    words = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--address={address}",
        "--num-cpus=1",
        "--block",
    ]

    def add_node() -> subprocess.Popen[bytes]:
        nodes.append(
            subprocess.Popen(
                words,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        return nodes[-1]

    try:
        yield add_node
    finally:
        for node in nodes:
            kill_node(node)


def kill_node(node: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node at once, as a machine that loses its power."""
    try:
        os.killpg(node.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    node.wait(LONGEST)


@pytest.mark.long
def test_a_ray_cluster_that_loses_nodes_gives_the_bytes_of_one_process(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    inputs, once = extract_once(tmp_path)
    rng = random.Random()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    output, lost, runs = tmp_path / "ray", 0, 0
    words = [*PROGRAM, *flags(inputs, output), "--executor", "ray"]
    task_name = f"ray::{_run_task.__name__}".encode()
    with ray_head(environment, cpus=0) as (_, address), ray_nodes(address, environment) as add_node:
        environment |= {"RAY_ADDRESS": address}
        nodes = [add_node(), add_node()]
        while lost < 2:
            runs += 1
            assert runs < 20, f"{lost} nodes were lost in {runs} runs"
            started, was_lost = time.monotonic(), False
            with tempfile.TemporaryFile("w+") as log:
                process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
                while process.poll() is None:
                    time.sleep(rng.uniform(0.01, 0.15))
                    assert time.monotonic() - started < LONGEST, "it hangs"
                    busy = [node for node in nodes if descendants(node.pid, task_name)]
                    if busy and not was_lost and rng.random() < 0.5:
                        node = rng.choice(busy)
                        kill_node(node)
                        nodes.remove(node)
                        nodes.append(add_node())
                        was_lost = True
                log.seek(0)
                text = log.read()
            lost += was_lost
            assert process.returncode in (0, 2), text
            assert not process.returncode or "error: --executor: Ray lost a task of extract" in text, text
            if not process.returncode:
                assert files(output) == once
                shutil.rmtree(output.with_suffix(".work"))
    assert lost == 2
