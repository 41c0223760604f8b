"""The load generator: arrivals, metrics and workloads by themselves, runs in virtual time."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_schema.errors import ConfigError, FormatError
from mega_serve.client.bench.arrivals import RampUp, sample_arrivals
from mega_serve.client.bench.latency_metrics import (
    RequestResult,
    concurrency_steps,
    metric_values,
    output_rates,
    peak_concurrency,
    peak_output_rate,
    percentile_key,
    summarize,
)
from mega_serve.client.bench.load import LoadRun, RequestSettings, request_body, run_load
from mega_serve.client.bench.workload import (
    WORDS,
    Prompt,
    PromptWriter,
    RandomLengths,
    prefix_repetition_prompts,
    random_prompts,
    read_custom_prompts,
    read_sharegpt_prompts,
    repeat_prompts,
)

PROMPT = Prompt("a", 1, 3)


def arrivals(
    count: int, rate: float = 10.0, burstiness: float = 1.0, seed: int = 0, **more: Any
) -> list[float]:
    generator = np.random.default_rng(seed)
    return sample_arrivals(
        count, rate=rate, burstiness=burstiness, ramp_up=more.get("ramp_up"), generator=generator
    )


def test_requests_at_an_infinite_rate_start_at_once() -> None:
    assert arrivals(5, math.inf) == [0.0] * 5


def test_arrivals_ascend_end_at_count_over_rate_and_repeat_with_the_seed() -> None:
    for seed in range(200):
        times = arrivals(50, 10.0, 0.5, seed)
        assert times == sorted(times)
        assert times[-1] == pytest.approx(5.0)
        assert times == arrivals(50, 10.0, 0.5, seed)
    assert arrivals(50, seed=1) != arrivals(50, seed=2)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_variance_of_a_gamma_distribution(burstiness: float) -> None:
    intervals = np.diff(arrivals(100_000, 10.0, burstiness))
    # of a gamma distribution: variance / mean² = 1 / shape; a Poisson process has 1
    assert intervals.var() / intervals.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.05)


def test_infinite_burstiness_is_a_constant_interval() -> None:
    assert np.diff(arrivals(11, 10.0, math.inf)) == pytest.approx([0.1] * 10)


def test_a_ramp_up_changes_the_rate_between_its_ends() -> None:
    linear, exponential = RampUp("linear", 1, 9), RampUp("exponential", 1, 9)
    assert [linear.rate_at(x) for x in (0, 0.5, 1)] == [1, 5, 9]
    assert [exponential.rate_at(x) for x in (0, 0.5, 1)] == pytest.approx([1, 3, 9])
    intervals = np.diff(arrivals(101, math.inf, math.inf, ramp_up=linear))
    assert intervals[0] == pytest.approx(1 / 1.08)
    assert intervals[-1] == pytest.approx(1 / 9)


def result(start: float, ttft: float, itls: Sequence[float], tokens: int, **more: Any) -> RequestResult:
    return RequestResult(
        prompt_tokens=10,
        output_tokens=tokens,
        start_time=start,
        ttft=ttft,
        itls=list(itls),
        latency=ttft + sum(itls),
        **more,
    )


RESULTS = [
    result(100.0, 0.1, [0.02, 0.04], 3, queue_time=0.5),
    result(100.5, 0.3, [0.06], 4, queue_time=1.5),  # two chunks of two tokens
    result(101.0, 0.2, [], 1),
    RequestResult(prompt_tokens=10, start_time=101.5, error="refused"),
]


def test_figures_have_the_names_and_definitions_of_vllm() -> None:
    summary = summarize(
        RESULTS,
        4.0,
        metrics=("ttft", "tpot", "itl", "e2el"),
        percentiles=(50, 99),
        goodput={"ttft": 250, "tpot": 25},
    )
    assert (summary["completed"], summary["failed"]) == (3, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 8)
    assert summary["request_throughput"] == 0.75
    assert summary["output_throughput"] == 2.0
    assert summary["total_token_throughput"] == 9.5
    assert summary["mean_ttft_ms"] == pytest.approx(200)
    assert summary["median_ttft_ms"] == pytest.approx(200)
    assert summary["std_ttft_ms"] == pytest.approx(np.std([100, 300, 200]))
    assert summary["p99_ttft_ms"] == pytest.approx(298)
    # (160 - 100) / 2 and (360 - 300) / 3; one token has none
    assert summary["mean_tpot_ms"] == pytest.approx((30 + 20) / 2)
    assert summary["mean_itl_ms"] == pytest.approx((20 + 40 + 60) / 3)
    assert summary["p50_itl_ms"] == pytest.approx(40)
    assert summary["mean_e2el_ms"] == pytest.approx((160 + 360 + 200) / 3)
    # the first one's TPOT is 30, the second one's TTFT 300
    assert summary["request_goodput"] == pytest.approx(1 / 4)
    assert summary["output_lens"] == [3, 4, 1, 0]
    assert summary["input_lens"] == [10] * 4
    assert summary["errors"] == ["", "", "", "refused"]
    assert summary["ttfts"] == [0.1, 0.3, 0.2, None]
    assert summary["itls"] == [[0.02, 0.04], [0.06], [], []]


def test_nothing_completed_means_no_figures_and_no_warning() -> None:
    summary = summarize(RESULTS[3:], 1.0, metrics=("ttft",), percentiles=(99.9,), goodput={})
    assert summary["mean_ttft_ms"] is None
    assert summary["p99.9_ttft_ms"] is None
    assert summary["max_concurrent_requests"] == 0
    assert summary["request_goodput"] is None


def test_an_answer_without_stream_has_a_latency_only() -> None:
    whole = RequestResult(prompt_tokens=1, output_tokens=5, start_time=1.0, latency=2.5)
    assert metric_values("ttft", [whole]) == metric_values("tpot", [whole]) == []
    assert metric_values("e2el", [whole]) == [2.5]
    assert output_rates([whole]) == [0, 0, 5]
    assert summarize([whole], 1.0, metrics=(), percentiles=(), goodput={"ttft": 1e9})["request_goodput"] == 0


def test_percentiles_are_named_as_in_vllm() -> None:
    assert [percentile_key(p) for p in (99.0, 99.9, 50)] == ["p99", "p99.9", "p50"]


def test_peaks_are_those_of_a_brute_force_count() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        results = [
            result(float(rng.integers(0, 8)), float(rng.integers(1, 5)), [1.0] * int(rng.integers(0, 4)), 6)
            for _ in range(rng.integers(1, 12))
        ]
        running = [
            sum(item.start_time <= moment < item.start_time + item.latency for item in results)
            for moment in range(30)
        ]
        assert peak_concurrency(results) == max(running)
        assert concurrency_steps(results)[-1][1] == 0
        assert sum(output_rates(results)) == pytest.approx(6 * len(results))
        assert peak_output_rate(results) >= 6 * len(results) / len(output_rates(results)) - 1e-9


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever nothing else is to do."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.moment = 0.0

    def time(self) -> float:
        return self.moment


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self.loop.moment += timeout or 0.0
        return super().select(0)


def run_virtually(work: Callable[[VirtualTimeLoop], Awaitable[LoadRun]]) -> LoadRun:
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(work(loop))  # type: ignore[arg-type]
    finally:
        loop.close()


def measure(
    count: int, times: Sequence[float], limit: int | None, service: float = 1.0
) -> tuple[LoadRun, list[float]]:
    """Run requests that take `service` seconds each; return the run and the times of sending."""
    sent: list[float] = []

    async def work(loop: VirtualTimeLoop) -> LoadRun:
        async def send(prompt: Prompt) -> RequestResult:
            sent.append(loop.time())
            start = loop.time()
            await asyncio.sleep(service)
            return RequestResult(
                prompt_tokens=1, output_tokens=1, start_time=start, latency=loop.time() - start
            )

        return await run_load([PROMPT] * count, times, send, max_concurrency=limit, now=loop.time)

    return run_virtually(work), sent


def test_requests_are_sent_at_their_arrival_times() -> None:
    times = [0.0, 0.25, 0.25, 3.0]
    run, sent = measure(4, times, None)
    assert sent == pytest.approx(times)
    assert run.duration == pytest.approx(4.0)
    assert [item.queue_time for item in run.results] == [0.0] * 4
    assert run.max_send_lag == pytest.approx(0)


def test_a_closed_loop_runs_as_many_requests_as_allowed() -> None:
    run, sent = measure(10, [0.0] * 10, 4)
    assert sent == pytest.approx([0] * 4 + [1] * 4 + [2] * 2)
    assert run.duration == pytest.approx(3.0)
    assert peak_concurrency(run.results) == 4
    assert [item.queue_time for item in run.results] == pytest.approx(sent)


def test_the_latency_does_not_count_the_wait_in_the_client() -> None:
    run, _ = measure(3, [0.0] * 3, 1, service=2.0)
    assert metric_values("e2el", run.results) == pytest.approx([2.0] * 3)
    assert metric_values("client_queue_time", run.results) == pytest.approx([0.0, 2.0, 4.0])


def test_an_open_loop_follows_the_rate_whatever_the_server_does() -> None:
    times = arrivals(200, 20.0)
    run, sent = measure(200, times, None, service=30.0)
    assert sent == pytest.approx(times)
    assert run.duration == pytest.approx(times[-1] + 30)


def test_bodies_are_those_of_the_three_backends() -> None:
    settings = RequestSettings("openai", "/v1/completions", {"model": "m", "ignore_eos": True})
    assert request_body(settings, Prompt([1, 2], 2, 5)) == {
        "prompt": [1, 2],
        "max_tokens": 5,
        "model": "m",
        "ignore_eos": True,
    }
    chat = request_body(replace(settings, backend="openai-chat"), PROMPT)
    assert chat["messages"] == [{"role": "user", "content": "a"}]
    assert chat["max_completion_tokens"] == 3
    assert request_body(RequestSettings("megatron", "/api", {"top_k": 1}), PROMPT) == {
        "prompts": ["a"],
        "tokens_to_generate": 3,
        "top_k": 1,
    }


@dataclass
class PairTokenizer:
    """A tokenizer of letters in which two equal letters in a row are one token."""

    vocab_size: int = 52
    special_ids: frozenset[int] = frozenset({0})

    async def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            is_pair = text[:1] == text[1:2]
            ids.append(ord(text[0]) - ord("a") + 26 * is_pair)
            text = text[1 + is_pair :]
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i % 26) * (1 + i // 26) for i in ids)


def writer(takes_ids: bool, *, seed: int = 0, tokenizer: PairTokenizer | None = None) -> PromptWriter:
    return PromptWriter(tokenizer, takes_ids, np.random.default_rng(seed))


def random_workload(source: PromptWriter, lengths: RandomLengths, prefix: int = 0) -> list[Prompt]:
    async def collect() -> list[Prompt]:
        return [prompt async for prompt in random_prompts(source, 50, lengths, prefix)]

    return asyncio.run(collect())


def test_random_lengths_fill_the_range_around_the_mean() -> None:
    pairs = RandomLengths(10, 3, 0.5).sample(2000, np.random.default_rng(0))
    assert {length for length, _ in pairs} == set(range(5, 16))
    assert {length for _, length in pairs} == set(range(1, 6))
    assert set(RandomLengths(10, 1, 0.0).sample(9, np.random.default_rng(0))) == {(10, 1)}


def test_random_prompts_of_ids_have_the_length_a_shared_prefix_and_no_special_id() -> None:
    source = writer(True, tokenizer=PairTokenizer())
    prompts = random_workload(source, RandomLengths(20, 5, 0.5), prefix=4)
    assert source.form == "token ids"
    assert len({tuple(prompt.content[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt.content) for prompt in prompts}) == 50
    for prompt in prompts:
        assert prompt.tokens == len(prompt.content)
        assert 14 <= len(prompt.content) <= 34
        assert all(isinstance(token, int) and 0 < token < 52 for token in prompt.content)
    assert prompts == random_workload(writer(True, tokenizer=PairTokenizer()), RandomLengths(20, 5, 0.5), 4)


def test_random_prompts_of_text_are_counted_by_the_tokenizer() -> None:
    tokenizer = PairTokenizer()
    prompts = random_workload(writer(False, tokenizer=tokenizer), RandomLengths(20, 5, 0.0))
    assert all(isinstance(prompt.content, str) for prompt in prompts)
    counts = [len(asyncio.run(tokenizer.encode(str(prompt.content)))) for prompt in prompts]
    assert counts == [prompt.tokens for prompt in prompts]
    assert counts.count(20) >= 48


def test_without_a_tokenizer_the_prompts_are_words() -> None:
    source = writer(True)
    prompts = random_workload(source, RandomLengths(20, 5, 0.0))
    assert source.form == "words"
    assert all(set(str(prompt.content).split()) <= set(WORDS) for prompt in prompts)
    assert {len(str(prompt.content).split()) for prompt in prompts} == {20}
    assert prompts[0].tokens is None


def test_repeated_prefixes_have_equally_many_prompts() -> None:
    source = writer(True, tokenizer=PairTokenizer())
    settings: dict[str, int] = {"prefix_tokens": 8, "suffix_tokens": 3, "prefixes": 4, "output_tokens": 2}
    prompts = asyncio.run(prefix_repetition_prompts(source, 22, **settings))
    prefixes = [tuple(prompt.content[:8]) for prompt in prompts]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [5] * 4
    assert prefixes != sorted(prefixes)
    with pytest.raises(ConfigError, match="less than --prefix-repetition-num-prefixes: found 3, wanted 4"):
        asyncio.run(prefix_repetition_prompts(source, 3, **settings))


def test_custom_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b", "output_tokens": 7}\n')
    assert read_custom_prompts(file, 9) == [Prompt("a", None, 9), Prompt("b", None, 7)]
    for line, words in (
        ("[1]", ":1: has no text"),
        ("{", ":1: is not JSON: wanted {.prompt.: "),
        ('{"prompt": "a", "output_tokens": 0}', ":1: output_tokens: found 0"),
        ("", "has no prompts: wanted {.prompt.: .*} on each line"),
    ):
        file.write_text(line)
        with pytest.raises(FormatError, match=words):
            read_custom_prompts(file, 9)


def test_conversations_give_the_prompt_and_the_output_length(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    turns = ["abcdef", "ghijk", "ab", "abcdef", "a" * 3000, "abcdefg", "abcdefgh", "ab"]
    rows = [
        {"conversations": [{"value": a}, {"value": b}]} for a, b in zip(turns[::2], turns[1::2], strict=True)
    ]
    file.write_text(__import__("json").dumps([*rows, {}, {"conversations": [{}]}]))

    def read(output_tokens: int | None, tokenizer: PairTokenizer | None) -> list[Prompt]:
        return asyncio.run(read_sharegpt_prompts(file, 9, output_tokens, tokenizer, range))

    assert read(None, PairTokenizer()) == [Prompt("abcdef", 6, 5)]
    assert read(3, PairTokenizer()) == [Prompt("abcdef", 6, 3), Prompt("abcdefgh", 8, 3)]
    assert len(read(3, None)) == 4
    with pytest.raises(ConfigError, match="needs /tokenize"):
        read(None, None)
    file.write_text('{"a": 1}')
    with pytest.raises(FormatError, match="not a list of conversations"):
        read(3, None)


def test_too_few_prompts_are_repeated_unless_refused() -> None:
    prompts = [Prompt(name, None, 1) for name in "abc"]
    rng = np.random.default_rng(0)
    assert repeat_prompts(prompts, 2, rng, shuffle=False, oversample=True) == prompts[:2]
    assert repeat_prompts(prompts, 9, rng, shuffle=False, oversample=False) == prompts
    repeated = repeat_prompts(prompts, 9, rng, shuffle=True, oversample=True)
    assert len(repeated) == 9
    assert set(map(id, repeated)) == set(map(id, prompts))
