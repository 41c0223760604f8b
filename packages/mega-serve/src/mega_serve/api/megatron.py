"""The body of `PUT /api`: Megatron's fields, checked in Megatron's order, refused in Megatron's words.

Megatron's server has habits that surprise (it answers 200 to most mistakes, takes `true` for a whole number
and refuses `1` where it wants 1.0). `parse` has none of them; `parse(..., legacy=True)` has them all, for
clients that were written around them. One is not kept: a prompt that is no string is refused, not a crash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mega_schema.errors import RequestError

MOST_PROMPTS = 128
MOST_TOP_K = 1000
HOTTEST = 100.0
# a score is a sum over length ** penalty; far outside this range that power is no number
STEEPEST_PENALTY = 50.0

Code = Literal["missing", "invalid_type", "invalid_value", "unsupported", "context_length_exceeded"]


class Refused(RequestError):
    """A request that is not answered, in the words a client may look for.

    Args:
        param: the field that is wrong.
        message: the whole text the client gets; Megatron's where Megatron has one.
        legacy_status: the HTTP status Megatron's server gives this mistake.
        code: the kind of mistake, one word for programs.
    """

    def __init__(
        self, param: str, message: str, *, legacy_status: int = 200, code: Code = "invalid_value"
    ) -> None:
        super().__init__(param, message)
        self.param, self.message, self.legacy_status, self.code = param, message, legacy_status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Prompts to continue, or with no tokens to generate: to score.

    Attributes:
        random_seed: None draws differently every time.
    """

    prompts: tuple[str, ...]
    tokens_to_generate: int
    logprobs: bool
    temperature: float
    top_k: int
    top_p: float
    top_p_decay: float
    top_p_bound: float
    add_bos: bool
    stop_on_double_eol: bool
    stop_on_eol: bool
    prevent_newline_after_colon: bool
    random_seed: int | None
    no_log: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """A prompt whose best continuations are wanted.

    Attributes:
        stop_token: the id that ends a continuation; None is the tokenizer's end of document.
    """

    prompts: tuple[str]
    tokens_to_generate: int
    beam_width: int
    add_bos: bool
    stop_token: int | None
    length_penalty: float
    prevent_newline_after_colon: bool
    no_log: bool


def parse(body: object, *, legacy: bool = False) -> Sampling | BeamSearch:
    """What a request asks for.

    Args:
        body: the decoded JSON.
        legacy: take and refuse the types that Megatron takes and refuses.

    Raises:
        Refused: the first rule, in Megatron's order, that the body breaks.
    """
    fields = _Fields(body if isinstance(body, Mapping) else {}, legacy)
    prompts = _prompts(fields)
    new = fields.integer("tokens_to_generate", 64, "tokens_to_generate must be an integer greater than 0")
    _demand(
        new >= 0,
        "tokens_to_generate",
        "tokens_to_generate must be an integer greater than or equal to 0",
    )
    logprobs = fields.boolean("logprobs")
    _demand(new > 0 or logprobs, "logprobs", "tokens_to_generate=0 implies logprobs should be True")
    cold_or_hot = "temperature must be a positive number less than or equal to 100.0"
    temperature = fields.number("temperature", 1.0, cold_or_hot)
    _demand(0.0 < temperature <= HOTTEST, "temperature", cold_or_hot)
    top_k, top_p, top_p_decay, top_p_bound = _filters(fields)
    add_bos = fields.boolean("add_BOS")
    _demand(add_bos or all(prompts), "prompts", "Empty prompts require add_BOS=true")
    stop_on_double_eol = fields.boolean("stop_on_double_eol")
    stop_on_eol = fields.boolean("stop_on_eol")
    prevent_newline_after_colon = fields.boolean("prevent_newline_after_colon")
    random_seed = fields.optional_integer("random_seed", "random_seed must be integer")
    _demand(random_seed is None or random_seed >= 0, "random_seed", "random_seed must be a positive integer")
    no_log = fields.boolean("no_log")
    beam_width, stop_token, length_penalty = _beams(fields, prompts)
    if beam_width is not None:
        return BeamSearch(
            prompts=(prompts[0],),
            tokens_to_generate=new,
            beam_width=beam_width,
            add_bos=add_bos,
            stop_token=stop_token,
            length_penalty=length_penalty,
            prevent_newline_after_colon=prevent_newline_after_colon,
            no_log=no_log,
        )
    return Sampling(
        prompts=prompts,
        tokens_to_generate=new,
        logprobs=logprobs,
        temperature=float(temperature),
        top_k=top_k,
        top_p=top_p,
        top_p_decay=top_p_decay,
        top_p_bound=top_p_bound,
        add_bos=add_bos,
        stop_on_double_eol=stop_on_double_eol,
        stop_on_eol=stop_on_eol,
        prevent_newline_after_colon=prevent_newline_after_colon,
        random_seed=random_seed,
        no_log=no_log,
    )


