"""POST /v1/embeddings: OpenAI's client, the engine's hidden states, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from mega_model.build import load_model
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api.context import ApiContext
from mega_serve.engine.requests import Pooling
from mega_serve.engine.scheduler import EngineConfig
from mega_serve.execution.engine_factory import build_engine
from mega_serve.http.limits import Limits
from tests.api_app import build_app, send
from tests.engine_clients import SCRIPTED_EMBEDDING, NaiveEngineClient, ScriptedEngineClient
from tests.engine_fakes import hidden_row, new_request, open_engine
from tests.serving.server_program import run_server

openai = pytest.importorskip("openai")

PROMPT = [72, 105, 32, 116, 104, 101, 114, 101, 46]


@pytest.fixture(scope="module")
def naive(checkpoint: Path, tokenizer: Tokenizer) -> NaiveEngineClient:
    saved = Checkpoint.open(checkpoint)
    decoder = load_model(saved.spec, saved.model_slab, dtype=torch.float32, device="cpu")
    return NaiveEngineClient(decoder, tokenizer)


@pytest.fixture(scope="module")
def context(naive: NaiveEngineClient, tokenizer: Tokenizer) -> ApiContext:
    return ApiContext(client=naive, tokenizer=tokenizer, limits=Limits())


@pytest.fixture(scope="module")
def scripted_app(tokenizer: Tokenizer) -> Any:
    client = ScriptedEngineClient(tokenizer)
    return build_app(ApiContext(client=client, tokenizer=tokenizer, limits=Limits()))


def embed(context: ApiContext, **body: Any) -> Any:
    """Return the answer that OpenAI's client reads."""

    async def exchange() -> Any:
        transport = httpx.ASGITransport(build_app(context), raise_app_exceptions=False)
        http_client = httpx.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(
            api_key="x", base_url="http://test/v1", http_client=http_client, max_retries=0
        ) as client:
            return await client.embeddings.create(model="tiny", **body)

    return asyncio.run(exchange())


def expected_row(naive: NaiveEngineClient, ids: list[int], pooling: Pooling = "last") -> np.ndarray:
    x_TD = naive.hidden_states(ids).double().numpy()
    x_D: np.ndarray = x_TD[-1] if pooling == "last" else x_TD.mean(0)
    return x_D


@pytest.mark.parametrize("encoding", ["float", None])  # OpenAI's client asks for base64 by itself
@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ("ab", [[64, 65]]),
        (["ab", "c"], [[64, 65], [66]]),
        ([64, 65], [[64, 65]]),
        ([[64, 65], [66]], [[64, 65], [66]]),
    ],
)
def test_openais_client_gets_the_hidden_state_of_the_last_token(
    context: ApiContext, naive: NaiveEngineClient, value: Any, rows: list[list[int]], encoding: str | None
) -> None:
    answer = embed(context, input=value, **({} if encoding is None else {"encoding_format": encoding}))
    assert [entry.index for entry in answer.data] == list(range(len(rows)))
    for entry, ids in zip(answer.data, rows, strict=True):
        expected = expected_row(naive, ids)
        np.testing.assert_allclose(entry.embedding, expected / np.linalg.norm(expected), atol=1e-6)
    tokens = sum(map(len, rows))
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("tiny", tokens, tokens)


