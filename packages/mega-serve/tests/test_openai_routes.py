"""OpenAI's APIs, driven by OpenAI's own Python client and by lm-evaluation-harness, without sockets."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shlex
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from mega_model.build import load_model
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api import sse
from mega_serve.api.context import ApiContext
from mega_serve.api.logprobs import CompletionLogprobs, chat_logprobs
from mega_serve.api.openai_completions import CompletionBody
from mega_serve.engine.interfaces import EngineDeadError, EngineOverloadedError
from mega_serve.engine.requests import EngineRequest, SequenceOutput, TokenLogprob
from mega_serve.http.limits import Limits
from mega_serve.http.openapi_fields import list_fields
from mega_serve.http.openapi_page import render_page
from tests.api_app import build_app, send
from tests.engine_clients import NaiveEngineClient, RecordingClient, ScriptedEngineClient

openai = pytest.importorskip("openai")

CHATML = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} write <tool_call>{...}</tool_call>{% endif %}assistant:"
)
USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALL = '{"name":"weather","arguments":{"town":"Bern"}}'


@pytest.fixture(scope="module")
def scripted_context(tokenizer: Tokenizer) -> ApiContext:
    """A context whose engine says "Hi there."."""
    client = ScriptedEngineClient(tokenizer)
    return ApiContext(client=client, tokenizer=tokenizer, limits=Limits(), chat_template=CHATML)


@pytest.fixture(scope="module")
def context(checkpoint: Path, tokenizer: Tokenizer) -> ApiContext:
    """A context whose engine runs the small model naively."""
    saved = Checkpoint.open(checkpoint)
    decoder = load_model(saved.spec, saved.model_slab, dtype=torch.float32, device="cpu")
    client = NaiveEngineClient(decoder, tokenizer)
    return ApiContext(client=client, tokenizer=tokenizer, limits=Limits(), chat_template=CHATML)


def run(context: ApiContext, use: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine with OpenAI's client."""

    async def exchange() -> Any:
        transport = httpx.ASGITransport(build_app(context), raise_app_exceptions=False)
        http_client = httpx.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(
            api_key="x", base_url="http://test/v1", http_client=http_client, max_retries=0
        ) as client:
            return await use(client)

    return asyncio.run(exchange())


async def collect(stream: Any) -> list[Any]:
    return [event async for event in stream]


def replace_text(context: ApiContext, text: str) -> ApiContext:
    return replace(context, client=ScriptedEngineClient(context.tokenizer, text))


def test_the_model_is_listed(scripted_context: ApiContext) -> None:
    async def use(client: Any) -> Any:
        return (await client.models.list()).data, await client.models.retrieve("script")

    [listed], model = run(scripted_context, use)
    assert listed == model
    assert (model.id, model.max_model_len) == ("script", 4096)


@pytest.mark.parametrize(
    ("prompt", "choices"), [("ab", 1), (["ab", "c"], 2), ([97, 98], 1), ([[97, 98], [99]], 2)]
)
def test_every_form_of_a_prompt_is_completed(scripted_context: ApiContext, prompt: Any, choices: int) -> None:
    completion = run(scripted_context, lambda c: c.completions.create(model="script", prompt=prompt, n=2))
    assert [choice.index for choice in completion.choices] == list(range(2 * choices))
    assert {choice.text for choice in completion.choices} == {"Hi there."}
    assert {choice.finish_reason for choice in completion.choices} == {"stop"}
    assert completion.usage.completion_tokens == 9 * 2 * choices
    assert completion.usage.prompt_tokens == (2 if choices == 1 else 3)


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_has_the_text_and_logprobs_of_the_whole_response(
    context: ApiContext, logprobs: int | None, echo: bool
) -> None:
    body = {"model": "tiny", "prompt": ["ab☃", "x"], "max_tokens": 7, "seed": 3, "echo": echo}
    body |= {"logprobs": logprobs, "n": 2, "temperature": 1.5}

    async def use(client: Any) -> Any:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return await client.completions.create(**body), await collect(
            await client.completions.create(**body, **options)
        )

    whole, events = run(context, use)
    assert events[-1].usage == whole.usage
    assert events[-1].choices == []
    for index, choice in enumerate(whole.choices):
        parts = [event.choices[0] for event in events[:-1] if event.choices[0].index == index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        if logprobs is None:
            assert choice.logprobs is None
            continue
        for name in ("tokens", "token_logprobs", "text_offset"):
            streamed = [value for part in parts for value in getattr(part.logprobs, name)]
            assert streamed == getattr(choice.logprobs, name)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs)
        assert (choice.logprobs.token_logprobs[0] is None) is echo


