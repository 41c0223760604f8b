"""The application around an engine that is eight lines: statuses, bodies, limits, one request at a time."""

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
from mega_serve.api.app import Gone, create_app
from mega_serve.api.megatron import BeamSearch, Refused, Sampling
from tests.shared_data import SHARED, needs_shared

OURS = Path(__file__).parent / "data" / "requests.json"
RECORDED = SHARED / "golden" / "server_requests.json"
# what Megatron refuses and we take on purpose: 1 where it wants 1.0
TAKEN = [{"prompts": ["Hello"], "top_p": 1}, {"prompts": ["Hello"], "top_p": 0.9, "top_p_decay": 1}]
# what Megatron takes and we refuse on purpose
REFUSED = [{"prompts": ["Hello"], "tokens_to_generate": True}]

Gone_ = Callable[[], bool]


class Echo:
    """An engine that continues every prompt with an exclamation mark and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Sampling | BeamSearch] = []

    def answer(self, ask: Sampling | BeamSearch, gone: Gone_) -> dict[str, object]:
        self.asked.append(ask)
        return {"text": [prompt + "!" for prompt in ask.prompts], "segments": [], "logprobs": None}


class Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def answer(self, ask: Sampling | BeamSearch, gone: Gone_) -> dict[str, object]:
        raise self.error


def send(app: FastAPI, method: str, path: str, **how: Any) -> httpx.Response:
    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **how)

    return asyncio.run(exchange())


def put(app: FastAPI, body: object) -> httpx.Response:
    return send(app, "PUT", "/api", content=json.dumps(body), headers={"Content-Type": "application/json"})


def requests() -> list[dict[str, Any]]:
    """Cases of our own, and those that were recorded from Megatron's server where the shared data is."""
    cases: list[dict[str, Any]] = json.loads(OURS.read_text("utf-8"))
    return cases + recorded() if SHARED.is_dir() else cases


def recorded() -> list[dict[str, Any]]:
    cases = [entry for entry in json.loads(RECORDED.read_text("utf-8")) if "request" in entry]
    for entry in cases:
        if entry["request"].get("prompts") == "<128 strings>":
            entry["request"]["prompts"] = ["x"] * 128
    return cases


def as_megatron_calls(ask: Sampling | BeamSearch) -> dict[str, object]:
    """What Megatron's server would have handed its engine."""
    if isinstance(ask, BeamSearch):
        return {
            "kind": "beam",
            "tokens_to_generate": ask.tokens_to_generate,
            "beam_size": ask.beam_width,
            "add_BOS": ask.add_bos,
            "stop_token": ask.stop_token,
            "num_return_gen": ask.beam_width,
            "length_penalty": ask.length_penalty,
            "prevent_newline_after_colon": ask.prevent_newline_after_colon,
        }
    return {
        "kind": "generate",
        "tokens_to_generate": ask.tokens_to_generate,
        "return_output_log_probs": ask.logprobs,
        "top_k_sampling": ask.top_k,
        "top_p_sampling": ask.top_p,
        "top_p_decay": ask.top_p_decay,
        "top_p_bound": ask.top_p_bound,
        "temperature": ask.temperature,
        "add_BOS": ask.add_bos,
        "use_eod_token_for_early_termination": True,
        "stop_on_double_eol": ask.stop_on_double_eol,
        "stop_on_eol": ask.stop_on_eol,
        "prevent_newline_after_colon": ask.prevent_newline_after_colon,
        "random_seed": -1 if ask.random_seed is None else ask.random_seed,
    }


@needs_shared
def test_there_are_recorded_requests() -> None:
    assert len(recorded()) == 42


@pytest.mark.parametrize("entry", requests(), ids=lambda entry: json.dumps(entry["request"])[:80])
def test_legacy_answers_are_megatrons_and_its_engine_is_asked_the_same(entry: dict[str, Any]) -> None:
    engine = Echo()
    answer = put(create_app(engine, legacy=True), entry["request"])
    assert answer.status_code == entry["status"]
    assert [as_megatron_calls(ask) for ask in engine.asked] == entry["engine_call"]
    if "error_about" in entry:
        assert isinstance(answer.json(), str)
        named = put(create_app(engine), entry["request"])
        if entry["request"] not in TAKEN:
            assert named.json()["error"]["param"] == entry["error_about"]
    else:
        assert answer.json()["text"] == [prompt + "!" for prompt in entry["request"]["prompts"]]


