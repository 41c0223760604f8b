"""Errors of fields: found and wanted as in all messages, and no text that a model would read."""

from __future__ import annotations

from typing import Any

import pytest

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api.context import ApiContext
from mega_serve.http.limits import Limits
from tests.api_app import build_app, send
from tests.engine_clients import ScriptedEngineClient


@pytest.fixture(scope="module")
def app(tokenizer: Tokenizer) -> Any:
    client = ScriptedEngineClient(tokenizer)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return build_app(ApiContext(client=client, tokenizer=tokenizer, limits=Limits(), chat_template=template))


FORMATS = '"text" | "json_object" | "json_schema" | "structural_tag"'
ROLES = '"system" | "developer" | "user" | "assistant" | "tool"'


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"max_tokens": "5"}, 'max_tokens: wrong type: found "5", wanted an integer'),
        ("completions", {"max_tokens": True}, "max_tokens: wrong type: found true, wanted an integer"),
        ("completions", {"top_p": "0.5"}, 'top_p: wrong type: found "0.5", wanted a number'),
        ("completions", {"stream": "yes"}, 'stream: wrong type: found "yes", wanted true or false'),
        ("completions", {"stop": 5}, "stop: wrong type: found 5, wanted a string or a list"),
        ("completions", {"temperature": -1}, "temperature: out of range: found -1, wanted at least 0"),
        ("completions", {"temperature": 101.5}, "temperature: out of range: found 101.5, wanted at most 100"),
        ("completions", {"seed": "x" * 41}, "seed: wrong type: found a string, wanted an integer"),
        (
            "completions",
            {"cache_salt": ""},
            "cache_salt: empty: found 0 characters, wanted at least 1 character",
        ),
        (
            "completions",
            {"user": "x" * 1025},
            "user: too long: found 1025 characters, wanted at most 1024 characters",
        ),
        ("completions", {"prompt": []}, "prompt: empty: found 0 items, wanted at least 1 item"),
        ("completions", {"prompt": 5}, "prompt: wrong type: found 5, wanted a string"),
        (
            "completions",
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice: empty: found 0 items, wanted at least 1 item",
        ),
        (
            "completions",
            {"response_format": {"type": "xml"}},
            f'response_format.type: unknown value: found "xml", wanted {FORMATS}',
        ),
        (
            "chat/completions",
            {"messages": [{"role": "alien", "content": "x"}]},
            f'messages.0.role: unknown value: found "alien", wanted {ROLES}',
        ),
        ("chat/completions", {"messages": []}, "messages: empty: found 0 items, wanted at least 1 item"),
        (
            "embeddings",
            {"encoding_format": "int8"},
            'encoding_format: unknown value: found "int8", wanted "float" | "base64"',
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_error_has_the_value_found_and_the_value_wanted(
    app: Any, path: str, body: dict[str, Any], message: str
) -> None:
    needed: dict[str, Any] = {"chat/completions": {}, "embeddings": {"input": "x"}}
    response = send(app, "POST", f"/v1/{path}", json={**needed.get(path, {"prompt": "x"}), **body})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


SECRET = "my secret text"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1, SECRET]}),
        ("/v1/completions", {"prompt": [SECRET, 1]}),
        ("/v1/completions", {"prompt": [[1], [SECRET]]}),
        ("/v1/completions", {"prompt": {"text": SECRET}}),
        ("/v1/completions", {"prompt": "x", "stop": {"text": SECRET}}),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [SECRET]}),
        ("/v1/chat/completions", {"messages": SECRET}),
        ("/v1/chat/completions", {"messages": [SECRET]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"text": SECRET}}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [SECRET]}]}),
        ("/v1/responses", {"input": [SECRET]}),
        ("/v1/responses", {"input": "x", "instructions": [SECRET]}),
        ("/v1/embeddings", {"input": [1, SECRET]}),
        ("/tokenize", {"prompt": [SECRET]}),
        ("/detokenize", {"tokens": [SECRET]}),
        ("/api", {"prompts": [5, SECRET]}),
        ("/api", {"prompts": SECRET}),
    ],
    ids=str,
)
def test_an_error_never_quotes_a_text(app: Any, path: str, body: dict[str, Any]) -> None:
    response = send(app, "POST", path, json=body)
    assert response.status_code == 400
    assert SECRET not in response.text