def test_echo_with_no_new_tokens_scores_the_prompt(context: ApiContext) -> None:
    body = {"model": "tiny", "prompt": "Hello☃ you", "max_tokens": 0, "echo": True, "logprobs": 2}
    [choice] = run(context, lambda c: c.completions.create(**body)).choices
    assert choice.text == "Hello☃ you"
    ids = context.tokenizer.encode("Hello☃ you")
    logit_TV = context.client.logits(ids)  # type: ignore[attr-defined]
    expected = logit_TV[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    # a letter of three bytes begins at one place, and each part is named by its byte
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5, 5, 5, 6, 7, 8, 9]
    assert choice.logprobs.tokens == [*"Hello", r"bytes:\xe2", r"bytes:\x98", r"bytes:\x83", *" you"]
    for logprob, top in zip(
        choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True
    ):
        assert logprob in top.values() or logprob < min(top.values())


def test_parts_of_characters_are_named_by_their_bytes(context: ApiContext) -> None:
    ids = context.tokenizer.encode("☃")
    entry = TokenLogprob(ids[0], -0.5, 1, tuple((i, -0.5 - n) for n, i in enumerate(ids)))
    [top] = CompletionLogprobs(context.tokenizer, top=3).append(ids[:1], [entry])["top_logprobs"]
    assert top == {r"bytes:\xe2": -0.5, r"bytes:\x98": -1.5, r"bytes:\x83": -2.5}
    [word] = chat_logprobs(context.tokenizer, [entry], 3)["content"]
    assert [part["bytes"] for part in (word, *word["top_logprobs"])] == [[0xE2], [0xE2], [0x98], [0x83]]


def test_the_scoring_call_of_lm_eval_has_its_arrays(context: ApiContext) -> None:
    rows = [[97, 98, 99, 100], [100, 101, 102]]
    body = {"model": "tiny", "prompt": rows, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    response = send(build_app(context), "POST", "/v1/completions", json={**body, "seed": 1234}).json()
    for row, choice in zip(rows, response["choices"], strict=True):
        logprobs = choice["logprobs"]["token_logprobs"]
        tops = choice["logprobs"]["top_logprobs"]
        assert len(logprobs) == len(tops) == len(row) + 1
        assert logprobs[0] is None
        # the generated token is the most probable: the same float in both arrays
        assert logprobs[-1] == max(tops[-1].values())


def test_lm_eval_gets_the_models_loglikelihoods(context: ApiContext, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    app = build_app(context)

    class Reply:
        def __init__(self, response: httpx.Response) -> None:
            self.response = response
            self.ok = response.is_success
            self.text = response.text
            self.status_code = response.status_code

        def json(self) -> Any:
            return self.response.json()

        def raise_for_status(self) -> None:
            self.response.raise_for_status()

    def request(_: Any, method: str, url: str, json: Any = None, **__: Any) -> Reply:
        return Reply(send(app, method, httpx.URL(url).path, json=json))

    # the harness is unmodified; its HTTP library finds the application without a socket
    monkeypatch.setattr("requests.Session.request", request)
    model = LocalCompletionsAPI(
        model="tiny",
        base_url="http://test/v1/completions",
        tokenizer_backend="remote",
        max_length=64,
        batch_size=2,
    )
    pairs = [("Hello", " you"), ("a", "b"), ("", "xyz")]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(pairs)
    ]
    results = model.loglikelihood(requests, disable_tqdm=True)
    encode = context.tokenizer.encode
    eod = context.tokenizer.identity.eod
    for (prefix, continuation), (logprob, is_greedy) in zip(pairs, results, strict=True):
        before = encode(prefix) or [eod]
        ids = [*before, *encode(continuation)]
        scores = context.client.logits(ids).log_softmax(-1)  # type: ignore[attr-defined]
        expected = sum(float(scores[i - 1, ids[i]]) for i in range(len(before), len(ids)))
        assert logprob == pytest.approx(expected, abs=1e-4)
        greedy = all(int(scores[i - 1].argmax()) == ids[i] for i in range(len(before), len(ids)))
        assert is_greedy is greedy


def test_a_chat_has_one_message(scripted_context: ApiContext) -> None:
    chat = run(
        scripted_context,
        lambda c: c.chat.completions.create(
            model="script", messages=[USER], logprobs=True, top_logprobs=2, n=2
        ),
    )
    assert [choice.message.content for choice in chat.choices] == ["Hi there."] * 2
    assert chat.choices[0].logprobs.content[0].token == "H"
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    prompt = "user: Hi\nassistant:"
    assert chat.usage.prompt_tokens == len(scripted_context.tokenizer.encode(prompt))
    assert chat.usage.prompt_tokens_details.cached_tokens == 2


def test_a_chat_stream_begins_with_the_role_and_ends_with_a_reason(scripted_context: ApiContext) -> None:
    async def use(client: Any) -> Any:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return await collect(await client.chat.completions.create(model="script", messages=[USER], **options))

    events = run(scripted_context, use)
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == "Hi there."
    assert events[-2].choices[0].finish_reason == "stop"
    assert events[-1].usage.completion_tokens == 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_parsed_and_its_grammar_reaches_the_engine(
    scripted_context: ApiContext, choice: Any, stream: bool
) -> None:
    context = replace_text(scripted_context, CALL)

    async def use(client: Any) -> Any:
        body = {"model": "script", "messages": [USER], "tools": [TOOL], "tool_choice": choice}
        if not stream:
            return (await client.chat.completions.create(**body)).choices[0]
        async with client.chat.completions.stream(**body) as events:
            return (await events.get_final_completion()).choices[0]

    answer = run(context, use)
    [call] = answer.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"town": "Bern"}
    assert answer.finish_reason == "tool_calls"
    [request] = context.client.requests  # type: ignore[attr-defined]
    assert request.params.grammar.kind == "json_schema"
    assert '"weather"' in request.params.grammar.text


