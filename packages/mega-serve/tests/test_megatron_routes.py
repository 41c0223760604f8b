"""PUT and POST /api over an engine client: statuses, bodies, semantics of a batch."""

from __future__ import annotations

import gzip
import json
import logging
import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_model.build import build_model, load_model
from mega_model.decoder import Decoder
from mega_model.generate import StopCriteria
from mega_model.generate import generate as generate_batch
from mega_model.runtime import Runtime
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import RequestError
from mega_schema.spec import gpt
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer
from mega_serve.api.context import ApiContext
from mega_serve.api.megatron_routes import build_router, single_token_id
from mega_serve.engine.interfaces import EngineDeadError, EngineOverloadedError, EngineUnavailableError
from mega_serve.engine.requests import BeamSearchParams, EngineRequest, SamplingParams, SequenceOutput
from mega_serve.http.limits import Limits
from tests.api_app import JSON, build_app, send
from tests.engine_clients import NaiveEngineClient, RecordingClient, ScriptedEngineClient
from tests.shared_data import SHARED, needs_shared

GPT2 = SHARED / "data" / "tokenizers" / "gpt2"
OWN_CASES = Path(__file__).parent / "data" / "requests.json"
RECORDED_CASES = SHARED / "golden" / "server_requests.json"
# Megatron refuses these and we accept them on purpose: 1 where it expects 1.0
ACCEPTED = [{"prompts": ["Hello"], "top_p": 1}, {"prompts": ["Hello"], "top_p": 0.9, "top_p_decay": 1}]
# Megatron accepts this and we refuse it on purpose
REFUSED = [{"prompts": ["Hello"], "tokens_to_generate": True}]
TOO_LONG = "Length of prompt + tokens_to_generate longer than allowed"


