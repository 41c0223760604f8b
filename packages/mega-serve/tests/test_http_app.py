"""The HTTP application around an engine client without a process."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from starlette.routing import BaseRoute

from mega_serve.engine.interfaces import (
    EngineDeadError,
    EngineOverloadedError,
    EngineUnavailableError,
    ModelInfo,
)
from mega_serve.engine.requests import EngineRequest, EngineStats, RequestTimes, SequenceOutput
from mega_serve.http.app import Application, create_app
from mega_serve.http.auth import ENVIRONMENT, load_keys
from mega_serve.http.config import ServerConfig
from mega_serve.http.limits import Limits
from mega_serve.http.rate_limit import RateLimits
from mega_serve.http.server import Server
from mega_serve.http.serving import serve_engine
from mega_serve.process.engine_client import EngineProcessClient
from tests.serving.echo_engine import MODEL
from tests.serving.echo_server import create_echo_app, echo_settings

ALICE = "a" * 32
BOB = "b" * 32
KEYS = load_keys(None, {ENVIRONMENT: f"alice:{ALICE},bob:{BOB}"})
AUTHORIZATION = {"Authorization": f"Bearer {ALICE}"}
PROBES = {"/health", "/livez", "/ready", "/readyz"}


@dataclass
class FakeClient:
    """An EngineClient that answers each request with its prompt, or raises."""

    is_loaded: bool = True
    is_alive: bool = True
    error: Exception | None = None
    finish_reason: Any = "length"
    hold: asyncio.Event | None = None
    requests: list[EngineRequest] = field(default_factory=list)
    closed: int = 0
    times: RequestTimes | None = None
    stats: EngineStats = EngineStats(running=2, waiting=3, kv_usage=0.25, generation_tokens=11)

    @property
    def model(self) -> ModelInfo:
        if not self.is_loaded:
            raise EngineUnavailableError("the model is loading")
        return MODEL

    async def generate(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        self.requests.append(request)
        try:
            if self.error:
                raise self.error
            token = request.prompt_token_ids[0]
            yield SequenceOutput(request_id=request.request_id, token_ids=(token,), text=chr(token))
            if self.hold:
                await self.hold.wait()
            yield SequenceOutput(
                request_id=request.request_id,
                token_ids=(token,),
                text="!",
                finish_reason=self.finish_reason,
                times=self.times,
            )
        finally:
            self.closed += 1


def send(app: Application, method: str, path: str, **options: Any) -> httpx.Response:
    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app.asgi, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(exchange())


def post_echo(app: Application, prompt: str = "A", **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    return send(app, "POST", "/echo", json={"prompt": prompt, **fields}, headers=headers)


def all_routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield method and path of every route."""

    def walk(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
        for route in routes:
            for method in getattr(route, "methods", None) or ():
                yield method, route.path  # type: ignore[attr-defined]
            inner = getattr(route, "original_router", None) or getattr(route, "router", None)
            if inner is not None:
                yield from walk(inner.routes)

    yield from walk(app.routes)


def test_a_response_has_its_id_its_iteration_and_the_security_headers() -> None:
    response = post_echo(create_echo_app(FakeClient(), ServerConfig()), headers={"X-Request-Id": "abc-1"})
    assert response.json() == {"text": "A!"}
    assert response.headers["x-request-id"] == "abc-1"
    assert response.headers["x-mega-iteration"] == str(MODEL.iteration)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert "access-control-allow-origin" not in response.headers
    assert "server" not in response.headers


def test_an_unknown_path_and_a_wrong_method_say_what_there_is() -> None:
    app = create_echo_app(FakeClient(), ServerConfig())
    for method, path, status, message in (
        ("GET", "/v2/x", 404, "there is no /v2/x; hint: GET /docs lists the routes"),
        ("DELETE", "/version", 405, "/version accepts GET, HEAD only"),
    ):
        response = send(app, method, path)
        assert (response.status_code, response.json()["error"]["message"]) == (status, message)
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-mega-iteration"] == str(MODEL.iteration)
        assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("value", ["a" * 129, "a b", 'x"y', "é".encode().decode("latin-1"), ""])
def test_a_request_id_that_is_no_id_is_replaced(value: str) -> None:
    app = create_echo_app(FakeClient(), ServerConfig())
    response = send(app, "GET", "/livez", headers=[(b"x-request-id", value.encode("latin-1"))])
    assert len(response.headers["x-request-id"]) == 32


def test_every_route_but_the_probes_asks_for_the_key() -> None:
    page = APIRouter()
    page.add_api_route("/", lambda: HTMLResponse("page"), methods=["GET"])
    app = create_echo_app(FakeClient(), ServerConfig(keys=KEYS), pages=[page])
    routes = set(all_routes(app.asgi))
    assert {path for _, path in routes} >= {
        *PROBES,
        "/",
        "/echo",
        "/metrics",
        "/load",
        "/version",
        "/docs",
        "/openapi.json",
    }
    for method, path in routes:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {ALICE}x"}):
            response = send(app, method, path, headers=headers)
            assert response.status_code == (200 if path in PROBES else 401), (method, path)
        if path not in PROBES:
            assert send(app, method, path, headers=AUTHORIZATION).status_code != 401


@pytest.mark.parametrize(
    "host", ["x/health?y=", "localhost/health?", "localhost/livez#", "/health", "localhost\\health"]
)
def test_a_forged_host_does_not_get_around_the_key(host: str) -> None:
    app = create_echo_app(FakeClient(), ServerConfig(keys=KEYS, allowed_hosts=("*",)))
    for method, path in all_routes(app.asgi):
        if path not in PROBES:
            response = send(app, method, path, headers={"Host": host})
            assert response.status_code in (401, 421), (host, path)


def test_a_wrong_key_is_refused_before_the_body_is_read() -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    app = create_echo_app(FakeClient(), ServerConfig(keys=KEYS))
    assert send(app, "POST", "/echo", content=body()).status_code == 401


def test_metrics_need_no_key_if_the_operator_says_so() -> None:
    app = create_echo_app(FakeClient(), ServerConfig(keys=KEYS, public_metrics=True))
    assert send(app, "GET", "/metrics").status_code == 200
    assert send(app, "GET", "/load").status_code == 401


def test_the_cache_is_separate_for_every_key() -> None:
    client = FakeClient()
    app = create_echo_app(client, ServerConfig(keys=KEYS))
    for key in (ALICE, BOB):
        assert post_echo(app, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    namespaces = [request.cache_namespace for request in client.requests]
    assert len(set(namespaces)) == 2
    assert all(namespaces)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:99999"])
def test_another_host_is_421(host: str) -> None:
    client = FakeClient()
    for config in (ServerConfig(), ServerConfig(allowed_hosts=("api.example",))):
        response = post_echo(create_echo_app(client, config), headers={"Host": host})
        assert response.status_code == 421
        assert response.json()["error"]["code"] == "host_not_allowed"
    assert not client.requests
    config = ServerConfig(allowed_hosts=(host.partition(":")[0],))
    assert post_echo(create_echo_app(client, config), headers={"Host": "evil.example"}).status_code in (
        200,
        421,
    )


def test_an_allowed_host_is_served() -> None:
    app = create_echo_app(FakeClient(), ServerConfig(allowed_hosts=("api.example",)))
    assert post_echo(app, headers={"Host": "API.example:8443"}).status_code == 200


def test_a_page_of_another_site_cannot_send_requests() -> None:
    client = FakeClient()
    app = create_echo_app(client, ServerConfig())
    for origin in ("http://evil.example", "null", "http://localhost.evil.example"):
        assert post_echo(app, headers={"Origin": origin}).status_code == 403
    assert not client.requests
    response = post_echo(app, headers={"Origin": "http://localhost"})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in send(app, "OPTIONS", "/echo", headers=preflight).headers


def test_an_allowed_origin_gets_cors_headers_and_no_other_does() -> None:
    app = create_echo_app(FakeClient(), ServerConfig(allowed_origins=("https://app.example",)))
    response = post_echo(app, headers={"Origin": "https://app.example"})
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in response.headers
    preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "PUT"}
    assert send(app, "OPTIONS", "/echo", headers=preflight).status_code == 200
    assert post_echo(app, headers={"Origin": "https://evil.example"}).status_code == 403


def test_a_body_above_the_limit_is_413_with_and_without_a_length() -> None:
    app = create_echo_app(FakeClient(), ServerConfig(limits=replace(Limits(), body_bytes=1000)))

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    for content in (b"x" * 1001, chunks()):
        response = send(app, "POST", "/body", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["message"] == "the body is longer than 1,000 bytes"
        assert response.headers["connection"] == "close"
    assert send(app, "POST", "/body", content=b"x" * 1000).json() == {"bytes": 1000}


def test_a_slow_body_is_408() -> None:
    async def trickle() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.02)
            yield b"x"

    app = create_echo_app(FakeClient(), ServerConfig(limits=replace(Limits(), body_timeout=0.2)))
    response = send(app, "POST", "/body", content=trickle())
    assert response.status_code == 408
    assert "0.2 seconds" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (EngineOverloadedError("full", 12.3), 429, "engine_overloaded", "13"),
        (EngineUnavailableError("loading"), 503, "engine_unavailable", "5"),
        (EngineDeadError("the engine stopped"), 500, "engine_dead", None),
        (KeyError("secret prompt"), 500, "internal_error", None),
    ],
)
def test_errors_of_the_engine_have_openais_object(
    error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    app = create_echo_app(FakeClient(error=error), ServerConfig())
    response = post_echo(app, headers={"X-Request-Id": "id-7"})
    assert response.status_code == status
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == code
    assert response.headers.get("retry-after") == retry_after
    if status == 500:
        assert "id-7" in body["message"]
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("reason", "status", "code"), [("error", 500, "engine_error"), ("timeout", 504, "timeout")]
)
def test_an_answer_that_was_cut_is_not_a_200(reason: str, status: int, code: str) -> None:
    app = create_echo_app(FakeClient(finish_reason=reason), ServerConfig())
    response = post_echo(app)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    stream = post_echo(app, stream=True)
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == code


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("DELETE", "/echo", 405), ("GET", "/health/", 404)],
)
def test_unknown_routes_and_methods_have_openais_object_too(method: str, path: str, status: int) -> None:
    response = send(create_echo_app(FakeClient(), ServerConfig()), method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_an_unexpected_error_is_a_500_with_an_id_and_its_text_is_in_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = create_echo_app(FakeClient(), ServerConfig())
    with caplog.at_level(logging.DEBUG):
        response = send(app, "POST", "/fail", content="secret prompt", headers={"X-Request-Id": "id-8"})
    assert response.status_code == 500
    assert "id-8" in response.json()["error"]["message"]
    assert "request id-8 failed: RuntimeError" in caplog.text
    assert "secret prompt" not in caplog.text + response.text


def test_the_audit_line_says_who_used_how_much_and_quotes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    app = create_echo_app(FakeClient(), ServerConfig(keys=KEYS))
    with caplog.at_level(logging.INFO):
        post_echo(app, "ZQ", headers={**AUTHORIZATION, "X-Request-Id": "id-9"})
        send(app, "GET", "/health")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "mega.serve.audit"]
    values = json.loads(line)
    assert values.pop("ms") >= 0
    assert values == {
        "event": "request",
        "request_id": "id-9",
        "key_id": "alice",
        "client": "127.0.0.1",
        "method": "POST",
        "route": "/echo",
        "status": 200,
        "outcome": "complete",
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "generated_tokens": 2,
        "finish_reasons": {"length": 1},
    }
    assert "ZQ" not in caplog.text
    assert ALICE not in caplog.text


