"""Parse the body of `PUT /api`: Megatron's fields, with its order of checks and its error messages.

Megatron's server answers most bad requests with status 200, accepts `true` as an integer and refuses `1`
where it expects 1.0. `parse_request` does none of this; `parse_request(..., legacy=True)` does all of it, for
clients that depend on it. One difference remains: a prompt that is not a string is refused, where Megatron's
server crashes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mega_schema.errors import RequestError

MAX_PROMPTS = 128
MAX_TOP_K = 1000
MAX_TEMPERATURE = 100.0
# a score is a sum divided by length ** penalty, which overflows far outside this range
MAX_LENGTH_PENALTY = 50.0

Code = Literal["missing", "invalid_type", "invalid_value", "unsupported", "context_length_exceeded"]


class BadRequest(RequestError):
    """A request that the server refuses.

    Args:
        param: the field with the error.
        message: the text that the client receives; Megatron's if Megatron checks the same.
        legacy_status: the HTTP status of Megatron's server for this error.
        code: the kind of error, for programs.
    """

    def __init__(
        self, param: str, message: str, *, legacy_status: int = 200, code: Code = "invalid_value"
    ) -> None:
        super().__init__(param, message)
        self.param = param
        self.message = message
        self.legacy_status = legacy_status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Prompts to continue by sampling; with tokens_to_generate=0, prompts to score.

    Attributes:
        random_seed: None gives a different sample every time.
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
class BeamSearchRequest:
    """A prompt to continue by beam search.

    Attributes:
        stop_token: the id that ends a continuation; None is the tokenizer's end-of-document token.
    """

    prompts: tuple[str]
    tokens_to_generate: int
    beam_width: int
    add_bos: bool
    stop_token: int | None
    length_penalty: float
    prevent_newline_after_colon: bool
    no_log: bool


GenerationRequest = SamplingRequest | BeamSearchRequest


def parse_request(body: object, *, legacy: bool = False) -> GenerationRequest:
    """Parse and check a request.

    Args:
        body: the decoded JSON.
        legacy: accept and refuse the types that Megatron accepts and refuses.

    Raises:
        BadRequest: the first of Megatron's checks, in its order, that the body fails.
    """
    fields = _FieldReader(body if isinstance(body, Mapping) else {}, legacy)
    prompts = _parse_prompts(fields)
    new_tokens = fields.integer(
        "tokens_to_generate", 64, "tokens_to_generate must be an integer greater than 0"
    )
    _require(
        new_tokens >= 0,
        "tokens_to_generate",
        "tokens_to_generate must be an integer greater than or equal to 0",
    )
    logprobs = fields.boolean("logprobs")
    _require(new_tokens > 0 or logprobs, "logprobs", "tokens_to_generate=0 implies logprobs should be True")
    temperature_range = "temperature must be a positive number less than or equal to 100.0"
    temperature = fields.number("temperature", 1.0, temperature_range)
    _require(0.0 < temperature <= MAX_TEMPERATURE, "temperature", temperature_range)
    top_k, top_p, top_p_decay, top_p_bound = _parse_filters(fields)
    add_bos = fields.boolean("add_BOS")
    _require(add_bos or all(prompts), "prompts", "Empty prompts require add_BOS=true")
    stop_on_double_eol = fields.boolean("stop_on_double_eol")
    stop_on_eol = fields.boolean("stop_on_eol")
    prevent_newline_after_colon = fields.boolean("prevent_newline_after_colon")
    random_seed = fields.optional_integer("random_seed", "random_seed must be integer")
    _require(random_seed is None or random_seed >= 0, "random_seed", "random_seed must be a positive integer")
    no_log = fields.boolean("no_log")
    beam_width, stop_token, length_penalty = _parse_beam_search(fields, prompts)
    if beam_width is not None:
        return BeamSearchRequest(
            prompts=(prompts[0],),
            tokens_to_generate=new_tokens,
            beam_width=beam_width,
            add_bos=add_bos,
            stop_token=stop_token,
            length_penalty=length_penalty,
            prevent_newline_after_colon=prevent_newline_after_colon,
            no_log=no_log,
        )
    return SamplingRequest(
        prompts=prompts,
        tokens_to_generate=new_tokens,
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


class _FieldReader:
    """Typed access to the fields of a body. An absent field has its default; null is a value."""

    def __init__(self, body: Mapping[str, object], legacy: bool) -> None:
        self.body = body
        self.legacy = legacy

    def __contains__(self, name: str) -> bool:
        return name in self.body

    def boolean(self, name: str) -> bool:
        """Read true or false."""
        value = self.body.get(name, False)
        if not isinstance(value, bool):
            raise BadRequest(name, f"{name} must be a boolean value", code="invalid_type")
        return value

    def integer(self, name: str, default: int, message: str) -> int:
        """Read an integer; in legacy mode `true` is 1."""
        value = self.body.get(name, default)
        if not isinstance(value, int) or (isinstance(value, bool) and not self.legacy):
            raise BadRequest(name, message, code="invalid_type")
        return int(value)

    def optional_integer(self, name: str, message: str) -> int | None:
        """Read an integer, or None if the field is absent."""
        return self.integer(name, 0, message) if name in self.body else None

    def number(self, name: str, default: float, message: str) -> float:
        """Read an integer or a float, but not `true`."""
        value = self.body.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(name, message, code="invalid_type")
        return value

    def real(self, name: str, default: float, message: str) -> float:
        """Read a finite number; in legacy mode it must have a decimal point."""
        value = self.number(name, default, message)
        if (self.legacy and not isinstance(value, float)) or value != value or value in (math.inf, -math.inf):
            raise BadRequest(name, message, code="invalid_type")
        return value


def _parse_prompts(fields: _FieldReader) -> tuple[str, ...]:
    """Check the prompts; Megatron answers these six errors with status 400."""
    if "prompts" not in fields:
        raise BadRequest("prompts", "prompts argument required", legacy_status=400, code="missing")
    for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
        if old in fields:
            message = f"{old} is no longer used.  Replace with {new}"
            raise BadRequest(old, message, legacy_status=400, code="unsupported")
    prompts = fields.body["prompts"]
    not_strings = BadRequest(
        "prompts", "prompts is not a list of strings", legacy_status=400, code="invalid_type"
    )
    if not isinstance(prompts, list):
        raise not_strings
    if not prompts:
        raise BadRequest("prompts", "prompts is empty", legacy_status=400)
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest("prompts", f"Maximum number of prompts is {MAX_PROMPTS}", legacy_status=400)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise not_strings
    if any("\ud800" <= char <= "\udfff" for prompt in prompts if not prompt.isascii() for char in prompt):
        # JSON can express a lone surrogate, which no encoding can
        raise BadRequest(
            "prompts", "prompts has half of a surrogate pair, which is not text", legacy_status=400
        )
    return tuple(prompts)


def _parse_filters(fields: _FieldReader) -> tuple[int, float, float, float]:
    """Return top_k, top_p, top_p_decay and top_p_bound."""
    top_k = fields.body.get("top_k", 0)
    bounds = "equal to or greater than 0 and less than or equal to 1000"
    if not isinstance(top_k, int) or isinstance(top_k, bool):
        raise BadRequest("top_k", f"top_k must be an integer {bounds}", code="invalid_type")
    _require(0 <= top_k <= MAX_TOP_K, "top_k", f"top_k must be {bounds}")
    top_p = fields.real("top_p", 0.0, "top_p must be a positive float less than or equal to 1.0")
    _require(not (top_p > 0 and top_k > 0), "top_p", "cannot set both top-k and top-p samplings.")
    _require(0 <= top_p <= 1, "top_p", "top_p must be less than or equal to 1.0")
    values = [top_p]
    for name, upper_bound in (("top_p_decay", "1.0"), ("top_p_bound", "top_p")):
        message = f"{name} must be a positive float less than or equal to {upper_bound}"
        values.append(fields.real(name, 0.0, message))
        _require(name not in fields or top_p != 0, name, f"{name} cannot be set without top_p")
        if name == "top_p_decay":
            _require(0 <= values[-1] <= 1, name, "top_p_decay must be less than or equal to 1.0")
        else:
            in_range = name not in fields or 0 < values[-1] <= top_p
            _require(in_range, name, "top_p_bound must be greater than 0 and less than top_p")
    top_p, decay, bound = map(float, values)
    return top_k, top_p, decay, bound


def _parse_beam_search(
    fields: _FieldReader, prompts: tuple[str, ...]
) -> tuple[int | None, int | None, float]:
    """Return beam_width, stop_token and length_penalty; the last two are checked in every request."""
    beam_width = fields.optional_integer("beam_width", "beam_width must be integer")
    if beam_width is not None:
        _require(beam_width >= 1, "beam_width", "beam_width must be an integer > 1")
        _require(len(prompts) == 1, "beam_width", "When doing beam_search, batch size must be 1")
    stop_token = fields.optional_integer("stop_token", "stop_token must be an integer")
    length_penalty = fields.real("length_penalty", 1.0, "length_penalty must be a float")
    _require(
        abs(length_penalty) <= MAX_LENGTH_PENALTY,
        "length_penalty",
        f"length_penalty must be between {-MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}",
    )
    return beam_width, stop_token, float(length_penalty)


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise BadRequest(param, message)
