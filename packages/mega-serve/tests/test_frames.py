"""Frames between the HTTP process and the engine process."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mega_serve.engine.requests import (
    BeamSearchParams,
    EngineRequest,
    GrammarSpec,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
)
from mega_serve.process.frames import FrameDecoder, FrameError, encode_frame

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text("abc"), values, max_size=4),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(st.lists(JSON, max_size=6), st.integers(0, 2**32))
def test_values_survive_any_cut_of_the_stream(values: list[object], seed: int) -> None:
    stream = b"".join(map(encode_frame, values))
    rng = random.Random(seed)
    decoder = FrameDecoder()
    received = []
    while stream:
        size = rng.randint(1, 12)
        received += decoder.feed(stream[:size])
        stream = stream[size:]
    assert received == values
    assert decoder.pending_bytes == 0


def test_a_length_above_the_limit_is_refused_before_the_frame_arrives() -> None:
    with pytest.raises(FrameError, match="above the limit of 10"):
        FrameDecoder(max_bytes=10).feed(b"\x00\x00\x00\x0b")


def test_a_body_that_is_not_json_is_refused() -> None:
    with pytest.raises(FrameError, match="not JSON"):
        FrameDecoder().feed(b"\x00\x00\x00\x02\x80\x04")


@pytest.mark.parametrize("value", ["\ud800", object(), 2**70])
def test_a_value_that_is_not_json_cannot_be_sent(value: object) -> None:
    with pytest.raises(FrameError, match="cannot be sent"):
        encode_frame(value)


@pytest.mark.parametrize(
    "request_",
    [
        EngineRequest(
            request_id="a",
            prompt_token_ids=(1, 2),
            params=SamplingParams(
                max_tokens=3,
                logit_bias=((1, 0.5),),
                bad_words=((1, 2), (3,)),
                banned_bigram=(4, 5),
                seed=2**63 - 1,
                grammar=GrammarSpec(kind="regex", text="a+"),
            ),
            n=2,
            cache_namespace="key",
        ),
        EngineRequest(
            request_id="b", prompt_token_ids=(), params=BeamSearchParams(max_tokens=3, width=2), timeout=1.5
        ),
    ],
)
def test_a_request_is_the_same_on_the_other_side(request_: EngineRequest) -> None:
    assert EngineRequest.from_json(FrameDecoder().feed(encode_frame(request_))[0]) == request_


def test_an_output_is_the_same_on_the_other_side() -> None:
    output = SequenceOutput(
        request_id="a",
        token_ids=(1,),
        text="é",
        logprobs=(TokenLogprob(1, -0.5, 1, ((1, -0.5), (2, -0.75))),),
        prompt_logprobs=(None, TokenLogprob(2, -1.0)),
        finish_reason="stop",
        stop_reason="\n",
    )
    assert SequenceOutput.from_json(FrameDecoder().feed(encode_frame(output))[0]) == output
