"""The fields of OpenAI's requests that choose tokens, with vLLM's additions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from mega_schema.errors import RequestError
from mega_serve.api.bodies import Body, name_field
from mega_serve.api.context import ApiContext
from mega_serve.api.megatron import MAX_PRIORITY
from mega_serve.engine.json_whitespace import without_blanks
from mega_serve.engine.requests import GrammarKind, GrammarSpec, SamplingParams
from mega_serve.engine.structural_tags import MAX_CHARS, MAX_STRUCTURES, MAX_TRIGGERS
from mega_serve.http.errors import HttpError

MAX_INT32 = 2**31 - 1
# field of structured_outputs -> kind
_GRAMMAR_KINDS: Final[Mapping[str, GrammarKind]] = MappingProxyType(
    {
        "json": "json_schema",
        "regex": "regex",
        "choice": "choice",
        "grammar": "lark",
        "json_object": "json_object",
        "structural_tag": "structural_tag",
    }
)

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenCount = Annotated[int, Field(ge=0, le=MAX_INT32)]
TruncatedTokens = Annotated[
    int,
    Field(ge=-1, le=MAX_INT32, description="Keep only the last tokens of a prompt; -1: as many as fit."),
]
SkipSpecialTokens = Annotated[
    bool,
    Field(
        description="true: the text has no special tokens; false: it has all; "
        "by default all but end-of-document, beginning and padding at its end."
    ),
]
ShortText = Annotated[str, Field(max_length=256)]


def real(low: float, high: float) -> Any:
    """Return the field of an optional finite number from `low` to `high`."""
    return Field(None, ge=low, le=high, allow_inf_nan=False)


class JsonSchemaFormat(Body):
    """OpenAI's `json_schema`."""

    name: Annotated[str, Field(max_length=256)]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TagStructure(Body):
    """A structure in a text: JSON between two texts."""

    begin: Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="By default any JSON value."
    )
    end: Annotated[str, Field(max_length=MAX_CHARS)]


TagStructures = Annotated[list[TagStructure], Field(min_length=1, max_length=MAX_STRUCTURES)]
TagTriggers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]],
    Field(min_length=1, max_length=MAX_TRIGGERS),
]


TagFormat = Annotated[
    dict[str, Any], Field(description="xgrammar's triggered_tags, instead of structures and triggers.")
]


class ResponseFormat(Body):
    """OpenAI's `response_format`, with vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: TagStructures | None = None
    triggers: TagTriggers | None = None
    format: TagFormat | None = None

    def grammar(self) -> GrammarSpec | None:
        """Return the constraint; None for text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return GrammarSpec(kind="json_object", param="response_format")
        if self.type == "structural_tag":
            return self._structural_tag()
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise RequestError("response_format.json_schema.schema", "missing", wanted="a JSON schema")
        param = "response_format.json_schema.schema"
        return GrammarSpec(kind="json_schema", text=json.dumps(self.json_schema.schema_), param=param)

    def _structural_tag(self) -> GrammarSpec:
        for name in ("structures", "triggers"):
            if getattr(self, name) is None and self.format is None:
                raise RequestError(f"response_format.{name}", "missing", wanted="a list")
        names = {"structures", "triggers", "format"}
        fields = self.model_dump(include=names, by_alias=True, exclude_none=True)
        return GrammarSpec(kind="structural_tag", text=json.dumps(fields), param="response_format")


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of its fields."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = Field(None, description="a Lark grammar")
    json_object: Literal[True] | None = None
    structural_tag: dict[str, Any] | str | None = Field(
        None, description="structures and triggers, or their JSON text"
    )

    disable_any_whitespace: bool | None = Field(
        None, description="of json and json_object: nothing between the tokens of JSON"
    )

    def specs(self) -> list[GrammarSpec]:
        """Return the constraints of the fields that are given.

        Raises:
            RequestError: `disable_any_whitespace` without JSON.
        """
        constraints = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object,
            "structural_tag": self.structural_tag,
        }
        specs = _specs("structured_outputs.", constraints)
        return list(map(_without_blanks, specs)) if self.disable_any_whitespace else specs


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class RequestFields(Body):
    """The fields that all of OpenAI's requests share. An absent field and null are the same."""

    model: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = Field(
        None, description="Requests with a lower number run first."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Only requests with the same salt share cached prefixes."
    )
    user: Annotated[str, Field(max_length=1024)] | None = None