class EmptyClient(RecordingClient):
    """Ends every sequence without a token."""

    async def outputs(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        for index in range(request.rows):
            yield SequenceOutput(
                request_id=request.request_id, index=index, finish_reason="length", score=-1.0
            )


class FailingClient(RecordingClient):
    """Raises an error before the first output."""

    error: Exception = RuntimeError()

    async def outputs(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        raise self.error
        yield


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    saved = Checkpoint.open(checkpoint)
    return load_model(saved.spec, saved.model_slab, dtype=torch.float32, device="cpu")


@pytest.fixture
def client(decoder: Decoder, tokenizer: Tokenizer) -> NaiveEngineClient:
    return NaiveEngineClient(decoder, tokenizer)


@pytest.fixture
def context(client: NaiveEngineClient, tokenizer: Tokenizer) -> ApiContext:
    return ApiContext(client=client, tokenizer=tokenizer, limits=Limits())


@pytest.fixture
def empty(tokenizer: Tokenizer) -> ApiContext:
    """A context whose engine generates nothing, with a long context and a high limit."""
    client = EmptyClient(ScriptedEngineClient(tokenizer).model)
    return ApiContext(client=client, tokenizer=tokenizer, limits=Limits(request_tokens=10**9))


def _app(context: ApiContext) -> FastAPI:
    """Return an application of this API alone."""
    return build_app(context, routers=[build_router(context)])


def put(context: ApiContext, body: object, method: str = "PUT") -> httpx.Response:
    return send(_app(context), method, "/api", content=json.dumps(body), headers=JSON)


def answer(context: ApiContext, **body: Any) -> dict[str, Any]:
    response = put(context, body)
    assert response.status_code == 200, response.text
    decoded: dict[str, Any] = response.json()
    return decoded


def error_of(context: ApiContext, **body: Any) -> tuple[str, str]:
    response = put(context, body)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["message"]


def load_cases() -> list[dict[str, Any]]:
    """Load our own cases, and with the shared data those that were recorded from Megatron's server."""
    cases: list[dict[str, Any]] = json.loads(OWN_CASES.read_text("utf-8"))
    return cases + load_recorded_cases() if SHARED.is_dir() else cases


def load_recorded_cases() -> list[dict[str, Any]]:
    cases = [case for case in json.loads(RECORDED_CASES.read_text("utf-8")) if "request" in case]
    for case in cases:
        if case["request"].get("prompts") == "<128 strings>":
            case["request"]["prompts"] = ["x"] * 128
    return cases


def expected_params(
    call: dict[str, Any], row: int, tokenizer: Tokenizer
) -> SamplingParams | BeamSearchParams:
    """Return the engine's parameters for the arguments with which Megatron's server calls its engine."""
    if call["kind"] == "beam":
        assert call["num_return_gen"] == call["beam_size"]
        assert not call["prevent_newline_after_colon"]
        assert not call["add_BOS"]
        stop = call["stop_token"]
        return BeamSearchParams(
            max_tokens=call["tokens_to_generate"],
            width=call["beam_size"],
            length_penalty=call["length_penalty"],
            stop_token_id=tokenizer.identity.eod if stop is None else stop,
        )
    newline, double_newline, colon = (tokenizer.encode(text)[0] for text in ("\n", "\n\n", ":"))
    stop_ids: tuple[int, ...] = (double_newline,) if call["stop_on_eol"] or call["stop_on_double_eol"] else ()
    if call["stop_on_eol"] and not call["stop_on_double_eol"]:
        stop_ids = (double_newline, newline)
    logprobs = 0 if call["return_output_log_probs"] else None
    return SamplingParams(
        max_tokens=call["tokens_to_generate"],
        temperature=call["temperature"],
        top_k=int(call["top_k_sampling"]),
        top_p=call["top_p_sampling"] or 1.0,
        top_p_decay=call["top_p_decay"],
        top_p_bound=call["top_p_bound"],
        stop_token_ids=stop_ids,
        stop_repeated_id=newline if call["stop_on_double_eol"] else None,
        banned_bigram=(colon, newline) if call["prevent_newline_after_colon"] else None,
        ignore_eos=bool(stop_ids),
        seed=None if call["random_seed"] == -1 else call["random_seed"] + row,
        logprobs=logprobs,
        prompt_logprobs=logprobs,
    )


@needs_shared
def test_there_are_recorded_requests() -> None:
    assert len(load_recorded_cases()) == 42


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: json.dumps(case["request"])[:80])
def test_legacy_responses_and_requests_of_the_engine_are_megatrons(
    case: dict[str, Any], empty: ApiContext
) -> None:
    response = put(replace(empty, legacy_status=True), case["request"])
    assert response.status_code == case["status"]
    requests = empty.client.requests  # type: ignore[attr-defined]
    if "error_about" in case:
        assert isinstance(response.json(), str)
        assert not requests
        return
    prompts = case["request"]["prompts"]
    [call] = case["engine_call"]
    assert len(requests) == len(prompts)
    for row, request in enumerate(requests):
        assert request.params == expected_params(call, row, empty.tokenizer)
        ids = empty.tokenizer.encode(prompts[row])
        eod = [empty.tokenizer.identity.eod] if call["add_BOS"] else []
        assert list(request.prompt_token_ids) == eod + ids
    assert response.json()["text"] == prompts * case["request"].get("beam_width", 1)


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: json.dumps(case["request"])[:80])
def test_a_mistake_is_a_400_with_megatrons_text_in_both_shapes(
    case: dict[str, Any], empty: ApiContext
) -> None:
    request = case["request"]
    response = put(empty, request)
    if ("error_about" in case and request not in ACCEPTED) or request in REFUSED:
        assert response.status_code == 400
        body = response.json()
        assert body["error"] == {
            "message": body["message"],
            "type": "invalid_request_error",
            "param": case.get("error_about", "tokens_to_generate"),
            "code": body["error"]["code"],
        }
        assert not empty.client.requests  # type: ignore[attr-defined]
        if request not in REFUSED:
            assert body["message"] == put(replace(empty, legacy_status=True), request).json()
    else:
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/api", 404), ("DELETE", "/api", 405), ("GET", "/nothing", 404)]
)
def test_other_methods_and_paths_are_refused(empty: ApiContext, method: str, path: str, status: int) -> None:
    assert send(_app(empty), method, path).status_code == status


