"""Requests for text and their answers, for OpenAI's completions and chat and for Megatron's `PUT /api`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from mega_serve.client.http import ServerClient, ServerError, error_text

COMPLETIONS: Final = "/v1/completions"
CHAT_COMPLETIONS: Final = "/v1/chat/completions"
MEGATRON: Final = "/api"
Message = dict[str, str]  # role and content


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of an answer and its log-probability.

    Attributes:
        logprob: natural logarithm; None for the first token of a prompt.
        top: text and log-probability of the most probable tokens.
    """

    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of one sequence of an answer.

    Attributes:
        index: number of the sequence.
        has_token: whether the chunk carries output of the model. False for the announcement of the role, and
            for an empty chunk that only ends the sequence.
    """

    index: int
    text: str
    finish_reason: str | None = None
    tokens: tuple[TokenScore, ...] = ()
    has_token: bool = True


@dataclass(slots=True)
class TokenUsage:
    """Numbers of tokens, as the server counts them; None where it does not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(slots=True)
class MegatronAnswer:
    """The answer of `PUT /api` to one prompt.

    Attributes:
        text: prompt and continuation.
        segments: one string per token of both.
        logprobs: log-probabilities of the tokens but the first; empty if not asked for.
        score: of a beam search.
    """

    text: str
    segments: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    score: float | None = None


async def find_model(client: ServerClient, name: str | None = None) -> dict[str, Any]:
    """Return the server's first model: the object of `GET /v1/models`, with its `id`.

    Args:
        name: the model that the user names. It need not be listed: the server decides.

    Raises:
        ServerError: the server lists no model, and the user names none.
    """
    try:
        answer = await client.get_json("/v1/models")
    except ServerError:
        if name is None:
            raise
        answer = None
    models = answer.get("data") if isinstance(answer, dict) else None
    if name is not None:
        listed = models if isinstance(models, list) else []
        named = (model for model in listed if isinstance(model, dict) and model.get("id") == name)
        return next(named, {"id": name})
    if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
        url = client.address.url("/v1/models")
        raise ServerError(url, "lists no model", hint="name it with --model")
    return models[0]


def context_length(model: Mapping[str, Any]) -> int | None:
    """Return the tokens of a model's context; None if the server does not tell."""
    length = model.get("max_model_len")
    return length if isinstance(length, int) and length > 0 else None


async def count_prompt_tokens(client: ServerClient, model: str | None, prompt: str) -> int | None:
    """Return the tokens of a prompt of a completion; None if the server does not count them."""
    body = {"prompt": prompt} | ({"model": model} if model is not None else {})
    try:
        answer = await client.send_json("POST", "/tokenize", body)
    except ServerError:
        return None
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return len(tokens) if isinstance(tokens, list) else None


async def stream_text(
    client: ServerClient, path: str, body: Mapping[str, Any], usage: TokenUsage
) -> AsyncGenerator[tuple[TextDelta, float]]:
    """Send a completion or a chat completion and yield its pieces, with the time of their arrival.

    Args:
        body: of the request; `stream` is added.
        usage: filled in when the server reports it.

    Raises:
        ServerError: the request failed, or the stream broke.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with aclosing(client.stream_events(path, request)) as events:
        async for event in events:
            read_usage(event.data, usage)
            for delta in read_choices(event.data):
                yield delta, event.received_at


async def request_text(
    client: ServerClient, path: str, body: Mapping[str, Any], usage: TokenUsage
) -> tuple[list[TextDelta], dict[str, Any]]:
    """Send a completion or a chat completion; return its sequences, and the whole answer.

    Raises:
        ServerError: the request failed.
    """
    answer = await client.send_json("POST", path, body)
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise ServerError(client.address.url(path), "the answer has no choices", found=error_text(answer))
    read_usage(answer, usage)
    return read_choices(answer), answer


def read_choices(chunk: Mapping[str, Any]) -> list[TextDelta]:
    """Return the pieces of text in a chunk of a stream, or the texts of a whole answer."""
    deltas = []
    for choice in chunk.get("choices") or ():
        source = choice.get("delta") or choice.get("message")
        text = choice.get("text") if source is None else source.get("content")
        finish_reason = choice.get("finish_reason")
        tokens = _read_logprobs(choice.get("logprobs"))
        is_role = source is not None and not text and "content" in source and "role" in source
        has_token = bool(text) or bool(tokens) or (finish_reason is None and not is_role)
        deltas.append(TextDelta(choice.get("index", 0), text or "", finish_reason, tokens, has_token))
    return deltas


def read_usage(chunk: Mapping[str, Any], usage: TokenUsage) -> None:
    """Fill in the numbers of tokens, if the chunk has them."""
    values = chunk.get("usage")
    if not isinstance(values, dict):
        return
    usage.prompt_tokens = values.get("prompt_tokens", usage.prompt_tokens)
    usage.completion_tokens = values.get("completion_tokens", usage.completion_tokens)
    details = values.get("prompt_tokens_details")
    if isinstance(details, dict):
        usage.cached_tokens = details.get("cached_tokens", usage.cached_tokens)


async def request_megatron(client: ServerClient, body: Mapping[str, Any]) -> list[MegatronAnswer]:
    """Send `PUT /api` and return one answer per prompt, or per hypothesis of a beam search.

    Megatron's server reports most errors with status 200 and a bare JSON string.

    Raises:
        ServerError: the request failed.
    """
    url = client.address.url(MEGATRON)
    answer = await client.send_json("PUT", MEGATRON, body)
    if not isinstance(answer, dict):
        text = error_text(answer)
        error = ServerError(url, f"refused with status 200 and a message: {text or answer}")
        error.text = text
        raise error
    texts = answer.get("text")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ServerError(url, "the answer has no list of texts", found=error_text(answer) or list(answer))
    segments: Sequence[list[str]] = answer.get("segments") or [[]] * len(texts)
    logprobs: Sequence[list[float]] = answer.get("logprobs") or [[]] * len(texts)
    scores: Sequence[float | None] = answer.get("scores") or [None] * len(texts)
    return [MegatronAnswer(*values) for values in zip(texts, segments, logprobs, scores, strict=False)]


def megatron_body(prompt: str, max_tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of `PUT /api` for one prompt.

    Args:
        options: Megatron's fields; None values are left out. Those that Megatron wants with a decimal point
            become floats.
    """
    values = {name: value for name, value in options.items() if value is not None}
    for name in ("top_p", "top_p_decay", "top_p_bound", "length_penalty"):
        if name in values:
            values[name] = float(values[name])
    return {"prompts": [prompt], "tokens_to_generate": max_tokens, **values}


def continuation(answer: MegatronAnswer, prompt: str) -> str:
    """Return the answer's text without the prompt.

    A prompt that its tokenizer does not give back byte for byte is cut by its length.
    """
    return answer.text[len(prompt) :]


Api = Literal["openai", "megatron"]


def _read_logprobs(value: object) -> tuple[TokenScore, ...]:
    """Return the scores in the two forms of OpenAI: lists beside each other, or a list of objects."""
    if not isinstance(value, dict):
        return ()
    if isinstance(value.get("content"), list):
        return tuple(
            TokenScore(
                item["token"],
                item["logprob"],
                tuple((top["token"], top["logprob"]) for top in item.get("top_logprobs") or ()),
            )
            for item in value["content"]
        )
    tokens = value.get("tokens") or ()
    logprobs = value.get("token_logprobs") or [None] * len(tokens)
    tops = value.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenScore(token, logprob, tuple((top or {}).items()))
        for token, logprob, top in zip(tokens, logprobs, tops, strict=False)
    )
