"""The command: a server in its own process, and every error that keeps it from starting."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mega_schema.checkpoint.checkpoint_dir import FORMAT, TOKENIZER
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.side_files import rewrite_checksums
from tests import fork_server

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "mega_serve"]


@contextmanager
def serving(
    load: Path, *flags: str, program: Sequence[str] = COMMAND
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server; yields its process and its URL."""
    command = [*program, "--load", str(load), "--port", "0", "--device", "cpu", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            match = re.match(r"mega-serve: (http://127\.0\.0\.1:\d+) ready \(gpt, 2 layers, .*7\)$", line)
            assert match, line or server.communicate()[1]
            yield server, match[1]
        finally:
            server.kill()


def get_error(*flags: str) -> str:
    """Run the command, check that it exits with code 2, and return its line on stderr."""
    process = fork_server.run("mega_serve", flags, imports=fork_server.SERVER, env=ENVIRONMENT, timeout=60)
    assert (process.returncode, process.stdout) == (2, ""), process
    assert process.stderr.count("\n") == 1, process.stderr
    return process.stderr


def test_a_server_answers_and_stops_when_it_is_asked_to(checkpoint: Path) -> None:
    with serving(checkpoint, "--max-body-bytes", "5000") as (server, url):
        with httpx.Client(base_url=url, timeout=30) as client:
            assert client.get("/health").json() == {"status": "ok"}
            assert "<textarea" in client.get("/").text
            body = {"prompts": ["my secret"], "tokens_to_generate": 5, "random_seed": 1}
            response = client.put("/api", json=body)
            assert response.status_code == 200
            assert response.json()["text"][0].startswith("my secret")
            assert client.put("/api", json=body).json() == response.json()
            assert client.put("/api", json={"prompts": ["a" * 100]}).status_code == 400
            too_long = client.put("/api", json={"prompts": ["a" * 5000]})
            assert too_long.status_code == 413
            assert client.get("/health").status_code == 200
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=30)
    assert server.returncode == 0, err
    assert out == ""
    assert "secret" not in err
    assert "Traceback" not in err
    assert "PUT /api 200" in err


SLOW_SERVER = """
import time
import mega_serve.engine
from mega_serve.cli import main

class SlowEngine:
    def generate(self, request, should_abort):
        print("entered", flush=True)
        time.sleep(1)
        return {"text": ["done"]}

mega_serve.engine.load_engine = lambda *_, **__: SlowEngine()
main()
"""


def test_a_request_in_progress_is_answered_before_the_server_stops(checkpoint: Path) -> None:
    program = [sys.executable, "-c", SLOW_SERVER]
    with serving(checkpoint, program=program) as (server, url), ThreadPoolExecutor() as pool:
        future = pool.submit(httpx.put, f"{url}/api", json={"prompts": ["a"]}, timeout=30)
        assert server.stdout is not None
        assert server.stdout.readline() == "entered\n"
        server.send_signal(signal.SIGTERM)
        assert future.result().json() == {"text": ["done"]}
        server.communicate(timeout=30)
        assert server.returncode == 0


def test_legacy_clients_get_a_status_of_200_and_a_string(checkpoint: Path) -> None:
    with serving(checkpoint, "--megatron-legacy-status", "--log-prompts") as (server, url):
        response = httpx.put(f"{url}/api", json={"prompts": ["logged"], "top_k": -1}, timeout=30)
        assert response.status_code == 200
        assert isinstance(response.json(), str)
        httpx.put(f"{url}/api", json={"prompts": ["logged"], "tokens_to_generate": 1}, timeout=30)
        server.send_signal(signal.SIGTERM)
        assert "'logged'" in server.communicate(timeout=30)[1]


def test_a_port_in_use_is_refused_with_another_one(checkpoint: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        error = get_error("--load", str(checkpoint), "--port", str(port))
    assert f"--port: in use by another program: found {port}; hint: --port " in error


def test_a_host_that_is_not_here_is_refused() -> None:
    assert "--host: cannot be listened on" in get_error("--load", "x", "--host", "192.0.2.1", "--port", "0")
    assert "--host: no such address: found ..; hint: --host 127.0.0.1" in get_error(
        "--load", "x", "--host", "..", "--port", "0"
    )


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in get_error("--load", str(tmp_path / "nothing"), "--port", "0")


def test_a_half_written_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".iter_0000010.partial").mkdir()
    assert "half-written .iter_0000010.partial" in get_error("--load", str(tmp_path), "--port", "0")


def test_a_checkpoint_without_tokenizer_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for file in Checkpoint.open(checkpoint).folder.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    rewrite_checksums(tmp_path, FORMAT)
    error = get_error("--load", str(tmp_path), "--port", "0")
    assert f"{tmp_path / TOKENIZER}: the checkpoint has no tokenizer" in error


def test_a_device_that_is_not_here_is_refused(checkpoint: Path) -> None:
    error = get_error("--load", str(checkpoint), "--port", "0", "--device", "cuda:99")
    assert "--device: not a device of this machine: found cuda:99" in error


@pytest.mark.parametrize("flags", [["--load"], [], ["--load", "x", "--port", "70000"], ["--dtype", "int8"]])
def test_flags_that_mean_nothing_are_one_line(flags: list[str]) -> None:
    assert get_error(*flags).startswith("error: ")


@pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
def test_help_and_version_answer_without_torch_or_fastapi(flag: str) -> None:
    probe = (
        "import sys, runpy\n"
        f"sys.argv = ['mega-serve', {flag!r}]\n"
        "try: runpy.run_module('mega_serve', run_name='__main__')\n"
        "except SystemExit as exit: assert exit.code in (0, None), exit.code\n"
        "print([name for name in ('torch', 'fastapi', 'uvicorn', 'numpy') if name in sys.modules])\n"
    )
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert process.stdout.endswith("[]\n"), process.stdout
    assert ("0.1.0" if flag == "--version" else "--megatron-legacy-status") in process.stdout