@pytest.mark.parametrize("method", ["DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_another_method_is_told_both_that_are_allowed(empty: ApiContext, method: str) -> None:
    response = send(_app(empty), method, "/api")
    assert (response.status_code, response.headers["Allow"]) == (405, "POST, PUT")


def test_post_is_put(empty: ApiContext) -> None:
    bodies = [
        put(empty, {"prompts": ["ab"], "tokens_to_generate": 3}, method).json() for method in ("PUT", "POST")
    ]
    assert bodies[0] == bodies[1]


def test_an_error_of_ours_is_logged_without_its_message(
    empty: ApiContext, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Tokenizer, texts: list[str]) -> list[list[int]]:
        raise ValueError(f"cannot encode {texts}")

    monkeypatch.setattr(type(empty.tokenizer), "encode_batch", fail)
    response = put(empty, {"prompts": ["my secret"], "tokens_to_generate": 1})
    assert response.status_code == 500
    assert "PUT /api failed: ValueError: (message withheld" in caplog.text
    assert "my secret" not in caplog.text + response.text


def test_a_compressed_body_is_a_415(empty: ApiContext) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    content = gzip.compress(b'{"prompts": ["Hi"]}')
    response = send(_app(empty), "PUT", "/api", content=content, headers=headers)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "identity"
    message = "Content-Encoding must be absent, not gzip: the server accepts no compressed bodies"
    assert response.json()["message"] == message


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "json", "é"]
)
def test_a_body_with_another_content_type_is_a_415(empty: ApiContext, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type.encode()}
    response = send(_app(empty), "PUT", "/api", content=b'{"prompts":["a"]}', headers=headers)
    assert response.status_code == 415
    assert "application/json" in response.json()["message"]


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/x+json"],
)
def test_every_content_type_of_json_is_accepted(empty: ApiContext, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    response = send(_app(empty), "PUT", "/api", content=b'{"prompts":["a"]}', headers=headers)
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
def test_a_body_that_is_not_json_is_a_400_with_a_message(
    empty: ApiContext, body: bytes, legacy: bool
) -> None:
    app = _app(replace(empty, legacy_status=legacy))
    response = send(app, "PUT", "/api", content=body, headers=JSON)
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
    b'{"prompts":["a"],"priority":' + b"9" * 400 + b"}",
    b'{"prompts":["a"],"cache_salt":"\\ud800"}',
    b'{"prompts":["\\ud800"]}',
    b'{"prompts":["a\\udc00b"],"\\ud800":"\\ud800"}',
    b'{"prompts":["a"],"\\ud800":"\\ud800"}',
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
def test_no_body_makes_the_server_fail(empty: ApiContext, body: bytes, legacy: bool) -> None:
    app = _app(replace(empty, legacy_status=legacy))
    response = send(app, "PUT", "/api", content=body, headers=JSON)
    assert response.status_code in (200, 400)
    assert response.json()


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
FIELDS = {
    "prompts": st.lists(st.text(max_size=5) | st.integers(), max_size=4) | NUMBERS,
    "tokens_to_generate": st.integers(0, 4) | NUMBERS,
    "temperature": st.floats(0.1, 2) | NUMBERS,
    "logprobs": st.booleans() | NUMBERS,
    "cache_salt": st.text(max_size=5) | NUMBERS,
    **dict.fromkeys(("top_k", "top_p", "add_BOS", "random_seed", "beam_width", "priority", "x"), NUMBERS),
}


@pytest.fixture(scope="module")
def empty_apps(tokenizer: Tokenizer) -> list[FastAPI]:
    """Return applications whose engine generates nothing: with today's statuses, and with Megatron's."""
    client = EmptyClient(ScriptedEngineClient(tokenizer).model)
    context = ApiContext(client=client, tokenizer=tokenizer, limits=Limits())
    return [_app(replace(context, legacy_status=legacy)) for legacy in (False, True)]


@settings(max_examples=150, deadline=None)
@given(body=st.fixed_dictionaries({}, optional=FIELDS), legacy=st.booleans())
def test_every_body_has_an_answer(empty_apps: list[FastAPI], body: dict[str, Any], legacy: bool) -> None:
    response = send(empty_apps[legacy], "PUT", "/api", content=json.dumps(body), headers=JSON)
    assert response.status_code in (200, 400)
    assert response.json()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "did you mean temperature?"),
        ("top-k", "did you mean top_k?"),
        ("zzzz", "unknown field"),
    ],
)
def test_an_unknown_field_is_refused_unless_lenient(empty: ApiContext, name: str, hint: str) -> None:
    body = {"prompts": ["a"], name: 0.3}
    response = put(empty, body)
    assert response.status_code == 400
    assert hint in response.json()["message"]
    assert response.json()["error"]["code"] == "unknown_parameter"
    assert put(replace(empty, lenient=True), body).status_code == 200
    assert put(replace(empty, legacy_status=True), body).status_code == 200


