"""vLLM's additions to OpenAI's completions, chats and embeddings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api.context import ApiContext
from mega_serve.engine.detokenizer import Detokenizer
from mega_serve.engine.requests import SamplingParams
from mega_serve.http.limits import Limits
from tests.api_app import build_app, send
from tests.engine_clients import ScriptedEngineClient
from tests.serving.random_checkpoint import EOD

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
TEXT = "Hi!"


@pytest.fixture
def client(tokenizer: Tokenizer) -> ScriptedEngineClient:
    return ScriptedEngineClient(tokenizer, TEXT, max_seq_len=64)


@pytest.fixture
def context(client: ScriptedEngineClient, tokenizer: Tokenizer) -> ApiContext:
    return ApiContext(client=client, tokenizer=tokenizer, limits=Limits(), chat_template=TEMPLATE)


def ask(context: ApiContext, path: str, **body: Any) -> dict[str, Any]:
    response = send(build_app(context), "POST", f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(context: ApiContext, path: str, **body: Any) -> list[dict[str, Any]]:
    response = send(build_app(context), "POST", f"/v1/{path}", json={"stream": True, **body})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", response.text
    return [json.loads(line) for line in lines[:-1]]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_completions_return_the_ids_of_prompt_and_text(context: ApiContext, tokenizer: Tokenizer) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "return_token_ids": True}
    choices = ask(context, "completions", **body)["choices"]
    prompts = [tokenizer.encode("ab")] * 2 + [tokenizer.encode("c")] * 2
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert {tuple(choice["token_ids"]) for choice in choices} == {tuple(tokenizer.encode(TEXT))}
    streamed = [choice for event in events(context, "completions", **body) for choice in event["choices"]]
    for index in range(4):
        own = [choice for choice in streamed if choice["index"] == index]
        assert [choice["prompt_token_ids"] for choice in own] == [prompts[index], None, None]
        assert [i for choice in own for i in choice["token_ids"]] == tokenizer.encode(TEXT)
    assert "token_ids" not in ask(context, "completions", prompt="ab")["choices"][0]


def test_chats_return_the_ids_of_prompt_and_text(context: ApiContext, tokenizer: Tokenizer) -> None:
    body = {"messages": user("ab"), "return_token_ids": True}
    answer = ask(context, "chat/completions", **body)
    assert answer["prompt_token_ids"] == tokenizer.encode("ab>")
    assert answer["choices"][0]["token_ids"] == tokenizer.encode(TEXT)
    streamed = events(context, "chat/completions", **body)
    assert [event.get("prompt_token_ids") for event in streamed] == [
        tokenizer.encode("ab>"),
        None,
        None,
        None,
    ]
    ids = [i for event in streamed for i in event["choices"][0].get("token_ids", [])]
    assert ids == tokenizer.encode(TEXT)
    assert "prompt_token_ids" not in ask(context, "chat/completions", messages=user("ab"))


@pytest.mark.parametrize(("tokens", "kept"), [(2, "de"), (9, "abcde"), (-1, "abcde"), (None, "abcde")])
def test_a_prompt_is_cut_to_its_last_tokens(
    context: ApiContext, client: ScriptedEngineClient, tokenizer: Tokenizer, tokens: int | None, kept: str
) -> None:
    cut = {"truncate_prompt_tokens": tokens}
    answer = ask(context, "completions", prompt="abcde", echo=True, **cut)
    assert answer["choices"][0]["text"] == kept + TEXT
    assert answer["usage"]["prompt_tokens"] == len(kept)
    ask(context, "embeddings", input="abcde", **cut)
    ask(context, "chat/completions", messages=user("abcd"), max_tokens=3, **cut)
    rows = [tokenizer.decode(request.prompt_token_ids) for request in client.requests]
    chat = "abcd>"[-len(kept) :]
    assert rows == [kept, kept, chat]


def test_a_prompt_is_cut_to_what_the_context_holds(context: ApiContext, client: ScriptedEngineClient) -> None:
    ask(context, "completions", prompt="x" * 99, max_tokens=4, truncate_prompt_tokens=-1)
    ask(context, "chat/completions", messages=user("x" * 99), truncate_prompt_tokens=-1)
    ask(context, "embeddings", input="x" * 99, truncate_prompt_tokens=-1)
    assert [len(request.prompt_token_ids) for request in client.requests] == [60, 63, 64]
    assert client.requests[1].params.max_tokens == 1


@pytest.mark.parametrize("tokens", [0, -2, "1"])
def test_a_cut_that_keeps_no_token_is_a_400(context: ApiContext, tokens: Any) -> None:
    body = {"prompt": "ab", "truncate_prompt_tokens": tokens}
    response = send(build_app(context), "POST", "/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


def test_usage_comes_with_every_event_if_asked(context: ApiContext) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path, body in (("completions", {"prompt": "ab"}), ("chat/completions", {"messages": user("a")})):
        counts = [event["usage"]["completion_tokens"] for event in events(context, path, **body, **options)]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, len(TEXT))
        assert "usage" not in events(context, path, **body)[0]


def test_min_tokens_and_stop_fields_reach_the_engine(
    context: ApiContext, client: ScriptedEngineClient
) -> None:
    fields = {"min_tokens": 3, "include_stop_str_in_output": True, "skip_special_tokens": False}
    ask(context, "completions", prompt="a", **fields)
    ask(context, "chat/completions", messages=user("a"), max_tokens=8, **fields)
    for request in client.requests:
        assert isinstance(request.params, SamplingParams)
        assert {name: getattr(request.params, name) for name in fields} == fields


def test_a_message_is_continued_without_a_generation_prompt(
    context: ApiContext, client: ScriptedEngineClient, tokenizer: Tokenizer
) -> None:
    messages = [*user("ab"), {"role": "assistant", "content": "So"}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    ask(context, "chat/completions", messages=messages, max_tokens=4, **flags)
    assert tokenizer.decode(client.requests[0].prompt_token_ids) == "abSo"


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with an end-of-document token, a special token <s> and a word <w> that was added."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    from mega_schema.tokenizer.tokenizer import open_tokenizer

    folder: Path = tmp_path_factory.mktemp("special")
    library = Library(models.BPE({letter: i for i, letter in enumerate("abc")}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([EOD, "<s>"])
    library.add_tokens([AddedToken("<w>", normalized=False)])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOD}))
    return open_tokenizer("HuggingFaceTokenizer", model=folder)


@pytest.mark.parametrize(
    ("skip", "text"), [(True, "a<w>b"), (False, f"a<s><w>{EOD}b{EOD}"), (None, f"a<s><w>{EOD}b")]
)
def test_special_tokens_are_text_or_not(special: Tokenizer, skip: bool | None, text: str) -> None:
    names = {piece: i for i, piece in enumerate(special.pieces(range(special.identity.vocab_size)))}
    eod = names[EOD]
    assert special.identity.eod == eod
    detokenizer = Detokenizer(special, [names["c"]], skip_special_tokens=skip)
    parts = [detokenizer.append([i])[0] for i in (0, names["<s>"], names["<w>"], eod, 1, eod)]
    assert "".join(parts) + detokenizer.flush() == text


def test_a_lenient_server_ignores_what_only_vllm_knows(context: ApiContext) -> None:
    body = {"prompt": "a", "vllm_xargs": {"a": 1}}
    assert send(build_app(context), "POST", "/v1/completions", json=body).status_code == 400
    assert (
        send(build_app(replace(context, lenient=True)), "POST", "/v1/completions", json=body).status_code
        == 200
    )