def test_fewer_dimensions_are_the_first_ones_of_length_one(context: ApiContext) -> None:
    whole = np.array(embed(context, input="ab").data[0].embedding)
    short = embed(context, input="ab", dimensions=5).data[0].embedding
    np.testing.assert_allclose(short, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_the_engine_computes_what_one_forward_pass_does(
    checkpoint: Path, naive: NaiveEngineClient, pooling: Pooling, attention: str
) -> None:
    options = {"load": str(checkpoint), "device": "cpu", "attention": attention, "kv_cache_memory": 1 << 20}
    core = build_engine({**options, "max_num_batched_tokens": 8, "max_num_seqs": 4}).core
    prompts = {"a": PROMPT * 5, "b": PROMPT * 5, "c": PROMPT[:4]}  # b finds a's pages in the cache
    rows, cached = {}, {}
    for request_id, prompt in prompts.items():
        core.add(new_request(request_id, prompt, max_tokens=0, pooling=pooling))
        core.add(new_request("chat" + request_id, prompt, max_tokens=9, ignore_eos=True))
        for _ in range(40):
            for output in core.step():
                if output.request_id == request_id:
                    assert (output.finish_reason, output.token_ids) == ("stop", ())
                    rows[request_id], cached[request_id] = output.embedding, output.cached_tokens
    for request_id, prompt in prompts.items():
        np.testing.assert_allclose(rows[request_id], expected_row(naive, prompt, pooling), atol=1e-5)
    assert (cached["b"] > 0) == (pooling == "last")
    assert not core.has_work


def test_the_mean_of_a_prompt_that_is_computed_twice_counts_every_token_once() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=2, max_num_batched_tokens=3))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.core.add(new_request("a", prompt, max_tokens=0, pooling="mean"))
    assert engine.core.step() == []
    engine.core.swap(1)  # the pages are given up, as in a preemption
    [output] = engine.finish_all()["a", 0]
    rows = [hidden_row(prompt[:count]) for count in range(1, len(prompt) + 1)]
    assert output.embedding == tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))


@pytest.mark.long
def test_ranks_of_tensor_and_pipeline_parallelism_return_the_same_embedding(
    checkpoint: Path, naive: NaiveEngineClient
) -> None:
    with run_server(
        checkpoint, "--attention", "torch", "--tp", "2", "--pp", "2", "--pooling", "mean"
    ) as server:
        body = {"input": PROMPT, "normalize": False}
        answer = server.http.post("/v1/embeddings", json=body).json()
    expected = expected_row(naive, PROMPT, "mean")
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-5)


def test_an_embedding_with_new_tokens_is_refused_by_the_engine() -> None:
    with pytest.raises(RequestError, match="pooling: an embedding has no tokens"):
        open_engine().core.add(new_request("a", [1, 2], max_tokens=1, pooling="last"))


def test_the_answer_has_openais_form(scripted_app: Any) -> None:
    body = {"input": ["ab", "c"], "normalize": False, "cache_salt": "s", "user": "u"}
    answer = send(scripted_app, "POST", "/v1/embeddings", json=body).json()
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": list(SCRIPTED_EMBEDDING)} for index in (0, 1)
        ],
        "model": "script",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    body = {"input": "ab", "encoding_format": "base64", "dimensions": 2}
    [entry] = send(scripted_app, "POST", "/v1/embeddings", json=body).json()["data"]
    assert np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist() == pytest.approx([0.6, -0.8])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: missing"),
        ({"input": ""}, "input: a prompt has no tokens"),
        ({"input": []}, "input"),
        ({"input": [[1], []]}, "input: a prompt has no tokens"),
        ({"input": [300_000]}, "input: no such token id: found 300000"),
        ({"input": ["a"] * 129}, "input: too many prompts: found 129, wanted at most 128"),
        ({"input": [1] * 5000}, "the model's context is 4,096 tokens"),
        ({"input": "a", "dimensions": 4}, "dimensions: more than the model has: found 4, wanted at most 3"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "bits"}, "encoding_format"),
        ({"input": "a", "dimension": 2}, "dimension: unknown field; hint: did you mean dimensions?"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_field_is_named_in_one_line(scripted_app: Any, body: dict[str, Any], message: str) -> None:
    response = send(scripted_app, "POST", "/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] in {"input", "dimensions", "dimension", "encoding_format"}


def test_an_embedding_that_is_not_finite_is_a_500(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engine_clients.SCRIPTED_EMBEDDING", (1.0, float("nan"), 0.0))
    context = ApiContext(client=ScriptedEngineClient(tokenizer), tokenizer=tokenizer, limits=Limits())
    response = send(build_app(context), "POST", "/v1/embeddings", json={"input": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "not_finite"