def read_outcomes(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Return status and outcome of every audit line."""
    lines = [record.getMessage() for record in caplog.records if record.name == "mega.serve.audit"]
    return [(line["status"], line["outcome"]) for line in map(json.loads, lines)]


@pytest.mark.parametrize(
    ("client", "status", "outcome"),
    [
        (FakeClient(), 200, "complete"),
        (FakeClient(finish_reason="timeout"), 504, "deadline"),
        (FakeClient(finish_reason="error"), 500, "engine_error"),
        (FakeClient(error=EngineDeadError("the engine stopped")), 500, "engine_error"),
        (FakeClient(error=EngineUnavailableError("the engine is loading")), 503, "unavailable"),
        (FakeClient(error=EngineOverloadedError("the queue is full", 1.0)), 429, "refused"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_audit_line_says_how_an_answer_ended_also_of_a_stream_with_status_200(
    client: FakeClient, status: int, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_echo_app(client, ServerConfig())
    with caplog.at_level(logging.INFO):
        post_echo(app)
        post_echo(app, stream=True)
        send(app, "GET", "/nothing")
        send(app, "POST", "/fail", content="x")
    assert read_outcomes(caplog) == [
        (status, outcome),
        (200, outcome),
        (404, "refused"),
        (500, "server_error"),
    ]


def test_a_key_above_its_rate_gets_429_and_other_keys_do_not() -> None:
    now = [0.0]
    config = ServerConfig(keys=KEYS, rate_limits=RateLimits(requests_per_minute=2))
    app = create_echo_app(FakeClient(), config, clock=lambda: now[0])
    assert [post_echo(app, headers=AUTHORIZATION).status_code for _ in range(3)] == [200, 200, 429]
    response = post_echo(app, headers=AUTHORIZATION)
    assert response.headers["retry-after"] == "30"
    error = response.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    limit = "the API key's rate limit of requests is reached: found none left, wanted at most 2 a minute"
    assert error["message"] == f"{limit}; hint: try again in 30 s"
    assert post_echo(app, headers={"Authorization": f"Bearer {BOB}"}).status_code == 200
    now[0] = 30.0
    assert post_echo(app, headers=AUTHORIZATION).status_code == 200


def test_tokens_count_against_the_rate() -> None:
    config = ServerConfig(keys=KEYS, rate_limits=RateLimits(tokens_per_minute=60))
    app = create_echo_app(FakeClient(), config, clock=lambda: 0.0)
    assert post_echo(app, "A" * 88, headers=AUTHORIZATION).status_code == 200
    response = post_echo(app, headers=AUTHORIZATION)
    assert response.status_code == 429
    limit = (
        "the API key's rate limit of tokens is reached: found 30 above it, wanted at most 60 tokens a minute"
    )
    assert response.json()["error"]["message"] == f"{limit}; hint: try again in 31 s"
    assert response.headers["retry-after"] == "31"  # 88 of the prompt and 2 generated, at one a second


@pytest.mark.parametrize(
    ("client", "states"),
    [
        (FakeClient(), {"/livez": 200, "/health": 200, "/ready": 200, "/readyz": 200}),
        (
            FakeClient(is_loaded=False, is_alive=False),
            {"/livez": 200, "/health": 503, "/ready": 503, "/readyz": 503},
        ),
        (FakeClient(is_alive=False), {"/livez": 200, "/health": 503, "/ready": 503, "/readyz": 503}),
    ],
)
def test_probes_tell_the_state_of_the_engine(client: FakeClient, states: dict[str, int]) -> None:
    app = create_echo_app(client, ServerConfig())
    assert {path: send(app, "GET", path).status_code for path in states} == states


def test_head_is_get_without_the_body_and_needs_the_same_key() -> None:
    client = FakeClient(is_alive=False)
    open_app = create_echo_app(client, ServerConfig())
    assert {path: send(open_app, "HEAD", path).status_code for path in ("/livez", "/ready", "/metrics")} == {
        "/livez": 200,
        "/ready": 503,
        "/metrics": 200,
    }
    response = send(open_app, "HEAD", "/echo")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    locked = create_echo_app(client, ServerConfig(keys=KEYS))
    assert send(locked, "HEAD", "/load").status_code == 401


def test_while_draining_new_requests_get_503_and_health_and_metrics_answer() -> None:
    client = FakeClient()
    app = create_echo_app(client, ServerConfig())
    app.lifecycle.is_draining = True
    response = post_echo(app)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "shutting_down"
    assert int(response.headers["retry-after"]) > 0
    assert send(app, "GET", "/ready").json() == {"status": "draining"}
    assert send(app, "GET", "/ready").status_code == 503
    assert send(app, "GET", "/health").status_code == 200
    assert (
        'mega_serve_admission_rejections_total{model_name="echo",reason="draining"} 1.0'
        in send(app, "GET", "/metrics").text
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_request_gets_a_json_503_or_an_error_event(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> httpx.Response:
        client = FakeClient(hold=asyncio.Event())
        app = create_echo_app(client, ServerConfig())
        transport = httpx.ASGITransport(app.asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            task = asyncio.create_task(http.post("/echo", json={"prompt": "A", "stream": stream}))
            while not client.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert app.lifecycle.active_requests == 1
            app.lifecycle.cut_requests()
            response = await task
            assert app.lifecycle.active_requests == 0
            assert client.closed == 1
            return response

    with caplog.at_level(logging.INFO):
        response = asyncio.run(scenario())
    assert read_outcomes(caplog) == [(200 if stream else 503, "server_stopping")]
    if stream:
        assert json.loads(response.text.strip().splitlines()[-1][6:])["error"]["code"] == "shutting_down"
    else:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        assert response.headers["retry-after"] == "30"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_port_is_open_ends_the_server_in_order(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server = Server(create_echo_app(FakeClient(), ServerConfig()), Limits(), on_ready=lambda: None)
        serving = asyncio.create_task(server.serve([socket.create_server(("127.0.0.1", 0))]))
        await asyncio.sleep(0)
        assert not server.started
        os.kill(os.getpid(), number)
        async with asyncio.timeout(5):
            await serving

    asyncio.run(scenario())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class _RestartedClient:
    """An engine that is ready, dies, is ready again, and dies for good."""

    def __init__(self) -> None:
        self.failure, self.is_refused, self.model = "killed", False, "model"
        self.statuses = ["loading", "ready", "loading", "ready", "dead"]

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def wait_status(self, *statuses: str) -> str:
        while self.statuses[0] not in statuses:
            del self.statuses[0]
            await asyncio.sleep(0)
        return self.statuses[0]


def test_ready_is_reported_again_after_the_engine_was_restarted() -> None:
    reports: list[Any] = []

    async def scenario() -> int:
        server = Server(create_echo_app(FakeClient(), ServerConfig()), Limits(), on_ready=lambda: None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return await serve_engine(_RestartedClient(), server, listener, reports.append)  # type: ignore[arg-type]

    assert asyncio.run(scenario()) == 1
    assert reports == ["model", "model"]


def test_ctrl_c_during_the_imports_starts_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    client = EngineProcessClient(echo_settings({}))

    async def scenario() -> None:
        server = Server(create_echo_app(client, ServerConfig()), Limits(), on_ready=lambda: None)
        os.kill(os.getpid(), signal.SIGINT)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await serve_engine(client, server, listener, lambda model: None)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGINT, before)
    assert client.pid is None
    assert caplog.records == []


def test_an_error_of_a_cut_request_is_not_left_to_the_event_loop() -> None:
    """A request may end by an error of its own at the moment in which it is cut, by us or by uvicorn."""
    router = APIRouter()

    @router.post("/clumsy")
    async def clumsy() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("cannot clean up") from None

    complaints: list[dict[str, Any]] = []

    async def scenario(*, is_cut: bool) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        app = create_app(FakeClient(), ServerConfig(), apis=[router])
        transport = httpx.ASGITransport(app.asgi, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            task = asyncio.create_task(http.post("/clumsy"))
            while not app.lifecycle.active_requests:
                await asyncio.sleep(0.01)
            if is_cut:
                app.lifecycle.cut_requests()
            else:
                task.cancel()
            await asyncio.wait([task])
        del task
        gc.collect()

    asyncio.run(scenario(is_cut=True))
    asyncio.run(scenario(is_cut=False))
    assert complaints == []


def test_metrics_have_vllms_suffixes_and_the_gateways_gauges() -> None:
    app = create_echo_app(FakeClient(), ServerConfig())
    assert post_echo(app).status_code == 200
    text = send(app, "GET", "/metrics").text
    for line in (
        'mega_serve_num_requests_running{model_name="echo"} 2.0',
        'mega_serve_num_requests_waiting{model_name="echo"} 3.0',
        'mega_serve_kv_cache_usage_perc{model_name="echo"} 0.25',
        'mega_serve_generation_tokens_total{model_name="echo"} 11.0',
        'mega_serve_request_success_total{finished_reason="length",model_name="echo"} 1.0',
        'mega_serve_time_to_first_token_seconds_count{model_name="echo"} 1.0',
        'mega_serve_inter_token_latency_seconds_count{model_name="echo"} 1.0',
        'mega_serve_e2e_request_latency_seconds_count{model_name="echo"} 1.0',
        'mega_serve_http_requests_total{model_name="echo",route="/echo",status="200"} 1.0',
        "# TYPE mega_serve_num_requests_waiting gauge",
    ):
        assert line in text
    assert "vllm:" not in text


def test_latencies_are_of_requests_that_the_engine_answered_only() -> None:
    """Listings of models and refused requests would bury the latency of the model."""
    app = create_echo_app(FakeClient(error=EngineOverloadedError("the queue is full", 3.0)), ServerConfig())
    assert [send(app, "GET", path).status_code for path in ("/load", "/version")] == [200, 200]
    assert post_echo(app).status_code == 429
    text = send(app, "GET", "/metrics").text
    assert 'mega_serve_e2e_request_latency_seconds_count{model_name="echo"} 0.0' in text
    assert 'mega_serve_request_generation_tokens_count{model_name="echo"} 0.0' in text


def test_metrics_have_the_time_per_output_token_of_a_sequence_that_ended() -> None:
    app = create_echo_app(
        FakeClient(times=RequestTimes(queue=0.5, prefill=0.25, decode=0.125)), ServerConfig()
    )
    assert post_echo(app).status_code == 200
    text = send(app, "GET", "/metrics").text
    # two tokens: the time of decoding is that of the second
    assert 'mega_serve_request_time_per_output_token_seconds_sum{model_name="echo"} 0.125' in text
    assert 'mega_serve_request_time_per_output_token_seconds_count{model_name="echo"} 1.0' in text


def test_metrics_have_the_tokens_of_the_steps() -> None:
    stats = EngineStats(step_counts=(3, 1, *[0] * 11, 2), step_tokens=33_000)
    text = send(create_echo_app(FakeClient(stats=stats), ServerConfig()), "GET", "/metrics").text
    for line in (
        "# TYPE mega_serve_iteration_tokens_total histogram",
        'mega_serve_iteration_tokens_total_bucket{le="1.0",model_name="echo"} 3.0',
        'mega_serve_iteration_tokens_total_bucket{le="16384.0",model_name="echo"} 4.0',
        'mega_serve_iteration_tokens_total_bucket{le="+Inf",model_name="echo"} 6.0',
        'mega_serve_iteration_tokens_total_count{model_name="echo"} 6.0',
        'mega_serve_iteration_tokens_total_sum{model_name="echo"} 33000.0',
    ):
        assert line in text
    assert "step_counts" not in send(create_echo_app(FakeClient(), ServerConfig()), "GET", "/load").json()


def test_metrics_have_vllms_names_if_asked() -> None:
    text = send(create_echo_app(FakeClient(), ServerConfig(vllm_metrics=True)), "GET", "/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="echo"}}' in text
        assert f'mega_serve_{name}{{model_name="echo"}}' in text
    assert "# TYPE vllm:request_success counter" in text.replace("_total counter", " counter")


def test_paths_of_clients_do_not_become_labels() -> None:
    app = create_echo_app(FakeClient(), ServerConfig())
    for number in range(50):
        send(app, "GET", f"/scan-{number}")
    text = send(app, "GET", "/metrics").text
    assert "scan" not in text
    assert 'route="unmatched",status="404"} 50.0' in text


def test_load_and_version_answer() -> None:
    app = create_echo_app(FakeClient(), ServerConfig())
    load = send(app, "GET", "/load").json()
    assert load["running"] == 2
    assert "last_step" not in load
    assert set(send(app, "GET", "/version").json()) == {"version"}


def test_the_documentation_page_loads_nothing_from_elsewhere() -> None:
    app = create_echo_app(FakeClient(), ServerConfig())
    assert "/echo" in send(app, "GET", "/openapi.json").json()["paths"]
    response = send(app, "GET", "/docs")
    assert response.text.index("POST /echo") < response.text.index("GET /livez")
    assert "<script" not in response.text
    assert "http://" not in response.text
    assert "https://" not in response.text
    assert "default-src 'none'" in response.headers["content-security-policy"]


def test_no_variable_of_opentelemetry_makes_the_server_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.example:4318")

    def refuse(*arguments: object) -> None:
        raise AssertionError("the server opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    app = create_echo_app(FakeClient(), ServerConfig())

    async def scenario() -> None:
        async with app.asgi.router.lifespan_context(app.asgi):
            transport = httpx.ASGITransport(app.asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                assert (await client.post("/echo", json={"prompt": "A"})).status_code == 200

    asyncio.run(scenario())


def test_a_server_knows_its_number_of_connections() -> None:
    app = create_echo_app(FakeClient(), ServerConfig())
    server = Server(app, Limits(), on_ready=lambda: None)
    assert server.connections == 0