class SamplingFields(RequestFields):
    """The fields that completions and chat completions share."""

    temperature: float | None = real(0, 100)
    top_p: float | None = real(0, 1)
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: float | None = real(0, 1)
    repetition_penalty: float | None = real(0.01, 100)
    presence_penalty: float | None = real(-2, 2)
    frequency_penalty: float | None = real(-2, 2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: list[ShortText] | None = None
    stop: str | list[str] | None = Field(default=None, description="Texts that end the generation.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: SkipSpecialTokens | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    return_token_ids: bool | None = None
    ignore_eos: bool | None = Field(default=None, description="Do not stop at end-of-document.")
    min_tokens: TokenCount | None = Field(default=None, description="No end before these.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None

    def check_shared(self, context: ApiContext) -> None:
        """Check what does not depend on the prompt.

        Raises:
            HttpError: 404, another model is asked for.
            RequestError: a field exceeds a limit of the server, or two fields exclude each other.
        """
        check_model(context, self.model)
        limits = context.limits
        _check_maximum("n", self.n or 1, limits.n)
        _check_maximum("stop", len(self.stop_strings), limits.stop_strings, "strings")
        for text in self.stop_strings:
            if not text:
                raise RequestError("stop", "an empty string", wanted="at least one character")
            _check_maximum("stop", len(text), limits.stop_string_chars, "characters")
        _check_maximum("bad_words", len(self.bad_words or ()), limits.bad_words, "words")
        _check_maximum("logit_bias", len(self.logit_bias or ()), limits.logit_biases, "ids")
        _check_maximum("allowed_token_ids", len(self.allowed_token_ids or ()), limits.logit_biases, "ids")
        _check_maximum("prompt_logprobs", self.prompt_logprobs or 0, limits.logprobs)
        if self.temperature == 0.0 and (self.n or 1) > 1:
            raise RequestError("n", "greedy sequences would all be equal", found=self.n, hint="temperature 1")
        if self.top_p == 0.0:
            raise RequestError("top_p", "keeps no word", found=0, wanted="above 0", hint="1 keeps all")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "the response is not a stream", hint='"stream": true')

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        return (
            self.include_usage
            and self.stream_options is not None
            and self.stream_options.continuous_usage_stats
        )

    def grammar(self, context: ApiContext) -> GrammarSpec | None:
        """Return the constraint on the text.

        Raises:
            RequestError: several are given, or it is too long.
        """
        specs = [] if self.structured_outputs is None else self.structured_outputs.specs()
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        specs += _specs("guided_", guided)
        if self.response_format is not None and (spec := self.response_format.grammar()) is not None:
            specs.append(spec)
        if len(specs) > 1:
            params = ", ".join(spec.param for spec in specs)
            raise RequestError(specs[-1].param, "several constraints", found=params, wanted="one")
        return check_grammar(context, specs[0]) if specs else None

    def sampling_params(
        self, context: ApiContext, *, max_tokens: int, logprobs: int | None, grammar: GrammarSpec | None
    ) -> SamplingParams:
        """Return the engine's parameters.

        Raises:
            RequestError: an id is outside the vocabulary, or a bad word has no ids.
        """
        biases = tuple(
            (self._token_id(context, "logit_bias", token), bias)
            for token, bias in (self.logit_bias or {}).items()
        )
        for name in ("allowed_token_ids", "stop_token_ids"):
            for token in getattr(self, name) or ():
                self._token_id(context, name, token)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=biases,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=encode_bad_words(context, self.bad_words or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=self.stop_strings,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens,
            ignore_eos=bool(self.ignore_eos),
            min_tokens=min(self.min_tokens or 0, max_tokens),
            seed=None if self.seed is None else self.seed % 2**63,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=grammar,
        )

    @staticmethod
    def _token_id(context: ApiContext, name: str, token: str | int) -> int:
        vocab_size = context.client.model.vocab_size
        if isinstance(token, str):
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise RequestError(name, "not a token id", wanted=f"0 to {vocab_size - 1}")
            token = int(token)
        if token >= vocab_size:
            raise RequestError(name, "no such token id", found=token, wanted=f"0 to {vocab_size - 1}")
        return token


def check_model(context: ApiContext, name: str | None) -> None:
    """Refuse a request for a model that is not served.

    Raises:
        HttpError: 404.
    """
    served = model_name(context)
    if name is not None and name != served:
        message = f"the model {name!r} does not exist; hint: this server has {served!r}"
        raise HttpError(404, message, param="model", code="model_not_found")


def model_name(context: ApiContext) -> str:
    """Return the id of the served model."""
    return context.served_model_name or context.client.model.name


def check_grammar(context: ApiContext, spec: GrammarSpec) -> GrammarSpec:
    """Return the constraint if it is not longer than the server's limit.

    Raises:
        RequestError: it is longer.
    """
    _check_maximum(spec.param, len(spec.text.encode()), context.limits.grammar_bytes, "bytes")
    return spec


def _without_blanks(spec: GrammarSpec) -> GrammarSpec:
    """Return the constraint for JSON without blanks between its tokens."""
    if spec.kind not in ("json_schema", "json_object"):
        name = "structured_outputs.disable_any_whitespace"
        raise RequestError(name, "is for JSON", found=spec.param, wanted="json or json_object")
    try:
        schema = json.loads(spec.text or '{"type": "object"}')
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        return spec  # its check says what is wrong
    return replace(spec, kind="json_schema", text=json.dumps(without_blanks(schema)))


def encode_bad_words(context: ApiContext, words: list[str] | tuple[()]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of every word, at the beginning of a text and after a space.

    Raises:
        RequestError: a word has no ids.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        texts = (word, " " + word.lstrip(" "))
        with name_field("bad_words"):
            rows = context.tokenizer.encode_batch(texts)
        for ids in rows:
            if not ids or not word.strip():
                raise RequestError("bad_words", "a word without tokens", wanted="at least one")
            sequences[tuple(ids)] = None
    return tuple(sequences)


def _check_maximum(name: str, value: int, limit: int, unit: str = "") -> None:
    if value > limit:
        wanted = f"at most {limit:,} {unit}".rstrip()
        raise RequestError(name, "above the server's limit", found=f"{value:,}", wanted=wanted)


def _specs(prefix: str, constraints: Mapping[str, Any]) -> list[GrammarSpec]:
    """Return the constraints of the fields `prefix` + name that are given."""
    return [
        GrammarSpec(
            kind=_GRAMMAR_KINDS[name],
            text="" if value is True else value if isinstance(value, str) else json.dumps(value),
            param=prefix + name,
        )
        for name, value in constraints.items()
        if value is not None
    ]