@pytest.mark.parametrize("entry", requests(), ids=lambda entry: json.dumps(entry["request"])[:80])
def test_a_mistake_is_a_400_with_megatrons_text_in_both_shapes(entry: dict[str, Any]) -> None:
    engine = Echo()
    request = entry["request"]
    answer = put(create_app(engine), request)
    if ("error_about" in entry and request not in TAKEN) or request in REFUSED:
        assert answer.status_code == 400
        body = answer.json()
        assert body["error"] == {
            "message": body["message"],
            "type": "invalid_request_error",
            "param": entry.get("error_about", "tokens_to_generate"),
            "code": body["error"]["code"],
        }
        if request not in REFUSED:
            assert body["message"] == put(create_app(engine, legacy=True), request).json()
        assert not engine.asked
    else:
        assert answer.status_code == 200
        assert len(engine.asked) == 1


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
def test_other_methods_and_places_are_refused_in_json(
    method: str, path: str, status: int, legacy: bool
) -> None:
    answer = send(create_app(Echo(), legacy=legacy), method, path, json={"prompts": ["a"]})
    assert answer.status_code == status
    assert answer.json()["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "json", "é"])
def test_a_body_not_announced_as_json_is_a_415(kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind.encode()}
    answer = send(create_app(Echo()), "PUT", "/api", content=b'{"prompts":["a"]}', headers=headers)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["message"]


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
def test_every_way_to_announce_json_is_taken(kind: str) -> None:
    answer = send(
        create_app(Echo()), "PUT", "/api", content=b'{"prompts":["a"]}', headers={"Content-Type": kind}
    )
    assert answer.status_code == 200


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
    app = create_app(Echo(), legacy=legacy)
    answer = send(app, "PUT", "/api", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["message"].startswith("the body is not JSON")


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
    app = create_app(Echo(), legacy=legacy)
    answer = send(app, "PUT", "/api", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400)
    assert answer.json()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_prompt_that_is_no_string_is_a_400(legacy: bool) -> None:
    answer = put(create_app(Echo(), legacy=legacy), {"prompts": ["a", 5]})
    assert answer.status_code == 400
    message = answer.json() if legacy else answer.json()["message"]
    assert message == "prompts is not a list of strings"


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_past_the_limit_is_refused_before_it_is_read(announced: bool) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 100
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    if announced:
        headers["Content-Length"] = "100000"
    answer = send(create_app(Echo(), most_body=1000), "PUT", "/api", content=chunks(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["message"] == "the body is longer than 1,000 bytes"
    assert answer.headers["connection"] == "close"
    assert sent <= (0 if announced else 1100)


def test_a_body_of_just_the_limit_is_read() -> None:
    body = json.dumps({"prompts": ["a"]}).encode()
    headers = {"Content-Type": "application/json"}
    answer = send(create_app(Echo(), most_body=len(body)), "PUT", "/api", content=body, headers=headers)
    assert answer.status_code == 200


def test_what_the_engine_refuses_is_a_400_or_megatrons_200() -> None:
    engine = Raising(Refused("tokens_to_generate", "Too many tokens.  9 is greater than 5"))
    answer = put(create_app(engine), {"prompts": ["a"]})
    assert (answer.status_code, answer.json()["message"]) == (400, "Too many tokens.  9 is greater than 5")
    answer = put(create_app(engine, legacy=True), {"prompts": ["a"]})
    assert (answer.status_code, answer.json()) == (200, "Too many tokens.  9 is greater than 5")


def test_a_text_that_the_tokenizer_has_no_ids_for_is_a_400() -> None:
    answer = put(create_app(Raising(RequestError("text", "not ids", found="x"))), {"prompts": ["x"]})
    assert answer.status_code == 400
    assert answer.json()["message"] == "text: not ids: found x"


def test_an_engine_that_breaks_is_a_500_that_tells_nothing_and_the_next_request_is_answered() -> None:
    engine = Raising(RuntimeError("/secret/path"))
    app = create_app(engine)
    answer = put(app, {"prompts": ["a"]})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    engine.error = Refused("prompts", "again")
    assert put(app, {"prompts": ["a"]}).status_code == 400


@pytest.mark.parametrize("path", ["/", "/index.html"])
def test_the_page_is_served_and_loads_nothing_from_elsewhere(path: str) -> None:
    answer = send(create_app(Echo()), "GET", path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    assert "<textarea" in answer.text


def test_health_answers() -> None:
    answer = send(create_app(Echo()), "GET", "/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


class Slow:
    """An engine that answers when it is let go, and counts how many requests are in it at once."""

    def __init__(self) -> None:
        self.inside = self.most = self.begun = 0
        self.entered, self.go = threading.Event(), threading.Event()
        self.counting = threading.Lock()

    def answer(self, ask: Sampling | BeamSearch, gone: Gone_) -> dict[str, object]:
        with self.counting:
            self.inside, self.begun = self.inside + 1, self.begun + 1
            self.most = max(self.most, self.inside)
        self.entered.set()
        assert self.go.wait(20)
        with self.counting:
            self.inside -= 1
        return {"text": ["done"]}


def test_health_answers_while_the_engine_works_on_one_request_at_a_time() -> None:
    engine = Slow()
    app = create_app(engine)

    async def exchange() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asks = [asyncio.create_task(client.put("/api", json={"prompts": ["a"]})) for _ in range(3)]
            await asyncio.to_thread(engine.entered.wait, 20)
            assert (await client.get("/health")).status_code == 200
            assert engine.begun == 1
            engine.go.set()
            assert [answer.status_code for answer in await asyncio.gather(*asks)] == [200] * 3

    asyncio.run(exchange())
    assert (engine.most, engine.begun) == (1, 3)


class Patient:
    """An engine that works until its client is gone."""

    def __init__(self) -> None:
        self.entered, self.stopped = threading.Event(), threading.Event()

    def answer(self, ask: Sampling | BeamSearch, gone: Gone_) -> dict[str, object]:
        self.entered.set()
        while not gone():
            self.stopped.wait(0.01)
        self.stopped.set()
        raise Gone


def test_the_work_of_a_client_that_leaves_is_given_up() -> None:
    engine = Patient()
    app = create_app(engine)
    body = json.dumps({"prompts": ["a"]}).encode()

    async def exchange() -> int:
        arrived: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        await arrived.put({"type": "http.request", "body": body, "more_body": False})
        sent: list[Any] = []

        async def keep(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "PUT",
            "path": "/api",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        served = asyncio.create_task(app(scope, arrived.get, keep))
        await asyncio.to_thread(engine.entered.wait, 20)
        await arrived.put({"type": "http.disconnect"})
        await asyncio.wait_for(served, 20)
        return int(sent[0]["status"])

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
    app = create_app(Echo(), log_prompts=log_prompts)
    put(app, {"prompts": ["my secret"], "no_log": no_log})
    put(app, {"prompts": ["my secret"], "no_log": no_log, "top_k": -1})
    assert ("my secret" in caplog.text) is logged
    assert "PUT /api" in caplog.text
