"""The engine core against the naive loop: thousands of random histories, and the rules one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mega_schema.errors import RequestError
from mega_serve.engine.requests import (
    BeamSearchParams,
    EngineRequest,
    SequenceOutput,
)
from mega_serve.engine.scheduler import EngineConfig
from tests.engine_fakes import (
    EOD,
    VOCAB,
    HashSampler,
    collect,
    decode,
    hidden_row,
    naive_output,
    new_request,
    open_engine,
    score,
)

Outputs = dict[tuple[str, int], list[SequenceOutput]]


def token_ids(outputs: Outputs, request_id: str, index: int = 0) -> list[int]:
    return [token_id for output in outputs[request_id, index] for token_id in output.token_ids]


def random_config(rng: random.Random) -> EngineConfig:
    seqs = rng.randint(1, 8)
    return EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.choice([0, 1, 3, 20]),
        max_prefill_chunk=rng.choice([None, 1, 3, 7]),
        prefix_caching=rng.random() < 0.8,
        speculative_tokens=rng.choice([0, 0, 1, 3]),
        min_ngram=1,
        max_ngram=2,
    )


def random_request(rng: random.Random, number: int, prefixes: list[list[int]]) -> EngineRequest:
    prompt = [*rng.choice(prefixes), *(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 6)))]
    values: dict[str, Any] = {
        "max_tokens": rng.choice([0, 1, 2, 5, 14]),
        "temperature": rng.choice([0.0, 1.0]),
        "seed": rng.randrange(3),
        "ignore_eos": rng.random() < 0.3,
        "min_tokens": rng.choice([0, 0, 0, 2]),
        "logprobs": rng.choice([None, 0]),
        "prompt_logprobs": rng.choice([None, None, 0]),
        "priority": rng.choice([0, 0, 0, 1, -1]),
        "cache_namespace": rng.choice(["", "", "key"]),
        "timeout": rng.choice([None] * 9 + [3.0]),
    }
    if rng.random() < 0.2:
        values["stop_token_ids"] = (rng.randrange(VOCAB),)
    if rng.random() < 0.2:
        values["stop_repeated_id"] = rng.randrange(VOCAB)
    if rng.random() < 0.2:
        values["stop"] = (decode([rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))]),)
    if rng.random() < 0.15:
        params = BeamSearchParams(
            max_tokens=max(1, values["max_tokens"]), width=rng.randint(1, 3), stop_token_id=EOD
        )
        return EngineRequest(
            request_id=str(number), prompt_token_ids=tuple(prompt), params=params, priority=values["priority"]
        )
    if rng.random() < 0.15:
        embedding = {"max_tokens": 0, "prompt_logprobs": None, "pooling": rng.choice(["last", "mean"])}
        return new_request(str(number), prompt, **values | embedding)
    return new_request(str(number), prompt, n=rng.choice([1, 1, 1, 2, 4]), **values)


def run_history(seed: int) -> None:
    """Add, abort and step at random; compare every answer with the naive loop."""
    rng = random.Random(seed)
    config = random_config(rng)
    page_size = rng.choice([1, 2, 4])
    engine = open_engine(
        config, num_pages=rng.choice([28, 32, 40, 60, 120]) // page_size, page_size=page_size, max_seq_len=30
    )
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))] for _ in range(3)]
    requests: dict[str, EngineRequest] = {}
    outputs: Outputs = {}
    aborted: set[str] = set()
    for number in range(rng.randint(1, 14)):
        request = random_request(rng, number, prefixes)
        try:
            engine.core.add(request)
        except RequestError:
            assert request.rows > config.max_num_seqs or isinstance(request.params, BeamSearchParams)
            continue
        requests[request.request_id] = request
        for _ in range(rng.choice([0, 0, 1, 4])):
            collect(outputs, engine.core.step())
            engine.check_pool()
            engine.clock.now += rng.random()
        if rng.random() < 0.1:
            request_id = rng.choice(list(requests))
            ended = engine.core.abort(request_id)
            aborted |= {output.request_id for output in ended}
            collect(outputs, ended)
            engine.check_pool()
    for _ in range(2000):
        if not engine.core.has_work:
            break
        collect(outputs, engine.core.step())
        engine.check_pool()
        engine.clock.now += 0.1
    assert not engine.core.has_work
    assert engine.core.pool.held_pages == 0
    assert engine.core.stats().waiting_tokens == engine.core.stats().waiting == 0
    for request in requests.values():
        for index in range(request.rows):
            check_answer(request, index, outputs, request.request_id in aborted)


def check_answer(request: EngineRequest, index: int, outputs: Outputs, was_aborted: bool) -> None:
    answer = outputs[request.request_id, index]
    reason = answer[-1].finish_reason
    assert reason in ("stop", "length", "abort", "timeout")
    if isinstance(request.params, BeamSearchParams):
        if reason in ("stop", "length"):
            assert [beam_of(request, index, outputs)] == naive_beams(request)[index : index + 1]
        return
    new = token_ids(outputs, request.request_id, index)
    expected = naive_output(request, index, 30)
    if reason in ("abort", "timeout"):
        assert was_aborted or request.timeout is not None
        assert new == expected[: len(new)]
        return
    assert new == expected
    assert "".join(output.text for output in answer) == text_of(new, answer[-1].stop_reason)
    prompt = list(request.prompt_token_ids)
    assert answer[-1].embedding == embedding_of(prompt, request.params.pooling)
    if request.params.logprobs is not None:
        logprobs = [logprob for output in answer for logprob in output.logprobs]
        assert logprobs == [score([*prompt, *new[:i]], new[i]) for i in range(len(new))]
    if request.params.prompt_logprobs is not None and index == 0:
        assert answer[0].prompt_logprobs == (
            None,
            *(score(prompt[:i], prompt[i]) for i in range(1, len(prompt))),
        )


def embedding_of(prompt: list[int], pooling: str | None) -> tuple[float, ...]:
    if pooling is None:
        return ()
    rows = [hidden_row(prompt[:count]) for count in range(1, len(prompt) + 1)]
    pooled = [rows[-1]] if pooling == "last" else rows
    return tuple(sum(column) / len(pooled) for column in zip(*pooled, strict=True))


def text_of(new: list[int], stop_reason: int | str | None) -> str:
    """The text of finished tokens, without the stop token or the stop string."""
    text = decode(new[:-1] if isinstance(stop_reason, int) else new)
    return text.removesuffix(stop_reason) if isinstance(stop_reason, str) else text


def beam_of(request: EngineRequest, index: int, outputs: Outputs) -> tuple[tuple[int, ...], float]:
    output = outputs[request.request_id, index][-1]
    assert output.score is not None
    return output.token_ids, output.score


def naive_beams(request: EngineRequest) -> list[tuple[tuple[int, ...], float]]:
    """Beam search by the definition, all beams recomputed from their tokens."""
    params = request.params
    assert isinstance(params, BeamSearchParams)
    prompt = request.prompt_token_ids
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[tuple[int, ...], float]] = []
    for new in range(1, min(params.max_tokens, 30 - len(prompt)) + 1):
        tops = HashSampler().top_logprobs(
            [(*prompt, *tokens) for _, tokens in beams], 2 * params.width, [None] * len(beams)
        )
        items = [
            (total + logprob, (*tokens, token))
            for (total, tokens), top in zip(beams, tops, strict=True)
            for token, logprob in top
        ]
        items.sort(key=lambda item: -item[0])
        beams = []
        for rank, (total, tokens) in enumerate(items[: 2 * params.width]):
            if tokens[-1] != params.stop_token_id:
                beams.append((total, tokens))
            elif rank < params.width:
                finished.append((tokens, total / new**params.length_penalty))
            if len(beams) == params.width:
                break
        finished.sort(key=lambda item: -item[1])
        del finished[params.width :]
        best = items[0][0] / new**params.length_penalty
        if len(finished) == params.width and finished[-1][1] >= best:
            return finished
    finished += [(tokens, total / len(tokens) ** params.length_penalty) for total, tokens in beams]
    return sorted(finished, key=lambda item: -item[1])[: params.width]


@pytest.mark.parametrize(
    "block", [*range(4), *(pytest.param(i, marks=pytest.mark.long) for i in range(4, 10))]
)
def test_random_histories_answer_every_request_as_the_naive_loop_does(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        try:
            run_history(seed)
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise


@pytest.mark.long
def test_many_more_random_histories_answer_every_request() -> None:
    for seed in range(10_000, 60_000):
        run_history(seed)
