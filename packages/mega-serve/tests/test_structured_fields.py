"""The fields of requests that constrain the text: which one an error names, and JSON without blanks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api.context import ApiContext
from mega_serve.api.sampling_fields import StructuredOutputs
from mega_serve.engine.grammar import GrammarCompiler
from mega_serve.http.limits import Limits
from tests.api_app import build_app, send
from tests.engine_clients import ScriptedEngineClient
from tests.serving.grammar_texts import accepts

USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def app(tokenizer: Tokenizer) -> Any:
    client = ScriptedEngineClient(tokenizer)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return build_app(ApiContext(client=client, tokenizer=tokenizer, limits=Limits(), chat_template=template))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer)
    yield compiler
    compiler.close()


def json_format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/completions",
            {"structured_outputs": {"grammar": "start: nothing"}},
            "structured_outputs.grammar",
        ),
        ("/v1/completions", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ("/v1/completions", {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ("/v1/completions", {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ("/v1/completions", {"structured_outputs": {"choice": ["a" * 70_000]}}, "structured_outputs.choice"),
        ("/v1/completions", {"guided_regex": "("}, "guided_regex"),
        (
            "/v1/completions",
            {"response_format": json_format({"type": "thing"})},
            "response_format.json_schema.schema",
        ),
        (
            "/v1/completions",
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
        ),
        (
            "/v1/completions",
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}},
            "text.format.schema",
        ),
        (
            "/v1/chat/completions",
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ("/api", {"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ],
)
def test_an_error_of_a_constraint_names_the_field_of_the_request(
    app: Any, path: str, body: dict[str, Any], param: str
) -> None:
    prompts: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "x"},
        "/v1/chat/completions": {"messages": [USER]},
        "/api": {"prompts": ["x"]},
    }
    response = send(app, "POST", path, json={**prompts.get(path, {"prompt": "x"}), **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_several_constraints_are_named_as_the_request_names_them(app: Any) -> None:
    body = {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["a"]}}
    message = send(app, "POST", "/v1/completions", json=body).json()["error"]["message"]
    wanted = "several constraints: found structured_outputs.regex, structured_outputs.choice, wanted one"
    assert message == f"structured_outputs.choice: {wanted}"


@pytest.mark.parametrize(
    "fields", [{"json": {"type": "object"}}, {"json_object": True}, {"json": '{"type": "object"}'}]
)
def test_json_has_no_blanks_if_the_request_disables_them(
    compiler: GrammarCompiler, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    [flexible] = StructuredOutputs(**fields, disable_any_whitespace=False).specs()
    [strict] = StructuredOutputs(**fields, disable_any_whitespace=True).specs()
    for spec in (flexible, strict):
        compiler.validate(spec)
    assert accepts(compiler, tokenizer, flexible, '{"a": [1, 2]}')
    assert accepts(compiler, tokenizer, strict, '{"a":[1,2]}')
    for text in ('{ "a":1}', '{"a": 1}', '{"a":[1, 2]}', '{"a":1\n}'):
        assert not accepts(compiler, tokenizer, strict, text), text


def test_a_text_that_is_no_schema_is_refused_without_blanks_too(compiler: GrammarCompiler) -> None:
    [spec] = StructuredOutputs(json="{", disable_any_whitespace=True).specs()
    with pytest.raises(RequestError, match=r"structured_outputs\.json: "):
        compiler.validate(spec)
