"""The application around stub engines: statuses, bodies, limits, one request at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mega_schema.errors import RequestError
from mega_serve.api.app import ClientDisconnected, create_app
from mega_serve.api.megatron import BadRequest, BeamSearchRequest, GenerationRequest
from tests.shared_data import SHARED, needs_shared

OWN_CASES = Path(__file__).parent / "data" / "requests.json"
RECORDED_CASES = SHARED / "golden" / "server_requests.json"
# Megatron refuses these and we accept them on purpose: 1 where it expects 1.0
ACCEPTED = [{"prompts": ["Hello"], "top_p": 1}, {"prompts": ["Hello"], "top_p": 0.9, "top_p_decay": 1}]
# Megatron accepts this and we refuse it on purpose
REFUSED = [{"prompts": ["Hello"], "tokens_to_generate": True}]

ShouldAbort = Callable[[], bool]


class EchoEngine:
    """An engine that continues every prompt with an exclamation mark and records the requests."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def generate(self, request: GenerationRequest, should_abort: ShouldAbort) -> dict[str, object]:
        self.requests.append(request)
        return {"text": [prompt + "!" for prompt in request.prompts], "segments": [], "logprobs": None}


class FailingEngine:
    """An engine that raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def generate(self, request: GenerationRequest, should_abort: ShouldAbort) -> dict[str, object]:
        raise self.error


def send(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(exchange())


def put(app: FastAPI, body: object) -> httpx.Response:
    return send(app, "PUT", "/api", content=json.dumps(body), headers={"Content-Type": "application/json"})


def load_cases() -> list[dict[str, Any]]:
    """Load our own cases, and with the shared data those that were recorded from Megatron's server."""
    cases: list[dict[str, Any]] = json.loads(OWN_CASES.read_text("utf-8"))
    return cases + load_recorded_cases() if SHARED.is_dir() else cases


def load_recorded_cases() -> list[dict[str, Any]]:
    cases = [entry for entry in json.loads(RECORDED_CASES.read_text("utf-8")) if "request" in entry]
    for entry in cases:
        if entry["request"].get("prompts") == "<128 strings>":
            entry["request"]["prompts"] = ["x"] * 128
    return cases


def megatron_call(request: GenerationRequest) -> dict[str, object]:
    """Return the arguments with which Megatron's server calls its engine for this request."""
    if isinstance(request, BeamSearchRequest):
        return {
            "kind": "beam",
            "tokens_to_generate": request.tokens_to_generate,
            "beam_size": request.beam_width,
            "add_BOS": request.add_bos,
            "stop_token": request.stop_token,
            "num_return_gen": request.beam_width,
            "length_penalty": request.length_penalty,
            "prevent_newline_after_colon": request.prevent_newline_after_colon,
        }
    return {
        "kind": "generate",
        "tokens_to_generate": request.tokens_to_generate,
        "return_output_log_probs": request.logprobs,
        "top_k_sampling": request.top_k,
        "top_p_sampling": request.top_p,
        "top_p_decay": request.top_p_decay,
        "top_p_bound": request.top_p_bound,
        "temperature": request.temperature,
        "add_BOS": request.add_bos,
        "use_eod_token_for_early_termination": True,
        "stop_on_double_eol": request.stop_on_double_eol,
        "stop_on_eol": request.stop_on_eol,
        "prevent_newline_after_colon": request.prevent_newline_after_colon,
        "random_seed": -1 if request.random_seed is None else request.random_seed,
    }


@needs_shared
def test_there_are_recorded_requests() -> None:
    assert len(load_recorded_cases()) == 42


@pytest.mark.parametrize("entry", load_cases(), ids=lambda entry: json.dumps(entry["request"])[:80])
def test_legacy_responses_and_calls_of_the_engine_are_megatrons(entry: dict[str, Any]) -> None:
    engine = EchoEngine()
    response = put(create_app(engine, legacy=True), entry["request"])
    assert response.status_code == entry["status"]
    assert [megatron_call(request) for request in engine.requests] == entry["engine_call"]
    if "error_about" in entry:
        assert isinstance(response.json(), str)
        response = put(create_app(engine), entry["request"])
        if entry["request"] not in ACCEPTED:
            assert response.json()["error"]["param"] == entry["error_about"]
    else:
        assert response.json()["text"] == [prompt + "!" for prompt in entry["request"]["prompts"]]


