"""The rules of the engine core one by one: what ends a sequence, who is served first, what is shared."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from mega_schema.errors import ConfigError, RequestError
from mega_serve.engine.interfaces import Chunk, RunnerOutput, SampledToken, SamplingRow
from mega_serve.engine.requests import (
    BeamSearchParams,
    EngineRequest,
    EngineStats,
    GrammarSpec,
    RequestTimes,
    SequenceOutput,
)
from mega_serve.engine.scheduler import EngineConfig
from tests.engine_fakes import (
    EOD,
    VOCAB,
    HashSampler,
    collect,
    naive_output,
    new_request,
    next_token,
    open_engine,
    score,
)

PROMPT = [1, 2, 3, 4, 5, 6]


class ScriptedSampler(HashSampler):
    """Samples the tokens of a script by position in the output, whatever the logits."""

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__()
        self.script = script

    def _sample_row(self, context: tuple[int, ...], row: SamplingRow) -> SampledToken:
        return SampledToken(self.script[len(row.output_token_ids)])


def run_script(script: Sequence[int], prompt: Sequence[int] = PROMPT, **values: Any) -> SequenceOutput:
    """Return all that one scripted sequence gained."""
    engine = open_engine()
    engine.core._sampler = ScriptedSampler(script)
    engine.core.add(new_request("a", prompt, **values))
    outputs = engine.finish_all()["a", 0]
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    return SequenceOutput(
        request_id="a",
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=outputs[-1].finish_reason,
        stop_reason=outputs[-1].stop_reason,
        error=outputs[-1].error,
    )


@pytest.mark.parametrize(
    ("values", "tokens", "text", "finish_reason", "stop_reason"),
    [
        ({}, (1, 2, 2, EOD), "bcc", "stop", EOD),
        ({"ignore_eos": True}, (1, 2, 2, EOD, 4, 5), "bccaef", "length", None),
        ({"max_tokens": 2}, (1, 2), "bc", "length", None),
        ({"stop_token_ids": (7, 2)}, (1, 2), "b", "stop", 2),
        ({"stop_token_ids": (7, 2), "include_stop_str_in_output": True}, (1, 2), "bc", "stop", 2),
        ({"stop_repeated_id": 2}, (1, 2, 2), "bc", "stop", 2),
        ({"stop": ("cc",)}, (1, 2, 2), "b", "stop", "cc"),
        ({"stop": ("cc",), "include_stop_str_in_output": True}, (1, 2, 2), "bcc", "stop", "cc"),
        ({"stop": ("cx",)}, (1, 2, 2, EOD), "bcc", "stop", EOD),
        ({"stop": ("bx",), "max_tokens": 1}, (1,), "b", "length", None),
        ({"stop_token_ids": (2,), "min_tokens": 2}, (1, 2, 2), "bc", "stop", 2),
        ({"stop": ("c",), "min_tokens": 2}, (1, 2, 2), "bc", "stop", "c"),
    ],
)
def test_a_sequence_ends_where_its_rule_says(
    values: dict[str, Any], tokens: tuple[int, ...], text: str, finish_reason: str, stop_reason: object
) -> None:
    output = run_script([1, 2, 2, EOD, 4, 5], **{"max_tokens": 6, **values})
    assert (output.token_ids, output.text) == (tokens, text)
    assert (output.finish_reason, output.stop_reason) == (finish_reason, stop_reason)


def test_a_repeated_stop_id_counts_the_last_token_of_the_prompt() -> None:
    assert run_script([6, 1], stop_repeated_id=6).token_ids == (6,)


def test_a_sequence_ends_at_the_length_of_the_context() -> None:
    output = run_script([1] * 99, prompt=[1] * 60, max_tokens=99)
    assert len(output.token_ids) == 4
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1] * 64}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"prompt": [1] * 40, "max_tokens": 2}, "max_tokens"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(values: dict[str, Any], where: str) -> None:
    engine = open_engine(num_pages=10)
    with pytest.raises(RequestError) as error:
        engine.core.add(new_request("a", **{"prompt": PROMPT, **values}))
    assert error.value.where == where
    assert not engine.core.has_work


def test_a_request_that_fills_the_whole_cache_is_served() -> None:
    engine = open_engine(num_pages=10)
    engine.core.add(new_request("small", PROMPT, max_tokens=9, ignore_eos=True))
    engine.core.add(new_request("a", [1] * 40, max_tokens=1))
    assert engine.finish_all()["a", 0][-1].finish_reason is not None


@pytest.mark.parametrize("width", [0, 9])
def test_beams_that_do_not_fit_into_a_batch_are_refused(width: int) -> None:
    engine = open_engine()
    params = BeamSearchParams(max_tokens=2, width=width)
    with pytest.raises(RequestError, match="beam_width"):
        engine.core.add(EngineRequest(request_id="a", prompt_token_ids=(1,), params=params))


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = open_engine()
    engine.core.add(new_request("a", PROMPT))
    with pytest.raises(RequestError, match="request_id"):
        engine.core.add(new_request("a", PROMPT))
    engine.finish_all()
    engine.core.add(new_request("a", PROMPT))


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": 4, "max_num_batched_tokens": 3},
        {"max_prefill_chunk": 0},
        {"speculative_tokens": -1},
        {"min_ngram": 3, "max_ngram": 2},
        {"min_ngram": 0},
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**values)  # type: ignore[arg-type]


def test_a_step_decodes_everybody_before_it_prefills() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=4, max_num_batched_tokens=8))
    engine.core.add(new_request("a", PROMPT, max_tokens=20, ignore_eos=True))
    engine.core.step()
    engine.core.add(new_request("long", [1] * 40, max_tokens=1))
    outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
    for steps in range(1, 7):
        collect(outputs, engine.core.step())
        assert len(outputs["a", 0]) == steps
    assert engine.runner.steps[1:7] == [8, 8, 8, 8, 8, 6]
    assert len(outputs["long", 0]) == 1


def test_requests_are_served_by_priority_and_then_by_arrival() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=1, max_num_batched_tokens=16))
    for request_id, priority in [("c", 1), ("d", 1), ("a", -1), ("b", 0)]:
        engine.core.add(new_request(request_id, PROMPT, priority=priority, max_tokens=2, ignore_eos=True))
    assert [request_id for request_id, _ in engine.finish_all()] == ["a", "b", "c", "d"]


def test_the_least_important_sequence_is_preempted_and_loses_no_token() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=4, max_num_batched_tokens=32), num_pages=8)
    requests = [
        new_request(name, [number] * 6, max_tokens=20, ignore_eos=True, priority=priority)
        for number, (name, priority) in enumerate([("low", 5), ("high", 0)], 1)
    ]
    for request in requests:
        engine.core.add(request)
    outputs = engine.finish_all()
    assert engine.core.stats().preemptions > 0
    assert list(outputs)[0] == ("high", 0)
    for request in requests:
        new = [token_id for output in outputs[request.request_id, 0] for token_id in output.token_ids]
        assert new == naive_output(request, 0)
    last = {request_id: outputs[request_id, 0][-1] for request_id in ("low", "high")}
    assert len(outputs["high", 0]) == 20
    assert last["low"].finish_reason == "length"


def test_an_abort_frees_the_pages_at_once_in_every_state() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=2, max_num_batched_tokens=4, prefix_caching=False))
    for name in ("prefilling", "waiting"):
        engine.core.add(new_request(name, [1] * 20, n=2))
    engine.core.step()
    assert engine.core.pool.held_pages > 0
    for name in ("waiting", "prefilling"):
        outputs = engine.core.abort(name)
        assert [(output.index, output.finish_reason) for output in outputs] == [(0, "abort"), (1, "abort")]
    assert engine.core.pool.held_pages == 0
    assert engine.core.abort("waiting") == []
    assert not engine.core.has_work


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=1, max_num_batched_tokens=16))
    for name, timeout in [("running", 5.0), ("waiting", 4.0), ("patient", None)]:
        engine.core.add(new_request(name, PROMPT, timeout=timeout, max_tokens=40, ignore_eos=True))
    engine.clock.now = 3.9
    assert all(output.finish_reason is None for output in engine.core.step())
    engine.clock.now = 4.0
    ended = {output.request_id: output.finish_reason for output in engine.core.step()}
    assert ended == {"running": None, "waiting": "timeout"}
    engine.clock.now = 5.0
    assert {o.request_id: o.finish_reason for o in engine.core.step()} == {
        "running": "timeout",
        "patient": None,
    }


def test_the_last_output_says_where_the_time_went() -> None:
    config = EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=16, max_prefill_chunk=3, prefix_caching=False
    )
    engine = open_engine(config)
    for name, values in [("a", {}), ("scored", {"max_tokens": 0, "prompt_logprobs": 0}), ("cut", {})]:
        engine.core.add(new_request(name, PROMPT, **{"max_tokens": 2, "ignore_eos": True, **values}))
    params = BeamSearchParams(max_tokens=2, width=1)
    engine.core.add(EngineRequest(request_id="beam", prompt_token_ids=(1, 2), params=params, priority=1))
    ended = {}
    for now in (1.0, 2.0, 4.0, 5.0, 7.0, 8.0, 9.0, 10.0, 13.0):
        engine.clock.now = now
        outputs = [*engine.core.step(), *(engine.core.abort("cut") if now == 8.0 else ())]
        assert all(output.times is None for output in outputs if output.finish_reason is None)
        ended |= {output.request_id: output.times for output in outputs if output.finish_reason}
    assert ended == {
        "a": RequestTimes(queue=1.0, prefill=1.0, decode=2.0),
        "scored": RequestTimes(queue=5.0, prefill=2.0, decode=0.0),
        "cut": None,
        "beam": RequestTimes(queue=9.0, prefill=1.0, decode=3.0),
    }


def test_text_that_was_held_back_comes_with_the_last_output() -> None:
    engine = open_engine()
    engine.core._sampler = ScriptedSampler([1, 2, 3])
    engine.core.add(new_request("a", PROMPT, stop=("bcx",)))
    assert [output.text for _ in range(2) for output in engine.core.step()] == ["", ""]
    assert engine.core.abort("a")[0].text == "bc"


def test_sequences_of_one_prompt_share_its_prefill() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))
    request = new_request("a", [3] * 22, n=4, temperature=1.0, ignore_eos=True, max_tokens=6)
    engine.core.add(request)
    outputs = engine.finish_all()
    # then each of the three forks computes the last token of the prompt again
    assert engine.runner.steps[:3] == [22, 4, 4]
    assert engine.runner.copied_pages == 3
    for index in range(4):
        new = [token_id for output in outputs["a", index] for token_id in output.token_ids]
        assert new == naive_output(request, index)
    assert len({outputs["a", index][0].token_ids for index in range(4)}) > 1


def test_a_shared_prefix_is_computed_once_and_reported() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))
    prompt = [*range(1, 11), *range(1, 11)]
    for name in ("cold", "warm"):
        engine.core.add(new_request(name, prompt, max_tokens=1))
        outputs = engine.finish_all()
        assert outputs[name, 0][0].cached_tokens == {"cold": 0, "warm": 16}[name]
    assert engine.runner.steps == [20, 4]
    engine.core.add(new_request("other key", prompt, max_tokens=1, cache_namespace="k"))
    assert engine.finish_all()["other key", 0][0].cached_tokens == 0
    stats = engine.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (60, 16)


def test_the_next_turn_of_a_conversation_finds_the_generated_tokens() -> None:
    engine = open_engine()
    engine.core.add(new_request("a", PROMPT, max_tokens=12, ignore_eos=True))
    outputs = engine.finish_all()["a", 0]
    history = PROMPT + [token_id for output in outputs for token_id in output.token_ids]
    engine.core.add(new_request("b", [*history, 1, 2], max_tokens=1))
    assert engine.finish_all()["b", 0][0].cached_tokens == 16  # of the 17 that have keys and values


def test_prompt_logprobs_are_computed_in_spite_of_a_cached_prefix() -> None:
    engine = open_engine()
    for name in ("cold", "warm"):
        engine.core.add(new_request(name, PROMPT, max_tokens=0, prompt_logprobs=0))
        (output,) = engine.finish_all()[name, 0]
        assert output.prompt_logprobs == (None, *(score(PROMPT[:i], PROMPT[i]) for i in range(1, 6)))
        assert (output.token_ids, output.finish_reason, output.cached_tokens) == ((), "length", 0)


def test_top_p_decays_with_every_token_down_to_its_bound_speculated_or_not() -> None:
    for speculative_tokens in (0, 3):
        engine = open_engine(
            EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, speculative_tokens=speculative_tokens)
        )
        engine.core._sampler = sampler = DecayChecker()
        values = {"top_p": 0.8, "top_p_decay": 0.5, "top_p_bound": 0.3}
        engine.core.add(new_request("a", [1] * 9, max_tokens=9, **values))
        engine.finish_all()
        assert sampler.rows >= 9


def test_accepted_drafts_are_not_computed_again() -> None:
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, speculative_tokens=3)
    engine = open_engine(config)
    engine.core._sampler = ScriptedSampler([1] * 9)
    engine.core.add(new_request("a", [1] * 9, max_tokens=9))
    outputs = engine.finish_all()["a", 0]
    assert [len(output.token_ids) for output in outputs] == [1, 4, 4]
    assert engine.runner.steps == [9, 4, 4]


class DecayChecker(ScriptedSampler):
    def __init__(self) -> None:
        super().__init__([1] * 99)
        self.rows = 0

    def _sample_row(self, context: tuple[int, ...], row: SamplingRow) -> SampledToken:
        self.rows += 1
        assert row.top_p == max(0.3, 0.8 * 0.5 ** len(row.output_token_ids))
        return super()._sample_row(context, row)


class LengthGrammar:
    """Allows three tokens; the number 9 is an error."""

    def __init__(self) -> None:
        self.tokens = 0

    @property
    def is_finished(self) -> bool:
        return self.tokens == 3

    def accept(self, token_id: int) -> None:
        if token_id == 9:
            raise ValueError("9 is not allowed\nhere")
        self.tokens += 1


def run_grammar(script: Sequence[int], factory: Any, sampler: Any = None) -> dict[str, SequenceOutput]:
    engine = open_engine(grammar_factory=factory)
    engine.core._sampler = sampler or ScriptedSampler(script)
    engine.core.add(new_request("grammar", PROMPT, grammar=GrammarSpec(kind="json_object"), n=2))
    engine.core.add(new_request("plain", PROMPT, max_tokens=4))
    outputs = engine.finish_all()
    assert outputs["plain", 0][-1].finish_reason == "length"
    return {f"{request_id} {index}": rows[-1] for (request_id, index), rows in outputs.items()}


def test_a_finished_grammar_ends_its_sequence() -> None:
    outputs = run_grammar([1, 2, 3, 4, 5], lambda spec: LengthGrammar())
    assert outputs["grammar 0"].finish_reason == outputs["grammar 1"].finish_reason == "stop"
    assert outputs["grammar 1"].text == "d"


def test_an_error_of_a_grammar_ends_its_sequence_and_no_other() -> None:
    outputs = run_grammar([1, 9, 3, 4, 5], lambda spec: LengthGrammar())
    assert outputs["grammar 0"].finish_reason == "error"
    assert outputs["grammar 0"].error == "ValueError: 9 is not allowed"


def test_an_error_that_the_sampler_reports_ends_its_sequence_and_no_other() -> None:
    class FaultySampler(ScriptedSampler):
        def _sample_row(self, context: tuple[int, ...], row: SamplingRow) -> SampledToken:
            token = super()._sample_row(context, row)
            return (
                SampledToken(0, error="no token is allowed") if row.grammar and row.sequence_index else token
            )

    outputs = run_grammar([], lambda spec: LengthGrammar(), FaultySampler([1, 2, 3, 4]))
    assert outputs["grammar 0"].finish_reason == "stop"
    assert outputs["grammar 1"].error == "no token is allowed"


@pytest.mark.parametrize("factory", [None, lambda spec: 1 / 0])
def test_a_grammar_that_does_not_compile_ends_its_request_with_an_error(factory: Any) -> None:
    outputs = run_grammar([1, 2, 3, 4], factory)
    assert outputs["grammar 0"].finish_reason == outputs["grammar 1"].finish_reason == "error"
    assert outputs["grammar 0"].error


def test_new_weights_recompute_the_context_and_keep_the_tokens() -> None:
    engine = open_engine()
    requests = [new_request(name, PROMPT, max_tokens=10, ignore_eos=True) for name in ("a", "b")]
    for request in requests:
        engine.core.add(request)
    outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
    for _ in range(4):
        collect(outputs, engine.core.step())
    engine.sampler.weights = 1
    for page in engine.runner.pages:
        page[:] = [None] * len(page)  # keys and values of the old weights may not be read
    engine.core.swap(7)
    engine.check_pool()
    for key, rows in engine.finish_all().items():
        outputs[key] += rows
    assert engine.core.stats().iteration == 7
    for request in requests:
        context = list(PROMPT)
        weights = [0] * 4 + [1] * 6
        for weight in weights:
            context.append(next_token(context, request.params, 0, 5, weight))  # type: ignore[arg-type]
        new = [token_id for output in outputs[request.request_id, 0] for token_id in output.token_ids]
        assert new == context[len(PROMPT) :]


def test_random_swaps_leave_no_request_without_an_answer() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        engine = open_engine(
            EngineConfig(max_num_seqs=3, max_num_batched_tokens=5), num_pages=12, page_size=2
        )
        for number in range(6):
            beams = BeamSearchParams(max_tokens=4, width=2, stop_token_id=EOD)
            prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 9)))
            if rng.random() < 0.3:
                engine.core.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=beams))
            else:
                engine.core.add(new_request(str(number), prompt, n=2, prompt_logprobs=0))
        outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
        for step in range(500):
            collect(outputs, engine.core.step())
            engine.check_pool()
            if rng.random() < 0.2 and step < 50:
                for page in engine.runner.pages:
                    page[:] = [None] * len(page)
                engine.core.swap(step)
        assert not engine.core.has_work
        assert all(rows[-1].finish_reason is not None for rows in outputs.values())
        assert len(outputs) == 12


def test_the_work_of_a_step_does_not_grow_with_the_queue() -> None:
    def count_calls(queue: int) -> int:
        engine = open_engine(EngineConfig(max_num_seqs=2, max_num_batched_tokens=16))
        for number in range(queue):
            timeout = 100.0 + number
            engine.core.add(new_request(str(number), PROMPT, max_tokens=30, ignore_eos=True, timeout=timeout))
        engine.core.step()
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            for _ in range(8):
                engine.core.step()
        finally:
            sys.setprofile(None)
        return calls

    assert count_calls(400) <= count_calls(4) * 1.05


def test_stats_count_the_load() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=1, max_num_batched_tokens=16))
    for name in ("a", "b"):
        engine.core.add(new_request(name, PROMPT, max_tokens=4, ignore_eos=True))
    assert engine.core.stats().waiting_tokens == 20
    engine.clock.now = 2.0
    engine.core.step()
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (1, 1, 10)
    assert stats.kv_usage == 2 / 64
    assert (stats.prompt_tokens, stats.generation_tokens) == (6, 1)
    assert (stats.tokens_per_second, stats.last_step) == (0.5, 2.0)
    engine.finish_all()
    engine.clock.now = 30.0
    engine.core.step()
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens, stats.kv_usage) == (0, 0, 0, 0.0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (12, 8)
    assert (stats.tokens_per_second, stats.last_step) == (0.0, 30.0)


def test_stats_count_the_tokens_of_every_step() -> None:
    engine = open_engine(EngineConfig(max_num_seqs=1, max_num_batched_tokens=16))
    assert (sum(engine.core.stats().step_counts), engine.core.stats().step_tokens) == (0, 0)
    engine.core.add(new_request("a", PROMPT, max_tokens=4, ignore_eos=True))
    engine.finish_all()
    engine.core.step()  # without work: no step of the model
    stats = engine.core.stats()
    # the prompt of 6, then three tokens one by one
    assert (stats.step_counts[:3], sum(stats.step_counts), stats.step_tokens) == ((3, 1, 0), 4, 9)
    assert EngineStats.from_json(orjson.loads(orjson.dumps(stats))) == stats


def test_an_error_of_the_runner_passes_through() -> None:
    engine = open_engine()

    def fail(chunks: Sequence[Chunk]) -> RunnerOutput:
        raise RuntimeError("the device is lost")

    engine.core._runner.run = fail  # type: ignore[method-assign]
    engine.core.add(new_request("a", PROMPT))
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.core.step()


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_the_scores_of_a_prompt_come_before_the_outputs_of_its_other_sequences(max_tokens: int) -> None:
    """A stream sends the echoed prompt and its scores with the first output of each sequence."""
    engine = open_engine()
    engine.core.add(
        new_request("a", [1, 2, 3], n=3, max_tokens=max_tokens, temperature=1.0, prompt_logprobs=0)
    )
    outputs = []
    while engine.core.has_work:
        outputs += engine.core.step()
    assert {output.index for output in outputs} == {0, 1, 2}
    assert outputs[0].index == 0
    assert len(outputs[0].prompt_logprobs) == 3