def test_priority_and_cache_salt_reach_the_engine(empty: ApiContext) -> None:
    put(empty, {"prompts": ["a", "b"], "priority": -3, "cache_salt": "s"})
    requests = empty.client.requests  # type: ignore[attr-defined]
    assert [(r.priority, r.cache_namespace) for r in requests] == [(-3, "s")] * 2
    assert len({r.request_id for r in requests}) == 2


def test_beams_are_limited_and_counted_as_rows(empty: ApiContext) -> None:
    assert put(empty, {"prompts": ["a"], "beam_width": 32}).status_code == 200
    wanted = "beam_width must be less than or equal to 32"
    assert error_of(empty, prompts=["a"], beam_width=33) == ("beam_width", wanted)


def test_structured_outputs_reach_the_engine(empty: ApiContext) -> None:
    put(empty, {"prompts": ["a"], "structured_outputs": {"choice": ["x", "y"]}})
    [request] = empty.client.requests  # type: ignore[attr-defined]
    assert (request.params.grammar.kind, request.params.grammar.text) == ("choice", '["x", "y"]')
    assert error_of(empty, prompts=["a"], structured_outputs={"regex": "("})[0] == "structured_outputs.regex"
    unknown = "structured_outputs.regexp: unknown field; hint: did you mean regex?"
    error = error_of(empty, prompts=["a"], structured_outputs={"regexp": "a"})
    assert error == ("structured_outputs.regexp", unknown)
    assert error_of(empty, prompts=["a"], structured_outputs={})[0] == "structured_outputs"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EngineOverloadedError("the queue is full", 2.5), 429, "rate_limit_error"),
        (EngineUnavailableError("the server is loading"), 503, "server_error"),
        (EngineDeadError("the engine stopped"), 500, "server_error"),
        (RuntimeError("/secret/path"), 500, "server_error"),
    ],
)
def test_an_engine_that_fails_has_its_status_and_both_shapes(
    tokenizer: Tokenizer, error: Exception, status: int, kind: str
) -> None:
    client = FailingClient(ScriptedEngineClient(tokenizer).model)
    client.error = error
    response = put(ApiContext(client=client, tokenizer=tokenizer, limits=Limits()), {"prompts": ["a"]})
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert response.json()["message"] == response.json()["error"]["message"]
    assert "secret" not in response.text
    assert response.headers.get("Retry-After") == {429: "3", 503: "5"}.get(status)


