"""The HTTP client: server-sent events, addresses, keys, errors in one line."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from mega_schema.errors import ConfigError, FormatError
from mega_serve.client.generation import (
    MEGATRON,
    TokenUsage,
    continuation,
    find_model,
    megatron_body,
    read_choices,
    request_megatron,
    request_text,
    stream_text,
)
from mega_serve.client.http import ServerClient, ServerError, error_text, read_api_key
from mega_serve.client.server_address import parse_address
from mega_serve.client.server_sent_events import EventParser, ServerSentEvent
from mega_serve.client.terminal_text import for_terminal
from tests.fake_openai import FakeServer, serve


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serve(FakeServer()) as running:
        yield running


def with_client(server: FakeServer, work: Callable[[ServerClient], Any], **settings: Any) -> Any:
    async def run() -> Any:
        async with ServerClient(parse_address(server.address, "HOST:PORT"), **settings) as client:
            return await work(client)

    return asyncio.run(run())


async def collect(
    client: ServerClient, path: str, body: dict[str, Any]
) -> tuple[str, TokenUsage, list[float]]:
    usage = TokenUsage()
    text, times = "", []
    async with aclosing(stream_text(client, path, body, usage)) as deltas:
        async for delta, received_at in deltas:
            text += delta.text
            times += [received_at] if delta.has_token else []
    return text, usage, times


def get_error(server: FakeServer, work: Callable[[ServerClient], Any], **settings: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        with_client(server, work, **settings)
    assert "\n" not in str(caught.value)
    return caught.value


STREAM = (
    b"\xef\xbb\xbfdata: one\n\n"
    b": a comment\r\n\r\ndata:two\ndata\ndata:  2\n\nevent: error\rdata: {}\r\r"
    b"id: 7\nretry: 5\nnothing\n\n\ndata: \xe6\x9d\xb1\n\ndata: cut off"
)
EVENTS = [
    ServerSentEvent(b"one"),
    ServerSentEvent(b"two\n\n 2"),
    ServerSentEvent(b"{}", "error"),
    ServerSentEvent("東".encode()),
]


def test_events_are_the_same_wherever_the_network_cuts_the_stream() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        parser, events, position = EventParser(), [], 0
        while position < len(STREAM):
            size = rng.choice((0, 1, 1, 2, 5, 30))
            events += parser.feed(STREAM[position : position + size])
            position += size
        assert events == EVENTS


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_serve.client.server_sent_events.MAX_EVENT_BYTES", 100)
    for line, count in ((b"a", 101), (b"data: a3\n", 51)):
        parser = EventParser()
        for _ in range(count - 1):
            parser.feed(line)
        with pytest.raises(FormatError, match="too long"):
            parser.feed(line)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:5000", "http://localhost:5000/api"),
        ("http://gpu7:8000/", "http://gpu7:8000/api"),
        ("https://example.org/llm/v1", "https://example.org/llm/api"),
        ("[::1]:5000", "http://[::1]:5000/api"),
        ("https://example.org", "https://example.org/api"),
    ],
)
def test_an_address_is_host_and_port_or_a_url(text: str, url: str) -> None:
    assert parse_address(text, "HOST:PORT").url("/api") == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "localhost:port",
        "a b:80",
        "ftp://a:1",
        "http://",
        "host:99999",
        "http://u@h:1",
        "h:1?a=b",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^HOST:PORT: "):
        parse_address(text, "HOST:PORT")


def test_the_key_is_that_of_the_file_or_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1\nsecond line\n")
    environment = {"MEGA_API_KEY": "sk-2", "OPENAI_API_KEY": "sk-3"}
    assert read_api_key(file, environment) == "sk-1"
    assert read_api_key(None, environment) == "sk-2"
    assert read_api_key(None, {"MEGA_API_KEY": "", "OPENAI_API_KEY": "sk-3"}) == "sk-3"
    assert read_api_key(None, {}) is None
    for content in (b"", b"\n", b"a\tb", "ключ".encode()):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="--api-key-file: has no API key"):
            read_api_key(file, environment)


def test_the_key_file_may_be_the_one_of_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# für alle\n\nalice:0123456789abcdef\nbob:fedcba9876543210\n", "utf-8")
    assert read_api_key(file, {}) == "0123456789abcdef"
    file.write_text("not a name:key")
    assert read_api_key(file, {}) == "not a name:key"
    file.write_text(f"alice:sha256:{'0' * 64}\n")
    with pytest.raises(ConfigError, match="has the hash of a key: .*wanted the key itself"):
        read_api_key(file, {})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_all_words_the_usage_and_a_time_for_each_token(server: FakeServer, path: str) -> None:
    start = time.perf_counter()
    text, usage, times = with_client(
        server, lambda client: collect(client, path, {"max_tokens": 4, "model": "tiny"})
    )
    assert text == "one two three four"
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 4)
    assert len(times) == 4
    assert start < times[0] <= times[-1] <= time.perf_counter()


def test_a_connection_is_used_again(server: FakeServer) -> None:
    async def work(client: ServerClient) -> None:
        for _ in range(3):
            await collect(client, "/v1/completions", {"max_tokens": 1})
        assert client._session is not None
        connector = client._session.connector
        assert connector is not None
        assert sum(len(idle) for idle in connector._conns.values()) == 1

    with_client(server, work)


def test_the_key_and_the_headers_are_sent(server: FakeServer) -> None:
    server.api_key = "sk-1"
    model = with_client(server, find_model, api_key="sk-1", headers={"X-Team": "a"})
    assert model["id"] == "tiny"
    assert server.requests[0][2]["x-team"] == "a"
    error = get_error(server, find_model, api_key="sk-2")
    assert error.status == 401
    assert "refused with status 401: no such key; hint: set MEGA_API_KEY" in str(error)


def test_a_redirection_is_not_followed(server: FakeServer) -> None:
    server.statuses = [(307, {"Location": "http://192.0.2.1/"}, {})]
    error = get_error(server, lambda client: client.send_json("PUT", MEGATRON, {}))
    assert error.status == 307


@pytest.mark.parametrize(
    ("status", "headers", "body", "words"),
    [
        (400, {}, {"error": {"message": "top_k is wrong"}}, "status 400: top_k is wrong"),
        (400, {}, {"message": "Megatron's words"}, "status 400: Megatron's words"),
        (400, {}, "a bare string", "status 400: a bare string"),
        (422, {}, {"detail": [{"loc": 1}]}, 'status 422: {"detail": [{"loc": 1}]}'),
        (429, {"Retry-After": "7"}, {"error": {"message": "full"}}, "status 429: full; hint: retry in 7 s"),
        (503, {"Retry-After": "Mon, 1 Jan"}, {}, "hint: the server loads or stops"),
        (500, {}, {"error": {"message": "x" * 1000}}, "x" * 300 + "..."),
    ],
)
def test_a_refusal_is_one_line_with_the_words_of_the_server(
    server: FakeServer, status: int, headers: dict[str, str], body: object, words: str
) -> None:
    server.statuses = [(status, headers, body)] * 2
    for work in (
        lambda client: collect(client, "/v1/completions", {}),
        lambda client: request_text(client, "/v1/completions", {}, TokenUsage()),
    ):
        error = get_error(server, work)
        assert words in str(error)
        assert error.status == status
        assert error.retry_after == (7.0 if status == 429 else None)


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            "Not Found",
            "; hint: is the address right? --backend megatron speaks to a server that has only PUT /api",
        ),
        ("no model 'nope'; hint: this server has 'run'", "; hint: this server has 'run'"),
        ("The model `nope` does not exist.", "nope` does not exist."),
    ],
)
def test_only_a_missing_path_raises_the_question_of_the_address(
    server: FakeServer, message: str, hint: str
) -> None:
    server.statuses = [(404, {}, {"error": {"message": message}})]
    error = get_error(
        server,
        lambda client: collect(client, "/v1/completions", {}),
        megatron_option="--backend megatron",
    )
    assert str(error).endswith(hint)
    assert str(error).count("hint:") <= 1


def test_a_stream_that_breaks_is_an_error(server: FakeServer) -> None:
    server.breaks_after = 2
    error = get_error(server, lambda client: collect(client, "/v1/completions", {"max_tokens": 4}))
    assert "ended before its end mark" in str(error)
    server.breaks_after, server.error_after = None, 1
    error = get_error(server, lambda client: collect(client, "/v1/completions", {"max_tokens": 4}))
    assert "the server stopped the answer: engine died" in str(error)


def test_a_finished_stream_may_lack_its_end_mark(server: FakeServer) -> None:
    server.marks_end = False
    body = {"max_tokens": 4}
    _, usage, times = with_client(server, lambda client: collect(client, "/v1/completions", body))
    assert usage.completion_tokens == len(times) == 4


def test_a_silent_server_is_an_error_after_the_timeout(server: FakeServer) -> None:
    server.delay = 30
    error = get_error(
        server, lambda client: collect(client, "/v1/completions", {"max_tokens": 1}), timeout=0.1
    )
    assert "no byte for 0.1 seconds" in str(error)


def test_a_server_that_is_not_there_is_an_error() -> None:
    server = FakeServer(address="127.0.0.1:1")
    assert "http://127.0.0.1:1/v1/models: no server answers" in str(get_error(server, find_model))
    assert "no server answers" in str(get_error(server, lambda client: client.wait_until_ready(0)))


def test_a_client_that_leaves_closes_the_connection(server: FakeServer) -> None:
    server.delay = 0.005

    async def leave(client: ServerClient) -> str:
        async with aclosing(
            stream_text(client, "/v1/completions", {"max_tokens": 10_000}, TokenUsage())
        ) as deltas:
            async for delta, _ in deltas:
                return delta.text
        return ""

    assert with_client(server, leave) == "one"
    assert server.disconnected.wait(10)


def test_megatron_errors_with_status_200_are_errors(server: FakeServer) -> None:
    body = megatron_body("", 3, {})
    error = get_error(server, lambda client: request_megatron(client, body))
    assert error.status == 400
    server.legacy = True
    error = get_error(server, lambda client: request_megatron(client, body))
    assert "refused with status 200 and a message: Empty prompts require add_BOS=true" in str(error)


def test_megatron_answers_have_text_segments_and_logprobs(server: FakeServer) -> None:
    body = megatron_body("Hi", 2, {"logprobs": True, "top_k": None, "top_p": 1})
    assert body == {"prompts": ["Hi"], "tokens_to_generate": 2, "logprobs": True, "top_p": 1.0}
    assert isinstance(body["top_p"], float)
    (answer,) = with_client(server, lambda client: request_megatron(client, body))
    assert answer.text == "Hione two"
    assert continuation(answer, "Hi") == "one two"
    assert answer.segments == ["H", "i", "one", " two"]
    assert len(answer.logprobs) == 3


def test_the_role_and_the_end_of_a_chat_are_no_tokens() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    tool = {"choices": [{"index": 0, "delta": {"tool_calls": [{}]}, "finish_reason": None}]}
    empty = {"choices": [{"index": 0, "text": "", "finish_reason": None}]}
    assert [read_choices(chunk)[0].has_token for chunk in (role, end, tool, empty)] == [
        False,
        False,
        True,
        True,
    ]


def test_chat_logprobs_are_read_from_objects() -> None:
    top = {"token": "a", "logprob": -0.5}
    content = [{"token": "a", "logprob": -0.5, "top_logprobs": [top]}]
    choice = {"index": 0, "message": {"content": "a"}, "logprobs": {"content": content}}
    (delta,) = read_choices({"choices": [choice]})
    assert delta.tokens[0].top == (("a", -0.5),)


def test_error_texts_of_all_forms_are_understood() -> None:
    forms = ["a", {"error": {"message": "a"}}, {"error": "a"}, {"message": "a"}, {"detail": "a"}]
    assert [error_text(form) for form in forms] == ["a"] * 5
    assert [error_text(form) for form in (None, 3, [], {}, {"error": {}})] == [""] * 5


def test_text_of_a_model_does_not_control_the_terminal() -> None:
    assert for_terminal("a\tb\nc\x1b]52;c;ZXZpbA==\x07\u202e\r") == (
        "a\tb\nc\\x1b]52;c;ZXZpbA==\\x07\\u202e\\r"
    )
