"""What a request may say: Megatron's rules in Megatron's order, with and without its habits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mega_serve.api.megatron import BeamSearch, Refused, Sampling, parse

ONE = {"prompts": ["Hello"]}


def refusal(body: object, *, legacy: bool = False) -> tuple[str, str, int]:
    with pytest.raises(Refused) as caught:
        parse(body, legacy=legacy)
    return caught.value.param, caught.value.message, caught.value.legacy_status


# Every rule with a body that breaks it, in the order of the checks.
RULES: list[tuple[dict[str, Any], str, int]] = [
    ({}, "prompts argument required", 400),
    ({**ONE, "max_len": 1}, "max_len is no longer used.  Replace with tokens_to_generate", 400),
    ({**ONE, "sentences": []}, "sentences is no longer used.  Replace with prompts", 400),
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


@pytest.mark.parametrize(("body", "message", "status"), RULES, ids=[message for _, message, _ in RULES])
@pytest.mark.parametrize("legacy", [False, True])
def test_every_rule_has_megatrons_words_and_its_status(
    body: dict[str, Any], message: str, status: int, legacy: bool
) -> None:
    whole = body if status == 400 else {**ONE, **body}
    assert refusal(whole, legacy=legacy)[1:] == (message, status)


# Of the rules that can be broken together, so that which one is named shows the order.
TOGETHER = [
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


@pytest.mark.parametrize("first", range(len(TOGETHER)))
def test_the_first_broken_rule_is_the_one_named(first: int) -> None:
    body: dict[str, Any] = dict(ONE)
    for broken in reversed(TOGETHER[first:]):
        body |= broken
    assert refusal(body)[0] == next(iter(TOGETHER[first]))


def test_what_is_absent_has_megatrons_default() -> None:
    assert parse(ONE) == Sampling(
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
    assert parse({**ONE, "beam_width": 2}) == BeamSearch(
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
    body = {**ONE, name: True}
    assert parse(body, legacy=True) == parse({**ONE, name: 1}, legacy=True)
    assert refusal(body)[0] == name


@pytest.mark.parametrize(
    "name_and_needs", [("top_p", {}), ("top_p_decay", {"top_p": 0.5}), ("length_penalty", {})]
)
def test_one_is_a_fraction_except_to_legacy_clients(name_and_needs: tuple[str, dict[str, float]]) -> None:
    name, needs = name_and_needs
    body = {**ONE, **needs, name: 1}
    assert parse(body) == parse({**ONE, **needs, name: 1.0})
    assert refusal(body, legacy=True)[0] == name


@pytest.mark.parametrize("body", [None, 5, "x", [], ["prompts"], True])
def test_a_body_that_is_no_object_has_no_prompts(body: object) -> None:
    assert refusal(body) == ("prompts", "prompts argument required", 400)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), 1e308])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_p_decay", "top_p_bound", "length_penalty"])
@pytest.mark.parametrize("legacy", [False, True])
def test_no_fraction_outside_its_range_passes(name: str, value: float, legacy: bool) -> None:
    needs = {"top_p": 0.5} if name in ("top_p_decay", "top_p_bound") else {}
    assert refusal({**ONE, **needs, name: value}, legacy=legacy)[0] == name


@pytest.mark.parametrize("prompt", ["\ud800", "a\udfffb", "é\ud83d"])
def test_half_of_a_surrogate_pair_is_refused(prompt: str) -> None:
    param, message, status = refusal({"prompts": ["fine", prompt]}, legacy=True)
    assert (param, status) == ("prompts", 400)
    assert "surrogate" in message


@pytest.mark.parametrize("prompt", ["\0", "a\0b", "\U0001f600", "\uffff", "\r\n\t"])
def test_text_that_is_odd_but_text_passes_unchanged(prompt: str) -> None:
    assert parse({"prompts": [prompt]}).prompts == (prompt,)


def test_a_refusal_never_repeats_what_the_client_sent() -> None:
    for body, message, _ in RULES:
        assert "Hello" not in message, body
