"""`mega-serve` as a program: started, read, asked and stopped by tests."""

from __future__ import annotations

import contextlib
import os
import re
import select
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests import fork_server

READY = re.compile(r"mega-serve: (http://127\.0\.0\.1:(\d+)) ready \((.*)\)\n")
START_SECONDS = 120.0


class ServerProgram:
    """A running server, whose engine has loaded the model.

    Attributes:
        process: the HTTP process.
        url: of the server.
        ready_line: what it printed when the model was loaded.
        http: a client of it.
    """

    def __init__(self, target: str, flags: list[str], environment: dict[str, str]) -> None:
        self._stdout, stdout = os.pipe()
        descriptor, name = tempfile.mkstemp(prefix="serve", suffix=".log")
        self._log = Path(name)
        try:
            self.process = fork_server.start(
                target,
                flags,
                imports=fork_server.SERVER,
                stdout=stdout,
                stderr=descriptor,
                env=environment,
            )
        finally:
            os.close(stdout)
            os.close(descriptor)
        self.http = httpx.Client(timeout=60, trust_env=False)
        self.ready_line = self._read_line()
        match = READY.fullmatch(self.ready_line)
        if match is None:
            log = self.read_log()
            self.close()
            raise AssertionError(f"{self.ready_line!r}\n{log}")
        self.url, self.port = match[1], int(match[2])
        self.http.base_url = httpx.URL(self.url)

    def _read_line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            ready = select.select([self._stdout], [], [], START_SECONDS)[0]
            data = os.read(self._stdout, 1) if ready else b""
            if not data:
                break
            line += data
        return line.decode()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    def read_log(self) -> str:
        """Return what the processes have written to standard error."""
        return self._log.read_text("utf-8")

    def read_output(self) -> str:
        """Return what followed the ready line on standard output, of a server that has ended."""
        data = b""
        while part := os.read(self._stdout, 4096):
            data += part
        return data.decode()

    def read_metrics(self) -> dict[str, float]:
        """Return the value of each metric, summed over its labels, without the prefix mega_serve_."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                name = sample.name.removeprefix("mega_serve_")
                values[name] = values.get(name, 0.0) + sample.value
        return values

    def find_engine(self) -> psutil.Process:
        """Return the engine process."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = [child for child in children if "mega_serve.process.engine_process" in child.cmdline()]
        return engine

    def wait_idle(self) -> dict[str, float]:
        """Wait until the engine has no request, and return the metrics."""

        def is_idle() -> bool:
            metrics = self.read_metrics()
            return metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0

        wait_until(is_idle)
        time.sleep(0.25)  # for one more report of the engine
        return self.read_metrics()

    def close(self) -> None:
        """Kill the processes."""
        self.http.close()
        self.process.kill()
        self.process.wait()
        os.close(self._stdout)
        self._log.unlink()


@contextlib.contextmanager
def run_server(load: Path, *flags: str, target: str = "mega_serve") -> Iterator[ServerProgram]:
    """Run a server on the CPU, on a free port; `target` is that of `fork_server.start`."""
    common = ["--load", str(load), "--port", "0", "--device", "cpu", "--threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": fork_server.module_path()}
    server = ServerProgram(target, [*common, *flags], environment)
    try:
        yield server
    finally:
        server.close()


def wait_until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: it did not come true.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
