"""Runs over two hosts: equality with one process, a cut cable, and a lost host."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.checkpoint.verify import verify
from mega_schema.checkpoint.checkpoint_dir import LATEST
from mega_schema.checkpoint.reader import Checkpoint
from tests import fork_server
from tests.faults.hosts import Host, two_hosts, why_no_hosts
from tests.faults.ranks import CONFIG
from tests.parity.runs import corpus

PORT = "29400"  # of a namespace: nobody else's


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    if why := why_no_hosts():
        pytest.skip(why)
    with two_hosts() as both:
        yield both


def _arguments(folder: Path, save: str, *sets: str) -> list[str]:
    config = folder / "run.toml"
    if not config.exists():
        config.write_text(CONFIG + f'[data]\ndata_path = "{corpus(folder)}"\n')
    where = ["--save", str(folder / save), "--load", str(folder / save)]
    return [
        "gpt",
        "--config",
        str(config),
        *where,
        *(word for setting in sets for word in ("--set", setting)),
    ]


def _static(hosts: Sequence[Host], number: int, ranks: int = 1) -> list[str]:
    master = ["--master-addr", hosts[0].address, "--master-port", PORT]
    return ["--nnodes", str(len(hosts)), "--nproc-per-node", str(ranks), "--node-rank", str(number), *master]


def _wait_for_end(process: subprocess.Popen[bytes], seconds: float, log: Path) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"does not end within {seconds:g} s:\n{log.read_text('utf-8')}")


def _await(true: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def _iteration(save: Path) -> int:
    file = save / LATEST
    return int(file.read_text()) if file.exists() else 0


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param([], id="data_parallel"),
        pytest.param(
            ["parallel.pipeline_model_parallel_size=2"], id="pipeline_parallel", marks=pytest.mark.long
        ),
    ],
)
def test_two_hosts_train_what_one_process_does(
    hosts: tuple[Host, Host], tmp_path: Path, cut: list[str]
) -> None:
    logs = [tmp_path / f"log{i}" for i in range(2)]
    arguments = _arguments(tmp_path, "save", *cut)
    both = [host.torchrun(_static(hosts, i), arguments, logs[i]) for i, host in enumerate(hosts)]
    assert [_wait_for_end(process, 240, log) for process, log in zip(both, logs, strict=True)] == [0, 0]
    alone = fork_server.run("mega_train", _arguments(tmp_path, "alone"), timeout=240)
    assert alone.returncode == 0, alone.stderr
    ours, single = (_losses(tmp_path / name) for name in ("save", "alone"))
    assert ours == pytest.approx(single, abs=1e-5)


def _events(save: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (save / "events.jsonl").read_text("utf-8").splitlines()]


def _losses(save: Path) -> list[float]:
    return [event["loss"] for event in _events(save) if event["event"] == "train_log"]


@pytest.mark.long
def test_torchrun_starts_a_run_again_that_lost_a_rank(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    host, log, save = hosts[0], tmp_path / "log", tmp_path / "save"
    options = [*_static(hosts[:1], 0, 2), "--max-restarts", "1"]
    running = host.torchrun(options, _arguments(tmp_path, "save", "train.train_iters=300"), log)
    _await(lambda: _iteration(save) >= 30, 240, "no checkpoint")
    host.kill(rank=1)
    assert _wait_for_end(running, 240, log) == 0
    output = log.read_text("utf-8")
    assert re.search(r"error: rank 0, .*rank 1 \(\S+\) does not answer", output), output
    assert Checkpoint.open(save).iteration == 300
    assert "from iteration" in output


@pytest.mark.long
def test_a_run_that_lost_a_host_goes_on_with_fewer_ranks(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    logs, save = [tmp_path / f"log{i}" for i in range(2)], tmp_path / "save"
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--rdzv-id", "few"]
    waits = ["--rdzv-conf", "last_call_timeout=2,join_timeout=60"]
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", *meet, *waits]
    arguments = _arguments(tmp_path, "save", "train.train_iters=400")
    running = [
        host.torchrun([*options, "--local-addr", host.address], arguments, log)
        for host, log in zip(hosts, logs, strict=True)
    ]
    _await(lambda: _iteration(save) >= 30, 240, "no checkpoint")
    hosts[1].kill()
    running[1].wait()
    assert _wait_for_end(running[0], 240, logs[0]) == 0
    starts = [event for event in _events(save) if event["event"] == "train_start"]
    assert [start["layout"]["dp"] for start in starts] == [2, 1]
    assert starts[1]["iteration"] >= 30
    assert Checkpoint.open(save).iteration == 400


@pytest.mark.long
def test_a_cut_cable_ends_both_sides_with_the_cause_and_the_checkpoint_loads(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    logs = [tmp_path / f"log{i}" for i in range(2)]
    endless = (
        "train.train_iters=1000000",
        "checkpoint.save_interval=20",
        "parallel.distributed_timeout_minutes=0.15",
    )
    arguments = _arguments(tmp_path, "save", *endless)
    both = [host.torchrun(_static(hosts, i), arguments, logs[i]) for i, host in enumerate(hosts)]
    _await(lambda: _iteration(tmp_path / "save") >= 40, 240, logs[0].read_text("utf-8"))
    hosts[1].cut()
    # nine seconds of silence, the watchdog's patience, torchrun's own end
    assert [_wait_for_end(process, 90, log) for process, log in zip(both, logs, strict=True)] == [1, 1]
    ours, theirs = (log.read_text("utf-8") for log in logs)
    assert re.search(rf"error: rank 0, .*rank 1 \({hosts[1].name}\) does not answer", ours), ours
    assert re.search(r"error: rank 1, .*the rendezvous store does not answer", theirs), theirs
    checkpoint = Checkpoint.open(tmp_path / "save")
    assert verify(checkpoint).tensors
    assert checkpoint.iteration >= 40