@pytest.mark.parametrize("entry", load_cases(), ids=lambda entry: json.dumps(entry["request"])[:80])
def test_a_mistake_is_a_400_with_megatrons_text_in_both_shapes(entry: dict[str, Any]) -> None:
    engine = EchoEngine()
    request = entry["request"]
    response = put(create_app(engine), request)
    if ("error_about" in entry and request not in ACCEPTED) or request in REFUSED:
        assert response.status_code == 400
        body = response.json()
        assert body["error"] == {
            "message": body["message"],
            "type": "invalid_request_error",
            "param": entry.get("error_about", "tokens_to_generate"),
            "code": body["error"]["code"],
        }
        if request not in REFUSED:
            assert body["message"] == put(create_app(engine, legacy=True), request).json()
        assert not engine.requests
    else:
        assert response.status_code == 200
        assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api", 404),
        ("POST", "/api", 405),
        ("DELETE", "/api", 405),
        ("GET", "/nothing", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/health", 405),
    ],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_other_methods_and_paths_are_refused_in_json(
    method: str, path: str, status: int, legacy: bool
) -> None:
    response = send(create_app(EchoEngine(), legacy=legacy), method, path, json={"prompts": ["a"]})
    assert response.status_code == status
    assert response.json()["message"]


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "json", "é"]
)
def test_a_body_with_another_content_type_is_a_415(content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type.encode()}
    response = send(create_app(EchoEngine()), "PUT", "/api", content=b'{"prompts":["a"]}', headers=headers)
    assert response.status_code == 415
    assert "application/json" in response.json()["message"]


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/x+json"],
)
def test_every_content_type_of_json_is_accepted(content_type: str) -> None:
    response = send(
        create_app(EchoEngine()),
        "PUT",
        "/api",
        content=b'{"prompts":["a"]}',
        headers={"Content-Type": content_type},
    )
    assert response.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompts":["a"]',
        b"\xff\xfe\x00",
        b"prompts=a",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"prompts":["a"],"top_k":' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "open", "cut", "bytes", "form", "deep list", "deep object", "5000 digits"],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_a_body_that_is_not_json_is_a_400_with_a_message(body: bytes, legacy: bool) -> None:
    app = create_app(EchoEngine(), legacy=legacy)
    response = send(app, "PUT", "/api", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["message"].startswith("the body is not JSON")


ODD = [
    b'{"prompts":["a"],"temperature":NaN}',
    b'{"prompts":["a"],"temperature":Infinity}',
    b'{"prompts":["a"],"top_p":-Infinity}',
    b'{"prompts":["a"],"length_penalty":1e999,"beam_width":1}',
    b'{"prompts":["a"],"tokens_to_generate":' + b"9" * 400 + b"}",
    b'{"prompts":["a"],"random_seed":' + b"9" * 400 + b"}",
    b'{"prompts":["a"],"beam_width":1,"stop_token":-' + b"9" * 400 + b"}",
    b'{"prompts":["\\ud800"]}',
    b'{"prompts":["a\\udc00b"],"\\ud800":"\\ud800"}',
    b'{"prompts":["\\u0000"]}',
    b'{"prompts":[' + b"[" * 500 + b"]" * 500 + b"]}",
    b'{"prompts":[1]}',
    b'{"prompts":[null]}',
    b'{"prompts":{"a":1}}',
    b'{"prompts":["a"],"prompts":5}',
    b"null",
    b"[]",
    b'"prompts"',
    b"1e999",
]


@pytest.mark.parametrize("body", ODD, ids=lambda body: body[:40].decode())
@pytest.mark.parametrize("legacy", [False, True])
def test_no_body_makes_the_server_fail(body: bytes, legacy: bool) -> None:
    app = create_app(EchoEngine(), legacy=legacy)
    response = send(app, "PUT", "/api", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400)
    assert response.json()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_prompt_that_is_no_string_is_a_400(legacy: bool) -> None:
    response = put(create_app(EchoEngine(), legacy=legacy), {"prompts": ["a", 5]})
    assert response.status_code == 400
    message = response.json() if legacy else response.json()["message"]
    assert message == "prompts is not a list of strings"


@pytest.mark.parametrize("with_length", [True, False])
def test_a_body_past_the_limit_is_refused_before_it_is_read(with_length: bool) -> None:
    sent_bytes = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent_bytes
        for _ in range(1000):
            sent_bytes += 100
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    if with_length:
        headers["Content-Length"] = "100000"
    response = send(
        create_app(EchoEngine(), max_body_bytes=1000), "PUT", "/api", content=chunks(), headers=headers
    )
    assert response.status_code == 413
    assert response.json()["message"] == "the body is longer than 1,000 bytes"
    assert response.headers["connection"] == "close"
    assert sent_bytes <= (0 if with_length else 1100)


def test_a_body_of_just_the_limit_is_read() -> None:
    body = json.dumps({"prompts": ["a"]}).encode()
    headers = {"Content-Type": "application/json"}
    response = send(
        create_app(EchoEngine(), max_body_bytes=len(body)), "PUT", "/api", content=body, headers=headers
    )
    assert response.status_code == 200


def test_a_bad_request_of_the_engine_is_a_400_or_megatrons_200() -> None:
    engine = FailingEngine(BadRequest("tokens_to_generate", "Too many tokens.  9 is greater than 5"))
    response = put(create_app(engine), {"prompts": ["a"]})
    assert (response.status_code, response.json()["message"]) == (
        400,
        "Too many tokens.  9 is greater than 5",
    )
    response = put(create_app(engine, legacy=True), {"prompts": ["a"]})
    assert (response.status_code, response.json()) == (200, "Too many tokens.  9 is greater than 5")


def test_a_text_that_the_tokenizer_has_no_ids_for_is_a_400() -> None:
    response = put(create_app(FailingEngine(RequestError("text", "not ids", found="x"))), {"prompts": ["x"]})
    assert response.status_code == 400
    assert response.json()["message"] == "text: not ids: found x"


def test_an_engine_that_fails_is_a_500_without_details_and_the_next_request_is_answered() -> None:
    engine = FailingEngine(RuntimeError("/secret/path"))
    app = create_app(engine)
    response = put(app, {"prompts": ["a"]})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"
    engine.error = BadRequest("prompts", "again")
    assert put(app, {"prompts": ["a"]}).status_code == 400


@pytest.mark.parametrize("path", ["/", "/index.html"])
def test_the_page_is_served_and_loads_nothing_from_elsewhere(path: str) -> None:
    response = send(create_app(EchoEngine()), "GET", path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "http://" not in response.text
    assert "https://" not in response.text
    assert "<textarea" in response.text


def test_health_answers() -> None:
    response = send(create_app(EchoEngine()), "GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


class BlockingEngine:
    """An engine that waits for `release`, and counts its calls and how many run at once."""

    def __init__(self) -> None:
        self.running = 0
        self.max_running = 0
        self.calls = 0
        self.entered = threading.Event()
        self.release = threading.Event()
        self.lock = threading.Lock()

    def generate(self, request: GenerationRequest, should_abort: ShouldAbort) -> dict[str, object]:
        with self.lock:
            self.calls += 1
            self.running += 1
            self.max_running = max(self.max_running, self.running)
        self.entered.set()
        assert self.release.wait(20)
        with self.lock:
            self.running -= 1
        return {"text": ["done"]}


def test_health_answers_while_the_engine_works_on_one_request_at_a_time() -> None:
    engine = BlockingEngine()
    app = create_app(engine)

    async def exchange() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            tasks = [asyncio.create_task(client.put("/api", json={"prompts": ["a"]})) for _ in range(3)]
            await asyncio.to_thread(engine.entered.wait, 20)
            assert (await client.get("/health")).status_code == 200
            assert engine.calls == 1
            engine.release.set()
            assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * 3

    asyncio.run(exchange())
    assert (engine.max_running, engine.calls) == (1, 3)


class EndlessEngine:
    """An engine that runs until it is aborted."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.stopped = threading.Event()

    def generate(self, request: GenerationRequest, should_abort: ShouldAbort) -> dict[str, object]:
        self.entered.set()
        while not should_abort():
            self.stopped.wait(0.01)
        self.stopped.set()
        raise ClientDisconnected


def test_the_request_of_a_client_that_disconnects_is_aborted() -> None:
    engine = EndlessEngine()
    app = create_app(engine)
    body = json.dumps({"prompts": ["a"]}).encode()

    async def exchange() -> int:
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        await received.put({"type": "http.request", "body": body, "more_body": False})
        responses: list[Any] = []

        async def send(message: Any) -> None:
            responses.append(message)

        scope = {
            "type": "http",
            "method": "PUT",
            "path": "/api",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        task = asyncio.create_task(app(scope, received.get, send))
        await asyncio.to_thread(engine.entered.wait, 20)
        await received.put({"type": "http.disconnect"})
        await asyncio.wait_for(task, 20)
        return int(responses[0]["status"])

    assert asyncio.run(exchange()) == 499
    assert engine.stopped.is_set()


@pytest.mark.parametrize(
    ("log_prompts", "no_log", "logged"),
    [(False, False, False), (True, False, True), (True, True, False), (False, True, False)],
)
def test_prompts_are_logged_only_when_asked_for(
    log_prompts: bool, no_log: bool, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    app = create_app(EchoEngine(), log_prompts=log_prompts)
    put(app, {"prompts": ["my secret"], "no_log": no_log})
    put(app, {"prompts": ["my secret"], "no_log": no_log, "top_k": -1})
    assert ("my secret" in caplog.text) is logged
    assert "PUT /api" in caplog.text
