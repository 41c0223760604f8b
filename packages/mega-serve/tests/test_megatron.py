"""Parsing of requests: Megatron's checks in Megatron's order, in legacy mode and without it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mega_serve.api.megatron import BadRequest, BeamSearchRequest, SamplingRequest, parse_request

MINIMAL = {"prompts": ["Hello"]}


def get_error(body: object, *, legacy: bool = False) -> tuple[str, str, int]:
    with pytest.raises(BadRequest) as caught:
        parse_request(body, legacy=legacy)
    return caught.value.param, caught.value.message, caught.value.legacy_status


# Every check with a body that fails it, in the order of the checks.
CHECKS: list[tuple[dict[str, Any], str, int]] = [
    ({}, "prompts argument required", 400),
    ({**MINIMAL, "max_len": 1}, "max_len is no longer used.  Replace with tokens_to_generate", 400),
    ({**MINIMAL, "sentences": []}, "sentences is no longer used.  Replace with prompts", 400),
    ({"prompts": "Hello"}, "prompts is not a list of strings", 400),
    ({"prompts": []}, "prompts is empty", 400),
    ({"prompts": ["x"] * 129}, "Maximum number of prompts is 128", 400),
    ({"prompts": ["x", 1]}, "prompts is not a list of strings", 400),
    ({"tokens_to_generate": "1"}, "tokens_to_generate must be an integer greater than 0", 200),
    ({"tokens_to_generate": -1}, "tokens_to_generate must be an integer greater than or equal to 0", 200),
    ({"logprobs": 1}, "logprobs must be a boolean value", 200),
    ({"tokens_to_generate": 0}, "tokens_to_generate=0 implies logprobs should be True", 200),
    ({"temperature": 0}, "temperature must be a positive number less than or equal to 100.0", 200),
    ({"temperature": True}, "temperature must be a positive number less than or equal to 100.0", 200),
    (
        {"top_k": 1.0},
        "top_k must be an integer equal to or greater than 0 and less than or equal to 1000",
        200,
    ),
    ({"top_k": 1001}, "top_k must be equal to or greater than 0 and less than or equal to 1000", 200),
    ({"top_p": "x"}, "top_p must be a positive float less than or equal to 1.0", 200),
    ({"top_p": 0.5, "top_k": 2}, "cannot set both top-k and top-p samplings.", 200),
    ({"top_p": 1.01}, "top_p must be less than or equal to 1.0", 200),
    (
        {"top_p": 0.5, "top_p_decay": "x"},
        "top_p_decay must be a positive float less than or equal to 1.0",
        200,
    ),
    ({"top_p_decay": 0.5}, "top_p_decay cannot be set without top_p", 200),
    ({"top_p": 0.5, "top_p_decay": 1.5}, "top_p_decay must be less than or equal to 1.0", 200),
    (
        {"top_p": 0.5, "top_p_bound": []},
        "top_p_bound must be a positive float less than or equal to top_p",
        200,
    ),
    ({"top_p_bound": 0.5}, "top_p_bound cannot be set without top_p", 200),
    ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound must be greater than 0 and less than top_p", 200),
    ({"top_p": 0.5, "top_p_bound": 0.0}, "top_p_bound must be greater than 0 and less than top_p", 200),
    ({"add_BOS": 0}, "add_BOS must be a boolean value", 200),
    ({"prompts": ["x", ""]}, "Empty prompts require add_BOS=true", 200),
    ({"stop_on_double_eol": 0}, "stop_on_double_eol must be a boolean value", 200),
    ({"stop_on_eol": None}, "stop_on_eol must be a boolean value", 200),
    ({"prevent_newline_after_colon": "x"}, "prevent_newline_after_colon must be a boolean value", 200),
    ({"random_seed": 1.0}, "random_seed must be integer", 200),
    ({"random_seed": -1}, "random_seed must be a positive integer", 200),
    ({"no_log": 1}, "no_log must be a boolean value", 200),
    ({"beam_width": 2.0}, "beam_width must be integer", 200),
    ({"beam_width": 0}, "beam_width must be an integer > 1", 200),
    ({"prompts": ["x", "y"], "beam_width": 2}, "When doing beam_search, batch size must be 1", 200),
    ({"stop_token": "x"}, "stop_token must be an integer", 200),
    ({"length_penalty": "x"}, "length_penalty must be a float", 200),
]


@pytest.mark.parametrize(("body", "message", "status"), CHECKS, ids=[message for _, message, _ in CHECKS])
@pytest.mark.parametrize("legacy", [False, True])
def test_every_error_has_megatrons_message_and_status(
    body: dict[str, Any], message: str, status: int, legacy: bool
) -> None:
    request = body if status == 400 else {**MINIMAL, **body}
    assert get_error(request, legacy=legacy)[1:] == (message, status)


# Errors that one body can have together; the one that is reported shows the order of the checks.
ERRORS_IN_ORDER = [
    {"tokens_to_generate": "x"},
    {"logprobs": "x"},
    {"temperature": "x"},
    {"top_k": "x"},
    {"top_p": "x"},
    {"top_p_decay": "x"},
    {"top_p_bound": "x"},
    {"add_BOS": "x"},
    {"stop_on_double_eol": "x"},
    {"stop_on_eol": "x"},
    {"prevent_newline_after_colon": "x"},
    {"random_seed": "x"},
    {"no_log": "x"},
    {"beam_width": "x"},
    {"stop_token": "x"},
    {"length_penalty": "x"},
]


@pytest.mark.parametrize("first", range(len(ERRORS_IN_ORDER)))
def test_the_first_error_in_megatrons_order_is_reported(first: int) -> None:
    body: dict[str, Any] = dict(MINIMAL)
    for error in reversed(ERRORS_IN_ORDER[first:]):
        body |= error
    assert get_error(body)[0] == next(iter(ERRORS_IN_ORDER[first]))


def test_an_absent_field_has_megatrons_default() -> None:
    assert parse_request(MINIMAL) == SamplingRequest(
        prompts=("Hello",),
        tokens_to_generate=64,
        logprobs=False,
        temperature=1.0,
        top_k=0,
        top_p=0.0,
        top_p_decay=0.0,
        top_p_bound=0.0,
        add_bos=False,
        stop_on_double_eol=False,
        stop_on_eol=False,
        prevent_newline_after_colon=False,
        random_seed=None,
        no_log=False,
    )


def test_a_beam_width_makes_a_beam_search() -> None:
    assert parse_request({**MINIMAL, "beam_width": 2}) == BeamSearchRequest(
        prompts=("Hello",),
        tokens_to_generate=64,
        beam_width=2,
        add_bos=False,
        stop_token=None,
        length_penalty=1.0,
        prevent_newline_after_colon=False,
        no_log=False,
    )


@pytest.mark.parametrize("name", ["tokens_to_generate", "random_seed", "stop_token", "beam_width"])
def test_true_is_a_whole_number_to_legacy_clients_only(name: str) -> None:
    body = {**MINIMAL, name: True}
    assert parse_request(body, legacy=True) == parse_request({**MINIMAL, name: 1}, legacy=True)
    assert get_error(body)[0] == name


@pytest.mark.parametrize(
    "name_and_fields", [("top_p", {}), ("top_p_decay", {"top_p": 0.5}), ("length_penalty", {})]
)
def test_one_is_a_fraction_except_to_legacy_clients(name_and_fields: tuple[str, dict[str, float]]) -> None:
    name, fields = name_and_fields
    body = {**MINIMAL, **fields, name: 1}
    assert parse_request(body) == parse_request({**MINIMAL, **fields, name: 1.0})
    assert get_error(body, legacy=True)[0] == name


@pytest.mark.parametrize("body", [None, 5, "x", [], ["prompts"], True])
def test_a_body_that_is_no_object_has_no_prompts(body: object) -> None:
    assert get_error(body) == ("prompts", "prompts argument required", 400)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), 1e308])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_p_decay", "top_p_bound", "length_penalty"])
@pytest.mark.parametrize("legacy", [False, True])
def test_no_fraction_outside_its_range_passes(name: str, value: float, legacy: bool) -> None:
    fields = {"top_p": 0.5} if name in ("top_p_decay", "top_p_bound") else {}
    assert get_error({**MINIMAL, **fields, name: value}, legacy=legacy)[0] == name


@pytest.mark.parametrize("prompt", ["\ud800", "a\udfffb", "é\ud83d"])
def test_half_of_a_surrogate_pair_is_refused(prompt: str) -> None:
    param, message, status = get_error({"prompts": ["fine", prompt]}, legacy=True)
    assert (param, status) == ("prompts", 400)
    assert "surrogate" in message


@pytest.mark.parametrize("prompt", ["\0", "a\0b", "\U0001f600", "\uffff", "\r\n\t"])
def test_text_that_is_odd_but_text_passes_unchanged(prompt: str) -> None:
    assert parse_request({"prompts": [prompt]}).prompts == (prompt,)


def test_a_refusal_never_repeats_what_the_client_sent() -> None:
    for body, message, _ in CHECKS:
        assert "Hello" not in message, body
