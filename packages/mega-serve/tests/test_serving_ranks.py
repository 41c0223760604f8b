"""A server with several ranks whose device is missing, whose worker dies or hangs, or that has no network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from mega_schema.checkpoint.checkpoint_dir import MANIFEST, iteration_folder
from mega_schema.spec import ModelSpec, gpt
from mega_schema.tokenizer.tokenizer import Tokenizer
from tests import fork_server
from tests.serving.random_checkpoint import save_random_checkpoint
from tests.serving.server_program import ServerProgram, run_server, wait_until

FLAGS = ("--attention", "torch", "--tp", "2", "--engine-timeout", "3")
LONG_REQUEST = {"prompt": "Hi", "max_tokens": 1400, "n": 8, "ignore_eos": True}
SHORT_REQUEST = {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def long_spec(tokenizer: Tokenizer) -> ModelSpec:
    """A small model whose longest request takes many seconds."""
    vocab = tokenizer.identity.vocab_size + 2
    return gpt(layers=2, hidden=32, heads=4, vocab=vocab, max_seq_len=4096, init_std=0.3, vocab_multiple=8)


@pytest.fixture
def run(tmp_path: Path, long_spec: ModelSpec, tokenizer: Tokenizer) -> Path:
    """A run of its own for every test, with iteration 7."""
    tokenizer.save(tmp_path / "words")
    save_random_checkpoint(tmp_path, long_spec, tmp_path / "words")
    return tmp_path


def find_worker(server: ServerProgram) -> psutil.Process:
    """Return rank 1."""
    (worker,) = server.find_engine().children()
    return worker


def post(server: ServerProgram, body: dict[str, object]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)


def check_recovery(server: ServerProgram, restarts: int) -> None:
    """Wait until an engine that ended is started again, and ask it."""
    wait_until(lambda: server.http.get("/health").status_code == 503)
    # 500: the engine hangs, but is not killed yet
    assert post(server, SHORT_REQUEST).status_code in (500, 503)
    wait_until(lambda: server.http.get("/health").status_code == 200, seconds=60)
    assert post(server, SHORT_REQUEST).json()["usage"]["completion_tokens"] == 4
    assert server.read_metrics()["engine_restarts_total"] == restarts


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_gpu_that_the_machine_lacks_is_one_line_and_exit_code_2(checkpoint: Path, ranks: str) -> None:
    words = ["--load", str(checkpoint), "--port", "0", "--device", "cuda", "--tp", ranks]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = fork_server.run("mega_serve", words, imports=fork_server.SERVER, env=environment)
    assert result.returncode == 2
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "loads the model" not in line]
    assert lines == [
        "error: --device: not a device of this machine: found cuda, wanted auto | cpu: this machine has no "
        "GPU that torch can use; hint: --device cpu"
    ]


@pytest.mark.long
def test_a_rank_that_dies_or_hangs_fails_its_requests_and_all_ranks_start_again(run: Path) -> None:
    with run_server(run, *FLAGS) as server:
        for restarts, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            worker = find_worker(server)
            with ThreadPoolExecutor() as pool:
                future = pool.submit(post, server, LONG_REQUEST)
                wait_until(lambda: server.read_metrics()["num_requests_running"] == 8)
                worker.send_signal(number)
                response = future.result()
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "engine_dead"
            assert response.headers["x-request-id"] in response.json()["error"]["message"]
            check_recovery(server, restarts)
            assert not worker.is_running()  # SIGKILL ends a stopped process too


@pytest.mark.long
def test_a_rank_that_dies_or_hangs_while_idle_is_noticed_without_a_request(run: Path) -> None:
    with run_server(run, *FLAGS) as server:
        for restarts, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            find_worker(server).send_signal(number)
            check_recovery(server, restarts)


@pytest.mark.long
def test_a_rank_that_dies_ends_a_server_that_must_not_restart(run: Path) -> None:
    with run_server(run, *FLAGS, "--no-restart") as server:
        find_worker(server).kill()
        assert server.process.wait(20) == 1
        assert "rank 1 has ended" in server.read_log()


def add_checkpoint(run: Path, spec: ModelSpec) -> None:
    save_random_checkpoint(run, spec, run / "words", iteration=9, seed=4)


def add_damaged_checkpoint(run: Path, spec: ModelSpec) -> None:
    add_checkpoint(run, spec)
    (iteration_folder(run, 9) / MANIFEST).write_text("{")


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "add"),
    [(("--tp", "2"), add_checkpoint), (("--follow",), add_damaged_checkpoint)],
    ids=["a newer one", "a damaged one of a followed run"],
)
def test_an_engine_that_is_started_again_serves_the_same_checkpoint(
    run: Path, long_spec: ModelSpec, flags: tuple[str, ...], add: Callable[[Path, ModelSpec], None]
) -> None:
    with run_server(run, "--attention", "torch", *flags) as server:
        body = {**SHORT_REQUEST, "temperature": 0}
        before = post(server, body)
        add(run, long_spec)
        server.find_engine().kill()
        check_recovery(server, 1)
        after = post(server, body)
        assert before.headers["x-mega-iteration"] == after.headers["x-mega-iteration"] == "7"
        assert after.json()["choices"] == before.json()["choices"]


# run in a namespace that has nothing but a loopback device
ISOLATED = """
import json
import subprocess
import sys
from pathlib import Path

import psutil

from tests.serving.server_program import run_server

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with run_server(Path(sys.argv[1]), "--attention", "torch", "--tp", "2") as server:
    body = {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
    tokens = server.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"]
    server_process = psutil.Process(server.process.pid)
    processes = [server_process, *server_process.children(recursive=True)]
    connections = [c for process in processes for c in process.net_connections("inet")]
    peers = {address.ip for c in connections for address in (c.laddr, c.raddr) if address}
    server.process.terminate()
    code = server.process.wait(20)
routes = Path("/proc/net/route").read_text().splitlines()[1:]
print("REPORT " + json.dumps([tokens, len(processes), sorted(peers), routes, code]))
"""


@pytest.mark.long
def test_a_server_with_two_ranks_needs_no_network_but_loopback(run: Path) -> None:
    unshare = ["unshare", "--map-root-user", "--net"]
    try:
        probe = subprocess.run([*unshare, "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if probe.returncode:
        pytest.skip(f"no network namespace may be created: {probe.stderr.strip()}")
    command = [*unshare, sys.executable, "-c", ISOLATED, str(run)]
    environment = {**os.environ, "PYTHONPATH": fork_server.module_path(), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, cwd=fork_server.ROOT, capture_output=True, text=True, timeout=180
    )
    assert 'REPORT [4, 3, ["127.0.0.1"], [], 0]' in result.stdout, result.stdout + result.stderr[-3000:]