def test_a_text_that_the_tokenizer_has_no_ids_for_is_a_400(
    empty: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[list[int]]:
        raise RequestError("text", "not ids", found="x")

    monkeypatch.setattr(type(empty.tokenizer), "encode_batch", refuse)
    assert error_of(empty, prompts=["x"]) == ("prompts", "prompts: not ids: found x")


@pytest.mark.parametrize(
    ("log_prompts", "no_log", "is_logged"),
    [(False, False, False), (True, False, True), (True, True, False), (False, True, False)],
)
def test_prompts_are_logged_only_when_asked_for(
    empty: ApiContext, log_prompts: bool, no_log: bool, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    context = replace(empty, log_prompts=log_prompts)
    put(context, {"prompts": ["my secret"], "no_log": no_log})
    put(context, {"prompts": ["my secret"], "no_log": no_log, "top_k": -1})
    put(context, {"prompts": ["x"], "my secret": 1})
    assert ("my secret" in caplog.text) is is_logged
    assert "/api refused" in caplog.text


@pytest.mark.parametrize(
    "prompt", ["Hello", " two  spaces ", "naïve — ☃ 😀", "\0", "a\n\n\n", "<|endoftext|>"]
)
def test_text_is_the_prompt_byte_for_byte_and_then_the_generation(context: ApiContext, prompt: str) -> None:
    response = answer(context, prompts=[prompt], tokens_to_generate=8, random_seed=3, logprobs=True)
    assert response["text"][0].startswith(prompt)
    assert len(response["text"][0]) > len(prompt)
    ids = context.tokenizer.encode(prompt)
    assert len(ids) < len(response["segments"][0]) <= len(ids) + 8
    assert len(response["logprobs"][0]) == len(response["segments"][0]) - 1


def test_only_the_pieces_of_one_token_each_are_segments(context: ApiContext) -> None:
    response = answer(context, prompts=["ab"], tokens_to_generate=1, top_k=1)
    assert response["segments"][0][:2] == ["a", "b"]
    assert len(response["segments"][0]) == 3
    assert response["logprobs"] is None


def test_a_beginning_of_document_is_a_segment_but_not_in_the_text(context: ApiContext) -> None:
    response = answer(context, prompts=["ab", ""], tokens_to_generate=1, top_k=1, add_BOS=True)
    assert response["segments"][0][:3] == ["<|endoftext|>", "a", "b"]
    assert response["text"][0].startswith("ab")
    assert response["segments"][1][0] == "<|endoftext|>"


def test_scoring_gives_the_prompt_and_its_own_logprobs(context: ApiContext) -> None:
    response = answer(context, prompts=["Hello", "Hi"], tokens_to_generate=0, logprobs=True)
    assert response["text"] == ["Hello", "Hi"]
    assert [len(row) for row in response["logprobs"]] == [4, 1]
    longer = answer(context, prompts=["Hi"], tokens_to_generate=5, logprobs=True)
    assert response["logprobs"][1] == pytest.approx(longer["logprobs"][0][:1], abs=1e-5)


@pytest.mark.parametrize("prompts", [["Hello", "Hi", "a"], ["one two three", "x"], ["same", "also"]])
@pytest.mark.parametrize("stop", [{}, {"stop_on_eol": True}, {"stop_on_double_eol": True}])
def test_a_greedy_batch_is_megatrons(
    context: ApiContext, decoder: Decoder, prompts: list[str], stop: dict[str, bool]
) -> None:
    response = answer(context, prompts=prompts, tokens_to_generate=9, top_k=1, logprobs=True, **stop)
    rows = [context.tokenizer.encode(prompt) for prompt in prompts]
    newline, double_newline = (context.tokenizer.encode(text)[0] for text in ("\n", "\n\n"))
    criteria = {
        "": StopCriteria(frozenset({context.tokenizer.identity.eod or 0})),
        "stop_on_eol": StopCriteria(frozenset({newline, double_newline})),
        "stop_on_double_eol": StopCriteria(frozenset({double_newline}), repeated_id=newline),
    }[next(iter(stop), "")]
    expected = generate_batch(
        decoder,
        rows,
        new_tokens=9,
        top_k=1,
        stop=criteria,
        vocab_limit=context.client.model.vocab_size,
        logprobs=True,
    )
    assert response["segments"] == [context.tokenizer.pieces(row) for row in expected.rows]
    assert expected.logprobs is not None
    for logprobs, wanted in zip(response["logprobs"], expected.logprobs, strict=True):
        assert logprobs == pytest.approx(wanted, abs=1e-4)


def test_top_p_decays_with_the_steps_of_the_batch(empty: ApiContext) -> None:
    body = {"prompts": ["a", "abc", "abcdefghij"], "top_p": 0.8, "top_p_decay": 0.5, "top_p_bound": 0.1}
    put(empty, {**body, "tokens_to_generate": 4})
    requests = empty.client.requests  # type: ignore[attr-defined]
    assert [request.params.top_p for request in requests] == [0.8, 0.2, 0.1]
    assert [request.params.max_tokens for request in requests] == [13, 11, 4]


def test_a_top_p_that_decays_to_nothing_stays_above_zero(empty: ApiContext) -> None:
    put(empty, {"prompts": ["a", "a" * 2000], "top_p": 0.5, "top_p_decay": 0.1, "tokens_to_generate": 1})
    assert empty.client.requests[1].params.top_p == math.ulp(0.0)  # type: ignore[attr-defined]


def test_a_seed_belongs_to_its_request(context: ApiContext) -> None:
    body: dict[str, Any] = {"prompts": ["Hello"], "tokens_to_generate": 20}
    first = answer(context, **body, random_seed=5)
    unseeded = [answer(context, **body)["text"] for _ in range(2)]
    assert answer(context, **body, random_seed=5) == first
    assert answer(context, **body, random_seed=6) != first
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64, 10**300])
def test_every_seed_is_a_seed(context: ApiContext, client: NaiveEngineClient, seed: int) -> None:
    answer(context, prompts=["a", "b"], tokens_to_generate=1, random_seed=seed)
    assert [r.params.seed for r in client.requests] == [  # type: ignore[union-attr]
        seed % 2**63,
        (seed + 1) % 2**63,
    ]


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 100])
def test_every_temperature_in_range_gives_an_answer(context: ApiContext, temperature: float) -> None:
    response = answer(context, prompts=["a"], tokens_to_generate=4, temperature=temperature)
    assert response["text"][0].startswith("a")


