"""The program: its start, its end, its help, and every error that keeps it from starting."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mega_schema.checkpoint.checkpoint_dir import FORMAT, TOKENIZER
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.side_files import rewrite_checksums
from tests import fork_server
from tests.serving.server_program import ServerProgram, run_server, wait_until

LONG = {"prompts": ["kept"], "tokens_to_generate": 50, "top_k": 1}
# a step takes 20 ms: 50 tokens a second
SLOW_ENGINE = "tests.serving.slow_engine:main"


def get_error(*flags: str) -> str:
    """Run the command, check that it exits with code 2, and return its line on stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = fork_server.run("mega_serve", flags, imports=fork_server.SERVER, env=environment, timeout=60)
    assert (process.returncode, process.stdout) == (2, ""), process
    lines = process.stderr.splitlines()
    if "loads the model" in lines[0]:
        del lines[0]
    lines = [line for line in lines if " mega.serve" not in line]
    assert len(lines) == 1, process.stderr
    return lines[0]


@pytest.fixture
def server(checkpoint: Path) -> Iterator[ServerProgram]:
    """A server of its own for a test that stops it; 50 tokens take a second."""
    with run_server(checkpoint, "--attention", "torch", target=SLOW_ENGINE) as running:
        yield running


def test_a_request_in_progress_is_answered_after_sigterm_and_new_ones_get_503(server: ServerProgram) -> None:
    assert server.ready_line.endswith("ready (gpt, 2 layers, 64 tokens of context, iteration 7)\n")
    assert server.http.get("/health").json() == {"status": "ok"}
    with ThreadPoolExecutor() as pool:
        future = pool.submit(httpx.put, f"{server.url}/api", json=LONG, timeout=30)
        wait_until(lambda: server.read_metrics()["num_requests_running"])
        server.process.terminate()
        wait_until(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.put("/api", json=LONG).status_code == 503
        response = future.result()
    assert response.status_code == 200
    assert len(response.json()["segments"][0]) == 54
    assert server.process.wait(10) == 0
    assert server.read_output() == ""
    log = server.read_log()
    assert "Traceback" not in log
    assert "kept" not in log


def test_a_second_sigterm_cuts_a_request_with_503_and_a_stream_with_an_error_event(checkpoint: Path) -> None:
    flags = ("--attention", "torch", "--megatron-legacy-status", "--log-prompts")
    with run_server(checkpoint, *flags, target=SLOW_ENGINE) as server, ThreadPoolExecutor() as pool:
        # Megatron's own server answers so
        refused = server.http.put("/api", json={"prompts": ["logged"], "top_k": -1})
        assert refused.status_code == 200
        assert isinstance(refused.json(), str)
        future = pool.submit(httpx.put, f"{server.url}/api", json=LONG, timeout=30)
        body = {"prompt": "kept", "max_tokens": 50, "ignore_eos": True, "stream": True}
        stream = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=30)
        wait_until(lambda: server.read_metrics()["num_requests_running"] == 2)
        start = time.monotonic()
        server.process.terminate()
        wait_until(lambda: server.http.get("/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert future.result().status_code == 503
        assert stream.result().headers["x-mega-iteration"] == "7"
        *texts, last = stream.result().text.removesuffix("\n\n").split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert all('"error"' not in text for text in texts)
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < 3
        assert "'kept'" in server.read_log()
        assert "Traceback" not in server.read_log()


def test_a_port_in_use_is_refused_with_another_one(checkpoint: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        error = get_error("--load", str(checkpoint), "--port", str(port))
    assert f"--port: in use by another program: found {port}; hint: --port " in error


def test_a_host_of_another_machine_is_refused() -> None:
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


def test_what_the_engine_process_refuses_is_the_error_of_the_program(checkpoint: Path) -> None:
    error = get_error("--load", str(checkpoint), "--port", "0", "--device", "cuda:99")
    assert "--device: not a device of this machine: found cuda:99" in error


@pytest.mark.parametrize(
    "flags",
    [
        ["--load"],
        [],
        ["--load", "x", "--port", "70000"],
        ["--dtype", "int4"],
        ["serve", "--lod", "x"],
        ["server"],
        ["--load", "x", "--tp", "0"],
    ],
)
def test_flags_that_mean_nothing_are_one_line(flags: list[str]) -> None:
    assert get_error(*flags).startswith("error: ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["serv", "--load", "x"],
            "serv: no such command: wanted serve | generate | chat | complete | bench; hint: did you mean",
        ),
        (["."], "hint: mega-serve --load ."),
        (
            ["complete", "--port", "5000"],
            " complete [OPTIONS] HOST:PORT [PROMPT]",
        ),
        (["chat", "--port", "5000"], "--port: no such option; hint: "),
        (["--load", ""], "--load: is empty: wanted a path; hint: is a shell variable unset?"),
    ],
)
def test_a_word_that_is_no_command_is_one_line(words: list[str], line: str) -> None:
    assert line in get_error(*words)


def test_help_and_version_answer_without_torch_or_a_web_framework() -> None:
    probe = """
import contextlib, io, runpy, sys
for words in (["--help"], ["-h"], ["--version"], ["serve", "--help"], ["serve", "--version"],
              ["generate", "--help"], ["chat", "--help"], ["complete", "--help"], ["bench", "--help"]):
    sys.argv = ["mega-serve", *words]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_module("mega_serve", run_name="__main__", alter_sys=True)
        except SystemExit as left:
            assert left.code in (0, None), (words, left.code)
    wanted = "0.1.0" if "--version" in words else "Usage: "
    assert wanted in output.getvalue(), (words, output.getvalue())
    libraries = ("torch", "fastapi", "starlette", "uvicorn", "numpy", "aiohttp", "pydantic")
    imported = [name for name in libraries if name in sys.modules]
    assert not imported, (words, imported)
"""
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
