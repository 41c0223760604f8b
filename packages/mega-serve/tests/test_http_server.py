"""The server as a program, over sockets: deadlines, cap on connections, disconnect, drain, a dead engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests import fork_server

HEADERS = b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


class ServerProgram:
    """A running echo server."""

    def __init__(self, settings: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": fork_server.module_path()}
        command = [sys.executable, "-m", "tests.serving.echo_server", "0", json.dumps(settings)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())
        assert self.process.stdout.readline() == "listening\n"
        self.url = f"http://127.0.0.1:{self.port}"
        # a context for TLS costs 50 ms, and no connection may stay open between two requests
        self.http = httpx.Client(
            base_url=self.url, verify=False, timeout=20, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self.log: list[str] = []
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read_log(self) -> None:
        assert self.process.stderr
        self.log.extend(self.process.stderr)

    def wait_loaded(self) -> None:
        assert self.process.stdout
        assert self.process.stdout.readline() == "loaded echo\n"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def post(self, **body: Any) -> httpx.Response:
        return self.http.post("/echo", json=body)

    def count_running(self) -> int:
        return int(self.get("/load").json()["running"])

    def wait_until(self, condition: Any, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_exit(self) -> int:
        return self.process.wait(10)

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream
            with contextlib.suppress(ValueError):
                stream.close()


@contextlib.contextmanager
def run_server(**settings: Any) -> Iterator[ServerProgram]:
    program = ServerProgram(settings)
    try:
        yield program
    finally:
        program.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProgram]:
    limits = {"header_timeout": 0.6, "body_timeout": 0.5, "write_timeout": 0.6, "connections": 1100}
    with run_server(
        engine={"step_seconds": 0.002}, limits=limits, process={"heartbeat_timeout": 0.6}
    ) as program:
        program.wait_loaded()
        yield program


def receive_all(connection: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


def receive_until(connection: socket.socket, end: bytes) -> None:
    received = b""
    while not received.endswith(end):
        data = connection.recv(65536)
        assert data, received
        received += data


def send_slowly(connection: socket.socket, data: bytes, seconds: float) -> float:
    """Send a byte every few milliseconds until the server closes; return how long it let us."""
    start = time.monotonic()
    connection.settimeout(0.02)
    for byte in data:
        with contextlib.suppress(TimeoutError):
            if not connection.recv(1, socket.MSG_PEEK):
                break
            break
        try:
            connection.send(bytes([byte]))
        except (BrokenPipeError, ConnectionResetError):
            break
        assert time.monotonic() - start < seconds, "the server let us"
    return time.monotonic() - start


@pytest.mark.parametrize("first", [b"", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_headers_that_trickle_in_are_ended_at_the_deadline(server: ServerProgram, first: bytes) -> None:
    with server.connect() as connection:
        if first:  # also after a whole request on the same connection
            connection.sendall(first)
            receive_until(connection, b"}")
        seconds = send_slowly(connection, b"GET / HTTP/1.1\r\nX-A: " + b"a" * 500, 3.0)
        assert 0.4 < seconds < 2.0
        connection.settimeout(5)
        response = receive_all(connection)  # none, if the client still wrote when the connection ended
        if response:
            assert read_refusal(response.removeprefix(b"}"), 408)["code"] == "timeout"


def test_a_connection_without_a_request_is_closed_at_the_deadline(server: ServerProgram) -> None:
    with server.connect() as connection:
        start = time.monotonic()
        assert connection.recv(1) == b""
        assert 0.4 < time.monotonic() - start < 2.0


def test_a_body_that_trickles_in_is_408(server: ServerProgram) -> None:
    with server.connect() as connection:
        connection.sendall(HEADERS)
        seconds = send_slowly(connection, b"x" * 99, 3.0)
        connection.settimeout(5)
        response = receive_all(connection)
        assert 0.3 < seconds < 2.0
        assert response.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in response.lower()


def read_refusal(response: bytes, status: int) -> dict[str, Any]:
    """Check the headers of an answer that the application did not give, and return its error."""
    head, _, body = response.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    assert first.startswith(f"HTTP/1.1 {status} ")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert headers["x-mega-iteration"] == "7"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["cache-control"] == "no-store"
    error: dict[str, Any] = json.loads(body)["error"]
    return error


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",  # TLS to a port without it
    ],
)
def test_bytes_that_are_no_request_get_a_json_400(server: ServerProgram, request_bytes: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(request_bytes)
        error = read_refusal(receive_all(connection), 400)
    assert (error["code"], error["message"]) == ("invalid_http", "not an HTTP/1.1 request")


def test_headers_above_16_kib_are_refused(server: ServerProgram) -> None:
    with server.connect() as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 200_000)
        response = receive_all(connection)
        assert response == b"" or response.startswith(b"HTTP/1.1 4")


def test_a_thousand_idle_connections_do_not_slow_health_and_their_descriptors_come_back(
    server: ServerProgram,
) -> None:
    process = psutil.Process(server.process.pid)
    before = process.num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(server.connect())
        with httpx.Client() as client:
            for _ in range(5):
                start = time.monotonic()
                assert client.get(server.url + "/health").status_code == 200
                assert time.monotonic() - start < 0.1
    server.wait_until(lambda: process.num_fds() <= before + 2)


def test_health_answers_within_100_ms_during_a_body_of_a_mebibyte(server: ServerProgram) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048577\r\n\r\n")
        connection.sendall(b"x" * 1048576)
        start = time.monotonic()
        assert server.get("/health").status_code == 200
        assert time.monotonic() - start < 0.1
        connection.sendall(b"x")
        receive_until(connection, b'{"bytes":1048577}')


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request_at_once(server: ServerProgram, stream: bool) -> None:
    body = json.dumps({"prompt": "A", "max_tokens": 100_000, "stream": stream}).encode()
    with server.connect() as connection:
        connection.sendall(
            b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        server.wait_until(lambda: server.count_running() == 1)
    server.wait_until(lambda: server.count_running() == 0, seconds=1.0)
    status = 200 if stream else 499
    server.wait_until(lambda: f'"status": {status}, "outcome": "client_left"' in server.log[-1])


@pytest.mark.parametrize(
    ("length", "rest", "end"),
    [
        (b"Content-Length: 100", b"part", '"status": 499, "outcome": "client_left"'),
        (b"Transfer-Encoding: chunked", b"no chunk\r\n", '"status": 400, "outcome": "refused"'),
    ],
    ids=["part", "no-chunk"],
)
@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_body_without_its_end_is_no_error_of_the_server(
    server: ServerProgram, length: bytes, rest: bytes, end: str, pause: float
) -> None:
    request_id = f"left-{len(rest)}-{pause}"
    head = HEADERS.replace(b"Content-Length: 100", b"X-Request-Id: %s\r\n" % request_id.encode() + length)
    with server.connect() as connection:
        connection.sendall(head if pause else head + rest)
        if pause:  # the application has the request when the rest of it comes
            time.sleep(pause)
            connection.sendall(rest)
        time.sleep(0.1)
    server.wait_until(lambda: any(request_id in line for line in server.log))
    (audit,) = [line for line in server.log if request_id in line]
    assert end in audit
    assert not any("ClientDisconnect" in line for line in server.log)


def test_head_answers_with_the_headers_of_get_alone(server: ServerProgram) -> None:
    expected = server.get("/livez")
    response = server.http.head("/livez")
    assert (response.status_code, response.content) == (200, b"")
    for name in ("content-type", "content-length"):
        assert response.headers[name] == expected.headers[name]
    assert server.http.head("/nothing").status_code == 404
    assert server.get("/livez").json() == {"status": "ok"}  # the connection is still in order


def test_a_client_that_wants_another_protocol_gets_http_and_no_line_of_advice(server: ServerProgram) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert server.http.get("/livez", headers=headers).status_code == 200
    assert not any("uvicorn" in line for line in server.log if "pip install" in line)


def test_a_client_that_does_not_read_is_cut_and_its_request_freed(server: ServerProgram) -> None:
    body = json.dumps({"prompt": "A", "max_tokens": 100_000, "stream": True, "pad": 100_000}).encode()
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(
            b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        server.wait_until(lambda: server.count_running() == 1)
        server.wait_until(lambda: server.count_running() == 0, seconds=15.0)
    assert server.get("/health").status_code == 200


def test_a_request_to_a_stopped_engine_gets_500_within_the_limit_and_health_tells_the_truth(
    server: ServerProgram,
) -> None:
    (engine,) = psutil.Process(server.process.pid).children()
    results: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: results.append(server.post(prompt="A", max_tokens=100_000)))
    thread.start()
    server.wait_until(lambda: server.count_running() == 1)
    engine.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    server.wait_until(lambda: server.get("/health").status_code == 503)
    thread.join(5)
    assert time.monotonic() - start < 3.0
    assert results[0].status_code == 500
    assert results[0].headers["x-request-id"] in results[0].json()["error"]["message"]
    server.wait_until(lambda: server.get("/health").status_code == 200)
    assert server.post(prompt="A").json() == {"text": "AAAA"}


def test_only_the_http_port_listens(server: ServerProgram) -> None:
    process = psutil.Process(server.process.pid)
    listening = [
        connection.laddr.port
        for member in (process, *process.children(recursive=True))
        for connection in member.net_connections("all")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == [server.port]


def test_while_loading_the_port_answers_503() -> None:
    with run_server(engine={"load_seconds": 60.0}) as server:
        assert server.get("/livez").status_code == 200
        assert server.get("/health").json() == {"status": "loading"}
        assert server.get("/health").status_code == 503
        response = server.post(prompt="A")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_sigterm_refuses_new_requests_finishes_the_running_one_and_exits_0() -> None:
    with run_server(engine={"step_seconds": 0.01}) as server:
        server.wait_loaded()
        results: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: results.append(server.post(prompt="A", max_tokens=200)))
        thread.start()
        server.wait_until(lambda: server.count_running() == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.get("/ready").status_code == 503)
        response = server.post(prompt="A")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert server.get("/health").status_code == 200
        assert server.get("/metrics").status_code == 200
        thread.join(10)
        assert results[0].json() == {"text": "A" * 200}
        assert server.wait_exit() == 0
        assert not any("Traceback" in line for line in server.log)


@pytest.mark.parametrize("event", ["the drain's timeout", "a second signal"])
def test_a_request_cut_at_the_end_gets_a_json_503(event: str) -> None:
    drain_timeout = 0.3 if event == "the drain's timeout" else 60.0
    with run_server(engine={"step_seconds": 0.01}, drain_timeout=drain_timeout) as server:
        server.wait_loaded()
        results: list[httpx.Response] = []
        threads = [
            threading.Thread(
                target=lambda s=stream: results.append(server.post(prompt="A", max_tokens=10**5, stream=s))
            )
            for stream in (False, True)
        ]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: server.count_running() == 2)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        if event == "a second signal":
            server.wait_until(lambda: server.get("/ready").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - start < 4.0
        for thread in threads:
            thread.join(5)
        (plain,) = [response for response in results if response.status_code == 503]
        (stream,) = [response for response in results if response.status_code == 200]
        assert plain.json()["error"]["code"] == "shutting_down"
        assert int(plain.headers["retry-after"]) > 0
        assert json.loads(stream.text.strip().splitlines()[-1][6:])["error"]["code"] == "shutting_down"
        assert not any("Traceback" in line for line in server.log)


def test_without_restart_a_dead_engine_ends_the_server_with_an_error() -> None:
    with run_server(process={"restart": False}) as server:
        server.wait_loaded()
        psutil.Process(server.process.pid).children()[0].kill()
        assert server.wait_exit() == 1


def test_the_engine_dies_with_a_killed_server() -> None:
    with run_server() as server:
        server.wait_loaded()
        (engine,) = psutil.Process(server.process.pid).children()
        server.process.kill()
        server.wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def test_connections_above_the_cap_are_told_and_closed() -> None:
    with run_server(limits={"connections": 5}) as server, contextlib.ExitStack() as stack:
        server.wait_loaded()
        for _ in range(5):
            stack.enter_context(server.connect())
        time.sleep(0.1)
        with server.connect() as connection:
            response = receive_all(connection)
        assert read_refusal(response, 503)["code"] == "connection_limit"
        assert b"\r\nretry-after: 5\r\n" in response


def test_tls_is_spoken_with_a_certificate_and_a_silent_handshake_is_ended(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    subprocess.run([*new, *subject, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with run_server(certificate=[str(certificate), str(key)], limits={"header_timeout": 0.5}) as server:
        url = f"https://localhost:{server.port}/livez"
        context = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(url, verify=context).status_code == 200
        with server.connect() as connection:
            start = time.monotonic()
            assert receive_all(connection) == b""
            assert time.monotonic() - start < 3.0