class _Fields:
    """Typed look-ups in a body; what is absent has its default, and null is not absent."""

    def __init__(self, body: Mapping[str, object], legacy: bool) -> None:
        self.body, self.legacy = body, legacy

    def __contains__(self, name: str) -> bool:
        return name in self.body

    def boolean(self, name: str) -> bool:
        value = self.body.get(name, False)
        if not isinstance(value, bool):
            raise Refused(name, f"{name} must be a boolean value", code="invalid_type")
        return value

    def integer(self, name: str, default: int, message: str) -> int:
        """A whole number; to legacy clients `true` is 1."""
        value = self.body.get(name, default)
        if not isinstance(value, int) or (isinstance(value, bool) and not self.legacy):
            raise Refused(name, message, code="invalid_type")
        return int(value)

    def optional_integer(self, name: str, message: str) -> int | None:
        return self.integer(name, 0, message) if name in self.body else None

    def number(self, name: str, default: float, message: str) -> float:
        """A whole number or a fraction, never `true`."""
        value = self.body.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refused(name, message, code="invalid_type")
        return value

    def real(self, name: str, default: float, message: str) -> float:
        """A number with a value; legacy clients have to write its decimal point."""
        value = self.number(name, default, message)
        if (self.legacy and not isinstance(value, float)) or value != value or value in (math.inf, -math.inf):
            raise Refused(name, message, code="invalid_type")
        return value


def _prompts(fields: _Fields) -> tuple[str, ...]:
    """The six checks that Megatron answers with status 400."""
    if "prompts" not in fields:
        raise Refused("prompts", "prompts argument required", legacy_status=400, code="missing")
    for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
        if old in fields:
            message = f"{old} is no longer used.  Replace with {new}"
            raise Refused(old, message, legacy_status=400, code="unsupported")
    prompts = fields.body["prompts"]
    not_strings = Refused(
        "prompts", "prompts is not a list of strings", legacy_status=400, code="invalid_type"
    )
    if not isinstance(prompts, list):
        raise not_strings
    if not prompts:
        raise Refused("prompts", "prompts is empty", legacy_status=400)
    if len(prompts) > MOST_PROMPTS:
        raise Refused("prompts", f"Maximum number of prompts is {MOST_PROMPTS}", legacy_status=400)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise not_strings
    if any("\ud800" <= char <= "\udfff" for prompt in prompts if not prompt.isascii() for char in prompt):
        # JSON can write one half of a surrogate pair; no encoding can
        raise Refused("prompts", "prompts has half of a surrogate pair, which is no text", legacy_status=400)
    return tuple(prompts)


def _filters(fields: _Fields) -> tuple[int, float, float, float]:
    """top_k, top_p, top_p_decay, top_p_bound."""
    top_k = fields.body.get("top_k", 0)
    span = "equal to or greater than 0 and less than or equal to 1000"
    if not isinstance(top_k, int) or isinstance(top_k, bool):
        raise Refused("top_k", f"top_k must be an integer {span}", code="invalid_type")
    _demand(0 <= top_k <= MOST_TOP_K, "top_k", f"top_k must be {span}")
    top_p = fields.real("top_p", 0.0, "top_p must be a positive float less than or equal to 1.0")
    _demand(not (top_p > 0 and top_k > 0), "top_p", "cannot set both top-k and top-p samplings.")
    _demand(0 <= top_p <= 1, "top_p", "top_p must be less than or equal to 1.0")
    values = [top_p]
    for name, most in (("top_p_decay", "1.0"), ("top_p_bound", "top_p")):
        message = f"{name} must be a positive float less than or equal to {most}"
        values.append(fields.real(name, 0.0, message))
        _demand(name not in fields or top_p != 0, name, f"{name} cannot be set without top_p")
        if name == "top_p_decay":
            _demand(0 <= values[-1] <= 1, name, "top_p_decay must be less than or equal to 1.0")
        else:
            within = name not in fields or 0 < values[-1] <= top_p
            _demand(within, name, "top_p_bound must be greater than 0 and less than top_p")
    top_p, decay, bound = map(float, values)
    return top_k, top_p, decay, bound


def _beams(fields: _Fields, prompts: tuple[str, ...]) -> tuple[int | None, int | None, float]:
    """beam_width, stop_token, length_penalty; the last two are checked even where no beams are asked for."""
    beam_width = fields.optional_integer("beam_width", "beam_width must be integer")
    if beam_width is not None:
        _demand(beam_width >= 1, "beam_width", "beam_width must be an integer > 1")
        _demand(len(prompts) == 1, "beam_width", "When doing beam_search, batch size must be 1")
    stop_token = fields.optional_integer("stop_token", "stop_token must be an integer")
    length_penalty = fields.real("length_penalty", 1.0, "length_penalty must be a float")
    _demand(
        abs(length_penalty) <= STEEPEST_PENALTY,
        "length_penalty",
        f"length_penalty must be between {-STEEPEST_PENALTY} and {STEEPEST_PENALTY}",
    )
    return beam_width, stop_token, float(length_penalty)


def _demand(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise Refused(param, message)
