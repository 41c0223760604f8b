"""The command `mega-serve complete`: continue one prompt and print the text."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mega_schema.app.click_options import NumberRange
from mega_schema.errors import ConfigError
from mega_serve.commands.connection_options import connection_options, open_client
from mega_serve.commands.option_groups import GroupedCommand, option_group
from mega_serve.commands.sampling_options import request_fields, sampling_options

if TYPE_CHECKING:
    from mega_serve.client.generation import TokenScore
    from mega_serve.client.http import ServerClient

DEFAULT_MAX_TOKENS: Final = 64
_SPECIAL_TOKENS: Final = 16  # that a tokenizer adds around a prompt, at most
_request = option_group("Request")
_sampling = option_group("Sampling")
_megatron = option_group("Sampling, --api megatron only")
_output = option_group("Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What to ask for and how to print it.

    Attributes:
        max_tokens: None: the default, or as many as the model's context leaves.
        fields: of the request, in the API's names.
        logprobs: number of alternatives to print with each token; None prints the text alone.
    """

    prompt: str
    max_tokens: int | None
    fields: dict[str, Any]
    model: str | None
    logprobs: int | None
    echo: bool
    stream: bool
    as_json: bool


@click.command(cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("address", metavar="HOST:PORT")
@click.argument("prompt", required=False)
@_request(
    "--api",
    type=click.Choice(["openai", "megatron"]),
    default="openai",
    show_default=True,
    help="openai: POST /v1/completions; megatron: PUT /api, of Megatron-LM's server too.",
)
@_request("--model", help="Name of the model, --api openai only.  [default: the server's first]")
@_request(
    "--max-tokens",
    type=click.IntRange(min=0),
    help="Number of tokens to generate, at most; 0 scores the prompt (with --logprobs and --echo).  "
    "[default: 64, or what the model's context leaves]",
)
@sampling_options
@_sampling("--seed", type=click.IntRange(min=0), help="Seed of the random numbers.")
@_sampling("--stop", multi=True, metavar="TEXT ...", help="Strings that end the text.")
@_sampling("--n", type=click.IntRange(min=1), help="Number of sequences.")
@_megatron("--top-p-decay", type=NumberRange(0, 1), help="Multiply top-p by this after each token.")
@_megatron("--top-p-bound", type=NumberRange(0, 1), help="Lower bound of the decaying top-p.")
@_megatron("--beam-width", type=click.IntRange(min=1), help="Beam search with this many hypotheses.")
@_megatron("--length-penalty", type=float, help="Exponent of the length in a beam search.")
@_megatron("--add-BOS", "add_bos", is_flag=True, help="Begin with the end-of-document token.")
@_megatron("--stop-on-eol", is_flag=True, help="Stop at a line feed.")
@_megatron("--stop-on-double-eol", is_flag=True, help="Stop at an empty line.")
@_output(
    "--logprobs",
    type=click.IntRange(min=0),
    metavar="N",
    help="Print one token a line: log-probability, text, and the N most probable alternatives.",
)
@_output("--echo", is_flag=True, help="Print the prompt too.")
@_output("--no-stream", is_flag=True, help="Print the text when it is complete.")
@_output("--json", "as_json", is_flag=True, help="Print the server's answer as one line of JSON.")
@connection_options
def complete(
    address: str,
    prompt: str | None,
    api: str,
    model: str | None,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool,
    no_stream: bool,
    as_json: bool,
    api_key_file: Path | None,
    headers: tuple[str, ...],
    timeout: float,
    insecure: bool,
    **sampling: Any,
) -> None:
    """Continue PROMPT with the model of the server at HOST:PORT and print the text.

    Without PROMPT, or with -, the prompt is standard input.
    """
    request = Completion(
        prompt=_read_prompt(prompt),
        max_tokens=max_tokens,
        fields=request_fields(api, sampling),
        model=model,
        logprobs=logprobs,
        echo=echo,
        stream=not (no_stream or as_json or logprobs is not None or (sampling["n"] or 1) > 1),
        as_json=as_json,
    )
    client = open_client(
        address,
        "HOST:PORT",
        api_key_file=api_key_file,
        headers=headers,
        timeout=timeout,
        insecure=insecure,
        keeps_connections=False,
        megatron_option="--api megatron",
    )
    asyncio.run(_complete(client, request, _complete_megatron if api == "megatron" else _complete_openai))


async def _complete(client: ServerClient, request: Completion, exchange: Any) -> None:
    async with client:
        await exchange(client, request)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            hint = "add it in quotes, or pipe it in"
            raise ConfigError("PROMPT", "missing", hint=hint)
        text = sys.stdin.buffer.read()
        try:
            return text.decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(
                "standard input", "is not UTF-8", found=f"byte {text[error.start]:#04x}"
            ) from None
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError("PROMPT", "is not UTF-8") from None
    return prompt


async def _fit_max_tokens(
    client: ServerClient, model: Mapping[str, Any], request: Completion, *, added_tokens: int = 0
) -> int:
    """Return the number of tokens to ask for: the default is lowered to what the model's context leaves.

    Args:
        model: the object of the server's list.
        added_tokens: that the server puts before the prompt.

    Raises:
        ConfigError: prompt and --max-tokens exceed the context.
    """
    from mega_serve.client.generation import context_length, count_prompt_tokens

    asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    context = context_length(model)
    most = len(request.prompt.encode()) + _SPECIAL_TOKENS  # a token is a byte of the text at least
    if context is None or asked == 0 or most + asked <= context:
        return asked
    tokens = await count_prompt_tokens(client, model.get("id"), request.prompt)
    if tokens is None:
        return asked
    tokens += added_tokens
    room = context - tokens
    if room < 1:
        wanted = f"at most {context - 1:,}"
        raise ConfigError("PROMPT", "fills the model's context", found=f"{tokens:,} tokens", wanted=wanted)
    if request.max_tokens is not None and asked > room:
        what = f"exceeds the model's context of {context:,} tokens after a prompt of {tokens:,}"
        hint = f"--max-tokens {room}"
        raise ConfigError("--max-tokens", what, found=asked, wanted=f"at most {room:,}", hint=hint)
    return min(asked, room)


async def _complete_openai(client: ServerClient, request: Completion) -> None:
    from mega_serve.client.generation import COMPLETIONS, TokenUsage, find_model, request_text, stream_text

    model = await find_model(client, request.model)
    body = {
        "model": model["id"],
        "prompt": request.prompt,
        "max_tokens": await _fit_max_tokens(client, model, request),
        **request.fields,
    }
    body |= {"logprobs": request.logprobs} if request.logprobs is not None else {}
    usage = TokenUsage()
    if not request.stream:
        body |= {"echo": True} if request.echo else {}
        deltas, answer = await request_text(client, COMPLETIONS, body, usage)
        if request.as_json:
            _print_json(answer)
            return
        for number, delta in enumerate(deltas):
            if len(deltas) > 1:
                click.echo(f"=== {number} ({delta.finish_reason})")
            if request.logprobs is not None:
                _print_scores(delta.tokens)
            else:
                _print_text(delta.text, ends=True)
        return
    text = ""
    start = client.now()
    times = []
    if request.echo:
        _print_text(request.prompt)
    async with aclosing(stream_text(client, COMPLETIONS, body, usage)) as deltas_and_times:
        async for delta, received_at in deltas_and_times:
            if delta.has_token:
                times.append(received_at)
            text = delta.text or text
            _print_text(delta.text)
    if not text.endswith("\n"):
        click.echo()
    if sys.stderr.isatty() and times:
        tokens = usage.completion_tokens or len(times)
        seconds = times[-1] - times[0]
        speed = f", {(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds > 0 else ""
        click.echo(f"[{tokens} tokens, first after {times[0] - start:.2f} s{speed}]", err=True)


async def _complete_megatron(client: ServerClient, request: Completion) -> None:
    from mega_serve.client.generation import (
        MEGATRON,
        TokenScore,
        continuation,
        find_model,
        megatron_body,
        request_megatron,
    )
    from mega_serve.client.http import ServerError

    fields = {**request.fields, "logprobs": True if request.logprobs is not None else None}
    max_tokens = request.max_tokens
    if max_tokens is None:
        try:
            model = await find_model(client)
        except ServerError:
            model = {}  # Megatron's own server lists no models
        added_tokens = int(bool(request.fields.get("add_BOS")))
        max_tokens = await _fit_max_tokens(client, model, request, added_tokens=added_tokens)
    body = megatron_body(request.prompt, max_tokens, fields)
    if request.as_json:
        _print_json(await client.send_json("PUT", MEGATRON, body))
        return
    answers = await request_megatron(client, body)
    for number, answer in enumerate(answers):
        if len(answers) > 1:
            click.echo(f"=== {number}" + (f" (score {answer.score:.4f})" if answer.score is not None else ""))
        if request.logprobs is not None and answer.logprobs:
            scores = [None, *answer.logprobs]
            pairs = zip(answer.segments, scores, strict=False)
            _print_scores([TokenScore(segment, score) for segment, score in pairs])
        else:
            _print_text(answer.text if request.echo else continuation(answer, request.prompt), ends=True)


def _print_text(text: str, *, ends: bool = False) -> None:
    """Print text as it is into a file or a pipe, and without control characters on a terminal."""
    from mega_serve.client.terminal_text import for_terminal

    shown = for_terminal(text) if sys.stdout.isatty() else text
    click.echo(shown, nl=ends and not text.endswith("\n"))


def _print_scores(tokens: tuple[TokenScore, ...] | list[TokenScore]) -> None:
    """Print a token a line: log-probability, text as a JSON string, alternatives."""
    import orjson

    for token in tokens:
        score = "       -" if token.logprob is None else f"{token.logprob:8.4f}"
        others = "  ".join(f"{logprob:.4f} {orjson.dumps(text).decode()}" for text, logprob in token.top)
        click.echo(f"{score}  {orjson.dumps(token.text).decode():20}  {others}".rstrip())


def _print_json(answer: object) -> None:
    import orjson

    click.echo(orjson.dumps(answer).decode())
