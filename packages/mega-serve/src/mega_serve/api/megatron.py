"""Parse the body of `PUT /api`: Megatron's fields, with its order of checks and its error messages.

Megatron's server answers most bad requests with status 200, accepts `true` as an integer and refuses `1`
where it expects 1.0, and ignores fields it does not know. `parse_request` does none of this;
`parse_request(..., legacy=True)` does all of it, for clients that depend on it. One difference remains: a
prompt that is not a string is refused, where Megatron's server crashes.

Fields beyond Megatron's are checked after all of Megatron's: `priority`, `cache_salt`, `structured_outputs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mega_schema.errors import RequestError
from mega_serve.api.bodies import printable, unknown_field_message

MAX_PROMPTS = 128
MAX_TOP_K = 1000
MAX_TEMPERATURE = 100.0
# a score is a sum divided by length ** penalty, which overflows far outside this range
MAX_LENGTH_PENALTY = 50.0
MAX_BEAM_WIDTH = 32
MAX_PRIORITY = 2**31 - 1
MAX_SALT_CHARS = 256
FIELDS = (
    "prompts",
    "tokens_to_generate",
    "logprobs",
    "temperature",
    "top_k",
    "top_p",
    "top_p_decay",
    "top_p_bound",
    "add_BOS",
    "stop_on_double_eol",
    "stop_on_eol",
    "prevent_newline_after_colon",
    "random_seed",
    "no_log",
    "beam_width",
    "stop_token",
    "length_penalty",
    "priority",
    "cache_salt",
    "structured_outputs",
)

Code = Literal[
    "missing",
    "invalid_type",
    "invalid_value",
    "unsupported",
    "unknown_parameter",
    "context_length_exceeded",
]


class BadRequest(RequestError):
    """A request that the server refuses.

    Args:
        param: the field with the error.
        message: the text that the client receives; Megatron's if Megatron checks the same.
        legacy_status: the HTTP status of Megatron's server for this error.
        code: the kind of error, for programs.
        detail: the text of the OpenAI object, if it says more than Megatron's.
    """

    def __init__(
        self,
        param: str,
        message: str,
        *,
        legacy_status: int = 200,
        code: Code = "invalid_value",
        detail: str | None = None,
    ) -> None:
        super().__init__(param, message)
        self.param = param
        self.message = message
        self.legacy_status = legacy_status
        self.code = code
        self.detail = message if detail is None else detail


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Prompts to continue by sampling; with tokens_to_generate=0, prompts to score.

    Attributes:
        random_seed: None gives a different sample every time.
        priority: a smaller number is served first.
        cache_salt: requests of another salt do not share cached prefixes.
        structured_outputs: vLLM's constraint on the text, unchecked.
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
    priority: int = 0
    cache_salt: str = ""
    structured_outputs: Mapping[str, object] | None = None


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
    priority: int = 0
    cache_salt: str = ""


GenerationRequest = SamplingRequest | BeamSearchRequest


def parse_request(
    body: object, *, legacy: bool = False, lenient: bool = False, max_beam_width: int = MAX_BEAM_WIDTH
) -> GenerationRequest:
    """Parse and check a request.

    Args:
        body: the decoded JSON.
        legacy: accept and refuse the types that Megatron accepts and refuses.
        lenient: ignore unknown fields.

    Raises:
        BadRequest: the first of Megatron's checks, in its order, that the body fails.
    """
    fields = _FieldReader(body if isinstance(body, Mapping) else {}, legacy)
    prompts = _parse_prompts(fields)
    new_tokens = _parse_new_tokens(fields)
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
    beam_width, stop_token, length_penalty = _parse_beam_search(fields, prompts, max_beam_width)
    priority, cache_salt, structured_outputs = _parse_extensions(fields)
    if not (legacy or lenient):
        _refuse_unknown(fields)
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
            priority=priority,
            cache_salt=cache_salt,
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
        priority=priority,
        cache_salt=cache_salt,
        structured_outputs=structured_outputs,
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


def _parse_new_tokens(fields: _FieldReader) -> int:
    name = "tokens_to_generate"
    new_tokens = fields.integer(name, 64, f"{name} must be an integer greater than 0")
    _require(new_tokens >= 0, name, f"{name} must be an integer greater than or equal to 0")
    return new_tokens


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
    fields: _FieldReader, prompts: tuple[str, ...], max_width: int
) -> tuple[int | None, int | None, float]:
    """Return beam_width, stop_token and length_penalty; the last two are checked in every request."""
    beam_width = fields.optional_integer("beam_width", "beam_width must be integer")
    if beam_width is not None:
        _require(beam_width >= 1, "beam_width", "beam_width must be an integer > 1")
        _require(len(prompts) == 1, "beam_width", "When doing beam_search, batch size must be 1")
        limit = f"beam_width must be less than or equal to {max_width}"
        _require(beam_width <= max_width, "beam_width", limit)
    stop_token = fields.optional_integer("stop_token", "stop_token must be an integer")
    length_penalty = fields.real("length_penalty", 1.0, "length_penalty must be a float")
    _require(
        abs(length_penalty) <= MAX_LENGTH_PENALTY,
        "length_penalty",
        f"length_penalty must be between {-MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}",
    )
    return beam_width, stop_token, float(length_penalty)


def _parse_extensions(fields: _FieldReader) -> tuple[int, str, Mapping[str, object] | None]:
    """Return priority, cache_salt and structured_outputs."""
    priority_range = f"priority must be an integer between {-MAX_PRIORITY} and {MAX_PRIORITY}"
    priority = fields.integer("priority", 0, priority_range)
    _require(-MAX_PRIORITY <= priority <= MAX_PRIORITY, "priority", priority_range)
    cache_salt = fields.body.get("cache_salt", "")
    salt_range = f"cache_salt must be a string of at most {MAX_SALT_CHARS} characters"
    if not isinstance(cache_salt, str):
        raise BadRequest("cache_salt", salt_range, code="invalid_type")
    is_text = cache_salt.encode("utf-8", "replace").decode() == cache_salt
    _require(len(cache_salt) <= MAX_SALT_CHARS and is_text, "cache_salt", salt_range)
    outputs = fields.body.get("structured_outputs")
    if outputs is not None and not isinstance(outputs, Mapping):
        raise BadRequest("structured_outputs", "structured_outputs must be an object", code="invalid_type")
    if outputs is not None and "beam_width" in fields:
        message = "structured_outputs cannot be set with beam_width"
        raise BadRequest("structured_outputs", message, code="unsupported")
    return priority, cache_salt, outputs


def _refuse_unknown(fields: _FieldReader) -> None:
    name = next((name for name in fields.body if name not in FIELDS), None)
    if name is not None:
        message = unknown_field_message(name, list(FIELDS))
        raise BadRequest(printable(name), message, code="unknown_parameter")


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise BadRequest(param, message)
