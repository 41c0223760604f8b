"""The README's quick start, and the effects of `make demo` on files and processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo/run.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_run", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo_run", module)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_a_folder_that_no_demo_made_is_refused_and_kept(tmp_path: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("dear")
    command = [sys.executable, str(DEMO), "--output", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr == (
        f"error: --output: contains files that a demo did not write: found {tmp_path}; "
        "hint: name a new folder\n"
    )
    assert letter.read_text() == "dear"


def test_the_folder_of_a_demo_before_is_emptied(demo: ModuleType, tmp_path: Path) -> None:
    for _ in range(2):
        demo.create_output_folder(tmp_path / "run")
        assert [left.name for left in (tmp_path / "run").iterdir()] == [demo.MARK]
        (tmp_path / "run/corpus.jsonl").touch()


class Torchrun:
    """A command that is interrupted while it runs, and then takes its time."""

    def __init__(self, *waits: int | BaseException) -> None:
        self.waits, self.asked = list(waits), list[str]()

    def wait(self, timeout: float | None = None) -> int:
        self.asked.append("wait" if timeout is None else "wait a while")
        status = self.waits.pop(0)
        if isinstance(status, BaseException):
            raise status
        return status

    def terminate(self) -> None:
        self.asked.append("terminate")


def test_an_interrupted_command_is_never_left_before_it_has_ended(demo: ModuleType) -> None:
    quick = Torchrun(KeyboardInterrupt(), 1)
    with pytest.raises(KeyboardInterrupt):
        demo.wait_for_exit(quick)
    assert quick.asked == ["wait", "wait a while"]
    slow = Torchrun(KeyboardInterrupt(), subprocess.TimeoutExpired("torchrun", 10), 1)
    with pytest.raises(KeyboardInterrupt):
        demo.wait_for_exit(slow)
    assert slow.asked == ["wait", "wait a while", "terminate", "wait"]
    assert demo.wait_for_exit(Torchrun(3)) == 3


def test_the_demo_waits_while_the_server_loads_the_model(demo: ModuleType, tmp_path: Path) -> None:
    statuses = [503, 503, 200]

    class LoadingHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), LoadingHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/ready"
        demo.wait_for_server(url, SimpleNamespace(poll=lambda: None), tmp_path / "log")
        server.shutdown()
    assert statuses == []
    (tmp_path / "log").write_text("error: --load: no checkpoint\n")
    with pytest.raises(SystemExit, match="--load: no checkpoint"):
        demo.wait_for_server(url, SimpleNamespace(poll=lambda: 2), tmp_path / "log")


@pytest.mark.long
def test_the_quick_start_of_the_readme_runs(tmp_path: Path) -> None:
    """Up to the server, which tests/e2e/test_text_to_server.py asks."""
    section = (ROOT / "README.md").read_text("utf-8").partition("## Quick start")[2]
    commands = section.partition("```sh\n")[2].partition("mega-serve")[0]
    assert commands.count("mega-") == 5
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text().strip() == "200"
    assert len(list(tmp_path.glob("perplexity-half-overlap-*.json"))) == 1