@pytest.mark.parametrize("stream", [False, True])
def test_calls_between_tags_are_parsed_where_the_template_has_them(
    scripted_context: ApiContext, stream: bool
) -> None:
    text = f"I look. <tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"

    async def use(client: Any) -> Any:
        body = {"model": "script", "messages": [USER], "tools": [TOOL]}
        if not stream:
            return (await client.chat.completions.create(**body)).choices[0].message
        async with client.chat.completions.stream(**body) as events:
            return (await events.get_final_completion()).choices[0].message

    message = run(replace_text(scripted_context, text), use)
    assert message.content == "I look. "
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"town": "Bern"}] * 2
    assert len({call.id for call in message.tool_calls}) == 2


def test_text_that_only_begins_like_a_call_is_content(scripted_context: ApiContext) -> None:
    text = "2 <3 <tool_c"
    body = {"messages": [USER], "tools": [TOOL]}
    response = send(
        build_app(replace_text(scripted_context, text)), "POST", "/v1/chat/completions", json=body
    ).json()
    assert response["choices"][0]["message"]["content"] == text


def test_a_template_that_says_nothing_of_calls_refuses_auto(scripted_context: ApiContext) -> None:
    context = replace(scripted_context, chat_template="{{ messages[0].content }}")
    body = {"messages": [USER], "tools": [TOOL]}
    response = send(build_app(context), "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "does not say how the model calls tools" in response.json()["error"]["message"]


def test_a_checkpoint_without_a_template_says_what_to_do(scripted_context: ApiContext) -> None:
    context = replace(scripted_context, chat_template=None)
    response = send(build_app(context), "POST", "/v1/chat/completions", json={"messages": [USER]})
    assert response.status_code == 400
    assert "--chat-template" in response.json()["error"]["message"]


def test_a_response_has_the_text_and_the_usage(scripted_context: ApiContext) -> None:
    response = run(
        scripted_context, lambda c: c.responses.create(model="script", instructions="Be brief.", input="Hi")
    )
    assert response.output_text == "Hi there."
    assert response.status == "completed"
    assert (response.usage.output_tokens, response.usage.input_tokens_details.cached_tokens) == (9, 2)


class HesitantClient(RecordingClient):
    """Holds back the text of the first of two bytes of a character, as the engine does."""

    async def outputs(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        texts = ["", "é", "!", ""]
        for number, text in enumerate(texts):
            yield SequenceOutput(
                request_id=request.request_id,
                token_ids=(number,),
                text=text,
                logprobs=(TokenLogprob(number, -1.5 * number, 1, ()),),
                finish_reason="length" if number == 3 else None,
            )


def test_a_streamed_response_has_the_logprobs_of_tokens_without_text(scripted_context: ApiContext) -> None:
    context = replace(scripted_context, client=HesitantClient(scripted_context.client.model))
    body = {"input": "ab", "top_logprobs": 2}
    response = send(build_app(context), "POST", "/v1/responses", json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["delta"] for event in deltas] == ["é", "!", ""]
    assert [len(event["logprobs"]) for event in deltas] == [2, 1, 1]
    (item,) = send(build_app(context), "POST", "/v1/responses", json=body).json()["output"]
    assert [entry["logprob"] for entry in item["content"][0]["logprobs"]] == [0.0, -1.5, -3.0, -4.5]
    assert events[-1]["response"]["output"][0]["content"] == item["content"]


def test_the_events_of_a_response_come_in_openais_order(scripted_context: ApiContext) -> None:
    async def use(client: Any) -> Any:
        return await collect(await client.responses.create(model="script", input="Hi", stream=True))

    events = run(scripted_context, use)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert list(dict.fromkeys(event.type for event in events)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[-1].response.output_text == "Hi there."
    assert events[2].item.content == []


def test_a_response_calls_functions_and_takes_their_results(scripted_context: ApiContext) -> None:
    context = replace_text(scripted_context, CALL)
    tool = {"type": "function", "name": "weather", "parameters": TOOL["function"]["parameters"]}  # type: ignore[index]

    async def use(client: Any) -> Any:
        body = {"model": "script", "input": "Hi", "tools": [tool], "tool_choice": "required"}
        return await collect(await client.responses.create(**body, stream=True))

    [item] = run(context, use)[-1].response.output
    assert (item.type, item.name, json.loads(item.arguments)) == (
        "function_call",
        "weather",
        {"town": "Bern"},
    )
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        item.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"},
    ]
    response = run(scripted_context, lambda c: c.responses.create(model="script", input=items))
    assert response.output_text == "Hi there."


@pytest.mark.parametrize(
    ("field", "value"), [("store", True), ("previous_response_id", "resp_1"), ("background", True)]
)
def test_what_needs_a_stored_response_is_refused(
    scripted_context: ApiContext, field: str, value: Any
) -> None:
    response = send(build_app(scripted_context), "POST", "/v1/responses", json={"input": "Hi", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_a_schema_reaches_the_engine_from_every_api(scripted_context: ApiContext) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"name": "x", "schema": schema}
    response_format = {"type": "json_schema", "json_schema": named}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "response_format": response_format},
        "/completions": {"prompt": "x", "guided_json": schema},
        "/v1/chat/completions": {"messages": [USER], "structured_outputs": {"json": schema}},
        "/v1/responses": {"input": "x", "text": {"format": {"type": "json_schema", **named}}},
    }
    context = replace_text(scripted_context, "{}")
    app = build_app(context)
    for path, body in bodies.items():
        assert send(app, "POST", path, json=body).status_code == 200
    grammars = [request.params.grammar for request in context.client.requests]  # type: ignore[attr-defined]
    assert [grammar.kind for grammar in grammars] == ["json_schema"] * 4
    assert all(json.loads(grammar.text) == schema for grammar in grammars)


TAGS = {
    "structures": [
        {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"},
        {"begin": "<g>", "end": ""},
    ],
    "triggers": ["<"],
}


FORMAT = {
    "type": "triggered_tags",
    "triggers": ["<"],
    "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}],
}


def test_a_structural_tag_reaches_the_engine_from_every_api(scripted_context: ApiContext) -> None:
    tag = {"type": "structural_tag", **TAGS}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "response_format": tag},
        "/completions": {"prompt": "x", "structured_outputs": {"structural_tag": json.dumps(tag)}},
        "/v1/chat/completions": {"messages": [USER], "response_format": tag},
        "/v1/responses": {"input": "x", "text": {"format": tag}},
        "/chat/completions": {
            "messages": [USER],
            "response_format": {"type": "structural_tag", "format": FORMAT},
        },
        "/api": {"prompts": ["x"], "structured_outputs": {"structural_tag": tag}},
    }
    context = replace_text(scripted_context, "<f>{}</f>")
    app = build_app(context)
    for path, body in bodies.items():
        assert send(app, "POST", path, json=body).status_code == 200, path
    grammars = [request.params.grammar for request in context.client.requests]  # type: ignore[attr-defined]
    assert [grammar.kind for grammar in grammars] == ["structural_tag"] * 6
    assert json.loads(grammars.pop(4).text) == {"format": FORMAT}
    for grammar in grammars:
        value = json.loads(grammar.text)
        assert [s["begin"] for s in value["structures"]] == ["<f>", "<g>"]
        assert value["triggers"] == ["<"]
        assert value["structures"][0]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "completions",
            {"response_format": {"type": "structural_tag"}},
            "response_format.structures: missing",
        ),
        (
            "completions",
            {"response_format": {"type": "structural_tag", "structures": TAGS["structures"]}},
            "response_format.triggers: missing",
        ),
        (
            "completions",
            {"response_format": {"type": "structural_tag", **TAGS, "triggers": ["["]}},
            "structures.0.begin starts with no trigger",
        ),
        ("completions", {"structured_outputs": {"structural_tag": "{"}}, "structural_tag"),
        (
            "completions",
            {"response_format": {"type": "structural_tag", "format": {"type": "or"}}},
            "format must have",
        ),
        (
            "completions",
            {"response_format": {"type": "structural_tag", **TAGS, "format": {}}},
            "response_format: not of the form",
        ),
        ("responses", {"text": {"format": {"type": "structural_tag"}}}, "text.format.structures: missing"),
    ],
)
def test_a_structural_tag_that_lacks_a_part_is_a_400(
    scripted_app: Any, path: str, body: dict[str, Any], message: str
) -> None:
    field = "input" if path == "responses" else "prompt"
    response = send(scripted_app, "POST", f"/v1/{path}", json={field: "x", **body})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt: missing"),
    ({"prompt": "x", "temprature": 0.3}, "temprature: unknown field; hint: did you mean temperature?"),
    ({"prompt": "x", "stream_options": {"include_usge": True}}, "did you mean include_usage?"),
    ({"prompt": "x", "model": "gpt-5"}, "does not exist"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "at least one"),
    ({"prompt": ""}, "at least one"),
    ({"prompt": [1, "a"]}, "prompt.1"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [10**6]}, "no such token id"),
    ({"prompt": ["x"] * 129}, "too many prompts"),
    ({"prompt": "x", "n": 17}, "n: above the server's limit"),
    ({"prompt": "x", "n": 2, "temperature": 0}, "n: greedy"),
    ({"prompt": "x", "logprobs": 21}, "logprobs: above"),
    ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens: nothing to return"),
    ({"prompt": "x", "max_tokens": 10**6}, "1,000,001 were asked for"),
    ({"prompt": ["x" * 2000] * 10, "max_tokens": 1}, "a request may hold 12,000 tokens, and 20,010"),
    ({"prompt": "x", "temperature": "1"}, "temperature"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p: keeps no word"),
    ({"prompt": "x", "seed": 2**64}, "seed"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop: above"),
    ({"prompt": "x", "stop": "a" * 257}, "stop: above"),
    ({"prompt": "x", "stop": ""}, "stop: an empty string"),
    ({"prompt": "x", "best_of": 2}, "best_of: not supported"),
    ({"prompt": "x", "suffix": "y"}, "suffix: not supported"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias: not a token id"),
    ({"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias: no such token id"),
    ({"prompt": "x", "bad_words": [""]}, "bad_words"),
    ({"prompt": "x", "guided_regex": "("}, "regex"),
    ({"prompt": "x", "guided_regex": "a", "guided_choice": ["a"]}, "several constraints"),
    ({"prompt": "x", "stream_options": {}}, "the response is not a stream"),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=lambda value: str(value)[:50])
def test_a_bad_field_is_named_in_one_line(scripted_app: Any, body: dict[str, Any], message: str) -> None:
    response = send(scripted_app, "POST", "/v1/completions", json=body)
    assert response.status_code == (404 if body.get("model") else 400)
    error = response.json()["error"]
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"]


@pytest.fixture(scope="module")
def scripted_app(scripted_context: ApiContext) -> Any:
    return build_app(scripted_context)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "x", "content": "y"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: missing"),
        (
            {"messages": [{**USER, "contents": 1}]},
            "messages.0.contents: unknown field; hint: did you mean content?",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template: unknown field"),
        ({"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs: needs logprobs"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice: no tools"),
        ({"messages": [USER], "tools": [TOOL, TOOL]}, "two functions have one name"),
        (
            {
                "messages": [USER],
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tool_choice: no such function",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_field_of_a_chat_is_named(scripted_app: Any, body: dict[str, Any], message: str) -> None:
    response = send(scripted_app, "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_unknown_fields_are_ignored_if_lenient(scripted_context: ApiContext) -> None:
    app = build_app(replace(scripted_context, lenient=True))
    assert send(app, "POST", "/v1/completions", json={"prompt": "x", "temprature": 1}).status_code == 200
    messages = [{**USER, "contents": 1}]
    assert send(app, "POST", "/v1/chat/completions", json={"messages": messages}).status_code == 200


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"null"]
)
def test_a_body_that_is_not_an_object_is_a_400(scripted_app: Any, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = send(scripted_app, "POST", "/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_the_tokenizer_is_served(scripted_context: ApiContext, scripted_app: Any) -> None:
    info = send(scripted_app, "GET", "/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
    assert {"bos_token", "pad_token", "chat_template"} <= info.keys()
    body = {"prompt": "é <|endoftext|>", "return_token_strs": True}
    tokens = send(scripted_app, "POST", "/tokenize", json=body).json()
    assert tokens["tokens"] == scripted_context.tokenizer.encode("é <|endoftext|>")
    assert len(tokens["token_strs"]) == tokens["count"] == len(tokens["tokens"])
    text = send(scripted_app, "POST", "/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert text == "é <|endoftext|>"
    refusal = send(scripted_app, "POST", "/tokenize", json={"text": "a"}).json()["error"]["message"]
    assert refusal == "text: unknown field; hint: did you mean prompt?"
    eod = send(scripted_app, "POST", "/tokenize", json={"prompt": "<|endoftext|>"}).json()["tokens"]
    assert eod == [scripted_context.tokenizer.identity.eod]
    messages = send(scripted_app, "POST", "/tokenize", json={"messages": [USER]}).json()
    assert messages["tokens"] == scripted_context.tokenizer.encode("user: Hi\nassistant:")
    assert send(scripted_app, "POST", "/tokenize", json={}).status_code == 400


def test_an_error_before_the_first_event_has_its_own_status(scripted_context: ApiContext) -> None:
    async def refuse(_: int) -> None:
        raise EngineOverloadedError("the queue is full", 3)

    context = replace(
        scripted_context, client=ScriptedEngineClient(scripted_context.tokenizer, before_step=refuse)
    )
    body = {"prompt": ["x", "y"], "stream": True}
    response = send(build_app(context), "POST", "/v1/completions", json=body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


def test_an_error_in_a_stream_is_its_last_event(scripted_context: ApiContext) -> None:
    async def die(step: int) -> None:
        if step == 3:
            raise EngineDeadError("the engine stopped")

    context = replace(
        scripted_context, client=ScriptedEngineClient(scripted_context.tokenizer, before_step=die)
    )
    response = send(build_app(context), "POST", "/v1/completions", json={"prompt": "x", "stream": True})
    *texts, last = [line for line in response.text.split("\n\n") if line]
    assert len(texts) == 3
    assert "the engine stopped" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in response.text


def test_a_silent_stream_has_comments(scripted_context: ApiContext, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(step: int) -> None:
        await asyncio.sleep(0.2 if step == 1 else 0)

    monkeypatch.setattr(sse.event_stream, "__kwdefaults__", {"keep_alive": 0.05})
    context = replace(
        scripted_context, client=ScriptedEngineClient(scripted_context.tokenizer, "ab", before_step=wait)
    )
    response = send(build_app(context), "POST", "/v1/completions", json={"prompt": "x", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert ": keep-alive\n\n" in response.text
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api", {"prompts": ["x", "y"]}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/completions", {"prompt": ["x", "y"], "stream": True}),
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/chat/completions", {"messages": [USER], "stream": True}),
        ("/v1/responses", {"input": "x", "stream": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("silent_from", [0, 2])
def test_a_client_that_disconnects_aborts_its_requests(
    scripted_context: ApiContext, path: str, body: dict[str, Any], silent_from: int
) -> None:
    entered = asyncio.Event()

    async def hang(step: int) -> None:
        if step == silent_from:
            entered.set()
            await asyncio.sleep(60)

    client = ScriptedEngineClient(scripted_context.tokenizer, before_step=hang)
    app = build_app(replace(scripted_context, client=client))

    async def exchange() -> None:
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        content = json.dumps(body).encode()
        await received.put({"type": "http.request", "body": content, "more_body": False})

        async def ignore(_: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        task = asyncio.create_task(app(scope, received.get, ignore))
        await asyncio.wait_for(entered.wait(), 20)
        await asyncio.sleep(0.05)
        await received.put({"type": "http.disconnect"})
        await asyncio.wait_for(task, 20)

    asyncio.run(exchange())
    assert len(client.closed) == len(client.requests) > 0


def test_a_long_prompt_does_not_hold_the_loop(scripted_context: ApiContext, scripted_app: Any) -> None:
    async def exchange() -> float:
        transport = httpx.ASGITransport(scripted_app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "word " * 200_000}))
            longest, loop = 0.0, asyncio.get_running_loop()
            while not task.done():
                start = loop.time()
                await asyncio.sleep(0.001)
                longest = max(longest, loop.time() - start)
            assert task.result().status_code == 400
            return longest

    assert asyncio.run(exchange()) < 1.0


def test_the_schema_describes_every_route_with_examples(scripted_app: Any) -> None:
    schema = scripted_app.openapi()
    posts = [operation["post"] for operation in schema["paths"].values() if "post" in operation]
    assert len(posts) == 7
    for operation in posts:
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"]["additionalProperties"] is False
        assert content["examples"]
    assert "$ref" not in json.dumps([operation["requestBody"] for operation in posts])


def test_every_field_of_every_route_has_a_description(scripted_app: Any) -> None:
    bare = {
        f"{path} {row.name}"
        for path, item in scripted_app.openapi()["paths"].items()
        for operation in item.values()
        for content in operation.get("requestBody", {}).get("content", {}).values()
        for row in list_fields(content["schema"])
        if not row.description
    }
    assert not bare


def test_the_documentation_page_has_every_field_and_commands_that_parse(scripted_app: Any) -> None:
    page = html.unescape(render_page(scripted_app.openapi())[0])
    for name in CompletionBody.model_fields:
        assert f"<code>{name}</code>" in page
    for name in ("stream_options.include_usage", "structured_outputs.regex", "messages[].role", "beam_width"):
        assert f"<code>{name}</code>" in page
    assert "list (1 to 32 items) of string (1 to 256 characters)" in page
    assert '<h2 id="put-api"><code>PUT, POST /api</code>' in page
    assert page.count("Once upon a time") == len(set(re.findall("<pre>[^<]*Once upon a time[^<]*", page)))
    commands = re.findall("<pre>(curl [^<]*)</pre>", page)
    assert len(commands) > 12
    for command in commands:
        words = shlex.split(command)
        assert isinstance(json.loads(words[-1]), dict)
        path = next(word for word in words if word.startswith("HOST:PORT")).removeprefix("HOST:PORT")
        assert path in scripted_app.openapi()["paths"]
    targets = set(re.findall('id="([^"]+)"', page))
    assert set(re.findall('href="#([^"]+)"', page)) == targets


def test_requests_of_one_completion_have_their_own_ids_and_seeds(scripted_context: ApiContext) -> None:
    context = replace_text(scripted_context, "x")
    body = {"prompt": ["x", "x"], "seed": 5, "priority": 2, "cache_salt": "s", "n": 2}
    assert send(build_app(context), "POST", "/v1/completions", json=body).status_code == 200
    requests: list[EngineRequest] = context.client.requests  # type: ignore[attr-defined]
    assert [request.params.seed for request in requests] == [5, 6]  # type: ignore[union-attr]
    assert {(request.priority, request.cache_namespace, request.n) for request in requests} == {(2, "s", 2)}


@pytest.mark.parametrize("name", ["x-a", "Temperature", "a[0]", "f(x)", "int", ""])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"]
)
def test_an_unknown_field_of_any_name_is_a_400(scripted_app: Any, path: str, name: str) -> None:
    body = {"prompt": "x", "messages": [USER], "input": "x"}
    fields = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/embeddings": "input"}
    field = fields.get(path, "prompt")
    response = send(scripted_app, "POST", path, json={field: body[field], name: 1})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == (name or None)
    assert response.json()["error"]["code"] == "unknown_parameter"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_schemathesis_finds_no_server_error(scripted_app: Any) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_asgi("/openapi.json", scripted_app)
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
        def check(case: Any) -> None:
            response = case.call()
            assert response.status_code < 500, (case, response.text)

        check()
