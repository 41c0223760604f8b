"""Requests to the engine and its outputs, as both processes (HTTP and engine) know them.

Every value is plain data: numbers, strings, tuples. orjson writes these classes as JSON objects as they are;
`from_json` reads them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# the error of a sequence whose request forbids every token that may come next
NO_TOKEN_ALLOWED = (
    "no id is allowed: grammar, allowed_token_ids, bad_words and min_tokens exclude all of them"
)

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
Pooling = Literal["last", "mean"]
GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice", "structural_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A constraint on the generated text.

    Attributes:
        text: the JSON schema, regular expression or Lark grammar; for "choice" a JSON list of strings; for
            "structural_tag" a JSON object (see `structural_tags`); empty for "json_object".
        param: the field of the request that has it, for errors; "" names the kind.
    """

    kind: GrammarKind
    text: str = ""
    param: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. All checks of ranges are the API's.

    The order is: repetition, presence and frequency penalty; logit bias; grammar, allowed and bad words,
    `min_tokens`; temperature; top-k; top-p; min-p; draw.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all words; 1 is greedy.
        top_p: 1 keeps all words (arXiv:1904.09751).
        top_p_decay, top_p_bound: Megatron's: after every token top_p becomes max(top_p · decay, bound); a
            decay of 0 keeps it constant (factual nucleus sampling, arXiv:2206.04624).
        min_p: removes words below this fraction of the largest probability (arXiv:2407.01082).
        repetition_penalty: divides positive and multiplies negative logits of words of the prompt and the
            output (arXiv:1909.05858).
        presence_penalty, frequency_penalty: OpenAI's, on words of the output.
        logit_bias: (id, bias) pairs.
        allowed_token_ids: None allows all.
        bad_words: id sequences that are never completed.
        stop_token_ids: ids that end the sequence; the id is part of the output ids.
        stop_repeated_id: an id that ends the sequence when it comes twice in a row (Megatron's
            stop_on_double_eol).
        stop: strings that end the sequence.
        include_stop_str_in_output: whether the text ends with the stop string, or the text of the stop id.
        skip_special_tokens: True: no special token contributes text; False: each does; None: each but
            end-of-document, beginning and padding at the end of the text.
        banned_bigram: (a, b): after the token a, b is never sampled (prevent_newline_after_colon).
        ignore_eos: end-of-document does not end the sequence.
        seed: None draws a fresh one. The draw at a position depends only on the seed, the index of the
            sequence and the position.
        logprobs: number of most probable words to report with each token; 0 reports the token alone; None
            reports nothing. All are of the unmodified logits.
        prompt_logprobs: the same for the tokens of the prompt, of which the first has none.
        pooling: report an embedding of the prompt: the hidden state, after the final norm, of its last token,
            or the mean of all; needs `max_tokens` 0 and one sequence.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_repeated_id: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    banned_bigram: tuple[int, int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    pooling: Pooling | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable word is taken without a draw."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search: the `width` hypotheses of the highest Σ ln P / length^length_penalty.

    Attributes:
        stop_token_id: the id that finishes a hypothesis; None finishes none.
        banned_bigram: as in SamplingParams.
    """

    max_tokens: int
    width: int
    length_penalty: float = 1.0
    stop_token_id: int | None = None
    banned_bigram: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt and what to do with it.

    Attributes:
        n: number of sequences sampled from the prompt; 1 for a beam search, whose outputs are its
            hypotheses.
        priority: a smaller number is served first; equal ones in order of arrival.
        cache_namespace: prefixes are shared only between requests of one namespace (API key and cache_salt).
        timeout: seconds from arrival after which the request is finished with "timeout"; None: no limit.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    n: int = 1
    priority: int = 0
    cache_namespace: str = ""
    timeout: float | None = None

    @property
    def rows(self) -> int:
        """Sequences that this request runs at a time."""
        return self.params.width if isinstance(self.params, BeamSearchParams) else self.n

    @property
    def max_total_tokens(self) -> int:
        """Upper bound of the tokens that all rows hold: what a queue limit counts."""
        return self.rows * (len(self.prompt_token_ids) + self.params.max_tokens)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EngineRequest:
        """Return the request that orjson wrote."""
        fields = {name: value for name, value in values.items() if name != "params"}
        params = values["params"]
        return cls(
            params=BeamSearchParams(**_tuples(params)) if "width" in params else _sampling_params(params),
            **_tuples(fields),
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, natural logarithm, of the unmodified logits.

    Attributes:
        rank: 1 for the most probable word.
        top: (id, log-probability) of the most probable words, most probable first.
    """

    token_id: int
    logprob: float
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Where the time of a request went, in seconds.

    Attributes:
        queue: from arrival in the engine to the first step.
        prefill: from there to the first token; to the end if there is none.
        decode: from the first token to the end.
    """

    queue: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one sequence of a request gained in a step.

    Attributes:
        index: number of the sequence in its request.
        token_ids: new ids, stop token included.
        text: new text: whole characters, without the part that may still become a stop string.
        logprobs: one per new id, if asked.
        prompt_logprobs: in the first output of sequence 0, if asked, which comes before those of all other
            sequences: one per token of the prompt; None for the first.
        cached_tokens: in the first output: tokens of the prompt found in the prefix cache.
        finish_reason: None while the sequence continues.
        stop_reason: the stop string or id that ended it.
        score: of a beam search hypothesis.
        embedding: in the last output, if `pooling` asks: one number per dimension of the hidden states.
        error: message of finish_reason "error".
        times: in the last output of a sequence that came to its end; of beams, in that of the best one.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    embedding: tuple[float, ...] = ()
    error: str | None = None
    times: RequestTimes | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SequenceOutput:
        """Return the output that orjson wrote."""
        fields = {name: value for name, value in values.items() if name not in _OBJECTS}
        logprobs: dict[str, Any] = {
            name: tuple(None if value is None else TokenLogprob(**_tuples(value)) for value in values[name])
            for name in _LOGPROBS
        }
        times = values["times"]
        return cls(**_tuples(fields), **logprobs, times=None if times is None else RequestTimes(**times))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load of the engine at one moment; the counters only grow.

    Attributes:
        running, waiting: sequences in the batch; requests in the queue.
        waiting_tokens: `max_total_tokens` of the requests in the queue.
        kv_usage: fraction of the pages that running sequences hold, 0 to 1.
        tokens_per_second: generated tokens of the last seconds, for the estimate in Retry-After.
        step_counts: steps of the model by their tokens, in the buckets of `mega_serve.engine.step_sizes`.
        step_tokens: tokens of all steps.
        last_step: time.monotonic() of the end of the last step, or of the last idle check.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    tokens_per_second: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_counts: tuple[int, ...] = ()
    step_tokens: int = 0
    iteration: int = 0
    last_step: float = 0.0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EngineStats:
        """Return the load that orjson wrote."""
        return cls(**_tuples(values))


_LOGPROBS = ("logprobs", "prompt_logprobs")
_OBJECTS = (*_LOGPROBS, "times")


def _sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    grammar = values["grammar"]
    fields = {name: value for name, value in values.items() if name != "grammar"}
    return SamplingParams(grammar=None if grammar is None else GrammarSpec(**grammar), **_tuples(fields))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with every JSON list as a tuple, in depth."""
    return {name: _as_tuple(value) for name, value in values.items()}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
