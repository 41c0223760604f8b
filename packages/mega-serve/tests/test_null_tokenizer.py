"""A model of numbers: every API takes ids as text, and an error names the field that the text came in."""

from __future__ import annotations

from typing import Any

import pytest

from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_serve.api.context import ApiContext
from mega_serve.http.limits import Limits
from tests.api_app import build_app, send
from tests.engine_clients import ScriptedEngineClient

HELLO = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def app() -> Any:
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=100)
    client = ScriptedEngineClient(tokenizer, "789")
    context = ApiContext(
        client=client,
        tokenizer=tokenizer,
        limits=Limits(),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    return build_app(context)


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/v1/completions", {"prompt": "hello"}, "prompt"),
        ("POST", "/v1/completions", {"prompt": ["1 2", "100 101"]}, "prompt"),
        ("POST", "/v1/completions", {"prompt": "1", "bad_words": ["hello"]}, "bad_words"),
        (
            "POST",
            "/v1/completions",
            {"prompt": "1", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ("POST", "/v1/chat/completions", {"messages": [HELLO]}, "messages"),
        ("POST", "/v1/responses", {"input": "hello"}, "messages"),
        ("POST", "/v1/embeddings", {"input": "hello"}, "input"),
        ("POST", "/tokenize", {"prompt": "hello"}, "prompt"),
        ("PUT", "/api", {"prompts": ["hello"]}, "prompts"),
    ],
)
def test_text_that_is_no_number_is_a_400_that_names_its_field(
    app: Any, method: str, path: str, body: dict[str, Any], param: str
) -> None:
    response = send(app, method, path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_numbers_are_a_prompt(app: Any) -> None:
    body = {"prompt": "1 2 3", "echo": True}
    answer = send(app, "POST", "/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["text"].startswith("1 2 3")
    assert send(app, "PUT", "/api", json={"prompts": ["1 2"]}).status_code == 200
    assert send(app, "POST", "/v1/embeddings", json={"input": "1 2"}).json()["usage"]["prompt_tokens"] == 2