def test_beams_come_best_first_with_their_scores(context: ApiContext) -> None:
    response = answer(context, prompts=["Hello"], tokens_to_generate=5, beam_width=4)
    assert list(response) == ["text", "segments", "scores"]
    assert response["scores"] == sorted(response["scores"], reverse=True)
    assert len(response["text"]) == len(response["segments"]) == 4
    assert all(text.startswith("Hello") for text in response["text"])


def test_beams_are_sorted_even_if_the_engine_does_not(empty: ApiContext) -> None:
    class ShuffledClient(EmptyClient):
        async def outputs(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
            for index, score in enumerate((-3.0, None, -1.0)):
                yield SequenceOutput(request_id="", index=index, finish_reason="length", score=score)

    context = replace(empty, client=ShuffledClient(empty.client.model))
    assert answer(context, prompts=["a"], beam_width=3)["scores"] == [-1.0, -3.0]


@pytest.mark.parametrize("stop_token", [-1, 256, 10**300])
@pytest.mark.parametrize("penalty", [-50.0, 50.0])
def test_every_stop_token_and_penalty_gives_scores_that_json_can_hold(
    context: ApiContext, stop_token: int, penalty: float
) -> None:
    body = {"tokens_to_generate": 9, "beam_width": 3, "stop_token": stop_token, "length_penalty": penalty}
    response = answer(context, prompts=["a"], **body)
    assert all(math.isfinite(score) for score in response["scores"])


def test_beams_stop_at_the_end_of_a_document_unless_told_otherwise(empty: ApiContext) -> None:
    for fields in ({}, {"stop_token": 0}, {"stop_token": 10**300}):
        put(empty, {"prompts": ["a"], "beam_width": 2, "tokens_to_generate": 1, **fields})
    stops = [request.params.stop_token_id for request in empty.client.requests]  # type: ignore[attr-defined]
    assert stops == [empty.tokenizer.identity.eod, 0, None]


def test_a_row_longer_than_the_context_is_refused_in_megatrons_words(context: ApiContext) -> None:
    assert error_of(context, prompts=["a" * 60], tokens_to_generate=5) == ("tokens_to_generate", TOO_LONG)
    assert error_of(context, prompts=["a"], tokens_to_generate=10**300)[1] == TOO_LONG
    assert error_of(context, prompts=["a" * 65], tokens_to_generate=0, logprobs=True)[1] == TOO_LONG
    assert error_of(context, prompts=["a" * 60], tokens_to_generate=5, beam_width=1)[1] == TOO_LONG


def test_an_error_of_length_says_limit_and_asked_in_the_openai_object(context: ApiContext) -> None:
    body = put(context, {"prompts": ["a" * 60], "tokens_to_generate": 5}).json()
    assert body["message"] == TOO_LONG
    message = body["error"]["message"]
    assert "64 tokens" in message
    assert "65 were asked for (60 in the longest prompt, 5 new)" in message
    assert body["error"]["code"] == "context_length_exceeded"


def test_more_tokens_than_allowed_together_are_refused_in_megatrons_words(context: ApiContext) -> None:
    limited = replace(context, limits=Limits(request_tokens=20))
    words = "Too many tokens.  21 is greater than 20"
    assert error_of(limited, prompts=["ab", "a", "a"], tokens_to_generate=5)[1] == words
    assert error_of(limited, prompts=["ab"], tokens_to_generate=5, beam_width=3)[1] == words
    assert answer(limited, prompts=["ab", "a"], tokens_to_generate=8)["text"]
    legacy = put(replace(limited, legacy_status=True), {"prompts": ["ab"] * 3, "tokens_to_generate": 5})
    assert (legacy.status_code, legacy.json()) == (200, words)


def test_a_beam_with_nowhere_to_go_is_refused(context: ApiContext) -> None:
    body = {"prompts": ["a"], "tokens_to_generate": 0, "logprobs": True, "beam_width": 1}
    assert error_of(context, **body)[1] == "context length + tokens_to_generate too large"


@needs_shared
def test_gpt2s_ids_that_stop_are_the_ones_megatron_has_in_its_code() -> None:
    vocab_file, merge_file = GPT2 / "gpt2-vocab.json", GPT2 / "gpt2-merges.txt"
    tokenizer = open_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    assert [single_token_id(tokenizer, text) for text in ("\n", "\n\n", ":")] == [198, 628, 25]


@pytest.fixture(scope="module")
def metaspace_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer like SentencePiece: a token includes the space before it, except the first in a text."""
    mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    words = {word: i for i, word in enumerate(["<unk>", "▁Hello", "▁world", "▁again"])}
    source = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": mark,
        "post_processor": None,
        "decoder": mark,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    path.write_text(json.dumps(source), "utf-8")
    return open_tokenizer("HuggingFaceTokenizer", model=path)


@pytest.fixture
def metaspace(metaspace_tokenizer: Tokenizer) -> ApiContext:
    spec = gpt(layers=1, hidden=4, heads=1, vocab=4, max_seq_len=16)
    model = build_model(Runtime.single_process(spec))
    client = NaiveEngineClient(model, metaspace_tokenizer)
    return ApiContext(client=client, tokenizer=metaspace_tokenizer, limits=Limits())


def test_the_space_before_the_first_new_word_is_kept(metaspace: ApiContext) -> None:
    class TwoWords(EmptyClient):
        async def outputs(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
            yield SequenceOutput(request_id="", token_ids=(2, 3), finish_reason="length")

    context = replace(metaspace, client=TwoWords(metaspace.client.model))
    assert answer(context, prompts=["Hello"], tokens_to_generate=2)["text"] == ["Hello world again"]


@pytest.mark.parametrize("field", ["stop_on_eol", "stop_on_double_eol", "add_BOS"])
def test_what_a_tokenizer_has_no_token_for_is_refused_and_not_ignored(
    metaspace: ApiContext, field: str
) -> None:
    param, message = error_of(metaspace, prompts=["Hello"], tokens_to_generate=1, **{field: True})
    assert param == field
    assert message.startswith(f"{field} needs a tokenizer with ")


def test_a_text_without_tokens_is_refused(metaspace: ApiContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(metaspace.tokenizer), "encode_batch", lambda _, texts: [[] for _ in texts])
    expected = ("prompts", "a prompt has no tokens")
    assert error_of(metaspace, prompts=["x"], tokens_to_generate=1) == expected
