"""The server in a replica of Ray Serve."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mega_schema.errors import ConfigError
from mega_serve.deployment.arguments import parse_arguments
from tests import fork_server
from tests.fork_server import ROOT

HAS_RAY = importlib.util.find_spec("ray") is not None and importlib.util.find_spec("ray.serve") is not None
# Ray keeps its state in a process and its children: it is started and asked in a process of its own
PROGRAM = """
import json
import sys

import httpx
import psutil
import ray
from ray import serve

from mega_serve.deployment.ray_serve import app

load, port = sys.argv[1], int(sys.argv[2])


def is_engine(process):
    # a child that ends just now, or that its parent has not waited for yet, has no command line
    try:
        return "mega_serve.process.engine_process" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def find_engines():
    return [child.pid for child in psutil.Process().children(recursive=True) if is_engine(child)]


ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(app({"load": load, "device": "cpu", "threads": "1", "attention": "torch"}))
body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
    whole = http.post("/v1/completions", json=body)
    stream = http.post("/v1/completions", json={**body, "stream": True})
    report = {
        "status": whole.status_code,
        "tokens": whole.json()["usage"]["completion_tokens"],
        "iteration": whole.headers["x-mega-iteration"],
        "stream_end": stream.text[-14:],
        "bad_request": http.post("/v1/completions", json={**body, "max_tokens": -1}).status_code,
        "health": http.get("/health").status_code,
        "another_host": http.get("/v1/models", headers={"Host": "evil.example"}).status_code,
        "engines": len(find_engines()),
    }
serve.shutdown()
report["engines_after_shutdown"] = len(find_engines())
ray.shutdown()
print("REPORT " + json.dumps(report))
"""


def test_arguments_are_options_of_the_command() -> None:
    values = parse_arguments(
        {"load": "run", "tp": "2", "max-model-len": "64", "lenient": "true", "enable_prefix_caching": "false"}
    )
    assert (values["load"], values["tp"], values["max_model_len"]) == (Path("run"), 2, 64)
    assert (values["lenient"], values["prefix_caching"], values["follow"]) == (True, False, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load": "run", "layers": "2"}, "layers: no such argument of a replica: found 2; hint: mega-serve"),
        ({"load": "run", "port": "80"}, "port: no such argument of a replica: found 80"),
        ({"load": "run", "lenient": "1"}, "lenient: is a switch: found 1, wanted true | false"),
        ({"load": "run", "tp": "two"}, "--tp: wrong type: found two, wanted an integer"),
        ({}, "--load: missing; hint: add --load ..."),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arguments(arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.skipif(not HAS_RAY, reason="ray[serve] is not installed: mega-serve[ray]")
def test_a_replica_of_ray_serve_answers_completions(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": fork_server.module_path(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(port)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, result.stderr[-5000:]
    assert json.loads(lines[0].removeprefix("REPORT ")) == {
        "status": 200,
        "tokens": 8,
        "iteration": "7",
        "stream_end": "data: [DONE]\n\n",
        "bad_request": 400,
        "health": 200,
        "another_host": 421,
        "engines": 1,
        "engines_after_shutdown": 0,
    }
