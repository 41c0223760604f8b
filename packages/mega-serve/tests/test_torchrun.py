"""Serving under torchrun: what its variables mean, and servers that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from mega_schema.errors import ConfigError
from mega_serve.commands.offline import generate
from mega_serve.process.torchrun import TorchrunRank
from tests import fork_server
from tests.fork_server import ROOT
from tests.serving.server_program import ServerProgram

VARIABLES = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
}


def read_rank(**variables: str) -> TorchrunRank:
    rank = TorchrunRank.from_environment(VARIABLES | variables, os.getpid())
    assert rank is not None
    return rank


def test_without_torchrun_there_is_no_rank() -> None:
    variables = {name: text for name, text in VARIABLES.items() if name != "TORCHELASTIC_RUN_ID"}
    assert TorchrunRank.from_environment(variables, os.getpid()) is None


def test_the_ranks_of_one_attempt_meet_in_one_folder_and_no_others_do() -> None:
    ranks = [read_rank(RANK=str(number)) for number in range(4)]
    assert [(rank.rank, rank.world) for rank in ranks] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert len({rank.folder for rank in ranks}) == 1
    assert read_rank(TORCHELASTIC_RESTART_COUNT="1").folder != ranks[0].folder
    stranger = TorchrunRank.from_environment(VARIABLES, os.getppid())
    assert stranger is not None
    assert stranger.folder != ranks[0].folder


@pytest.mark.parametrize("name", sorted(VARIABLES.keys() - {"TORCHELASTIC_RUN_ID"}))
@pytest.mark.parametrize("text", ["", "two", "-1"])
def test_a_variable_that_is_no_number_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: not a number: found '{text}', wanted an integer"):
        read_rank(**{name: text})


def test_ranks_on_several_hosts_are_refused() -> None:
    message = (
        "WORLD_SIZE: ranks on several hosts cannot serve one model: found 8, wanted 4; "
        "hint: torchrun --nnodes 1 --nproc-per-node 4"
    )
    with pytest.raises(ConfigError) as error:
        read_rank(WORLD_SIZE="8")
    assert str(error.value) == message


def test_a_number_of_processes_that_is_not_that_of_the_layout_is_refused() -> None:
    read_rank().check_world(2, 2)
    with pytest.raises(ConfigError) as error:
        read_rank().check_world(2, 1)
    assert str(error.value) == (
        "--tp, --pp: need as many processes as torchrun starts: found 2 x 1 for 4 processes, wanted 4; "
        "hint: torchrun --nproc-per-node 2"
    )


def test_generate_refuses_to_write_the_same_output_on_every_rank(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in VARIABLES.items():
        monkeypatch.setenv(name, text)
    words = ["--load", str(checkpoint), "--num-samples", "1", "--genfile", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="WORLD_SIZE: generate starts the ranks of --tp and --pp itself"):
        generate.main(words, standalone_mode=False)


def torchrun_words(checkpoint: Path, processes: int, *flags: str) -> list[str]:
    server = ["--load", str(checkpoint), "--port", "0", "--device", "cpu", "--attention", "torch"]
    return ["--standalone", "--nproc-per-node", str(processes), "-m", "mega_serve", *server, *flags]


@pytest.mark.long
def test_torchrun_serves_with_four_ranks_and_ends_after_a_signal(checkpoint: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": fork_server.module_path(),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    words = torchrun_words(checkpoint, 4, "--tp", "2", "--pp", "2")
    server = ServerProgram("torch.distributed.run", words, environment)
    try:
        body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer: dict[str, Any] = server.http.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 8
        assert list(tmp_path.glob("mega-serve-*")) == []  # nobody can join any more
        server.process.terminate()
        server.process.wait(60)
        with pytest.raises(httpx.TransportError):
            server.http.get("/livez")
    finally:
        server.close()


@pytest.mark.long
def test_the_wrong_number_of_ranks_is_one_line_and_every_rank_ends(checkpoint: Path) -> None:
    words = torchrun_words(checkpoint, 2, "--tp", "1")
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1  # torchrun's own
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert lines == [
        "error: --tp, --pp: need as many processes as torchrun starts: found 1 x 1 for 2 processes, "
        "wanted 2; hint: torchrun --nproc-per-node 1"
    ]
    assert "exitcode  : 2 " in result.stderr
