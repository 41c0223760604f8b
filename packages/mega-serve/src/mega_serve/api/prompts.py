"""Convert prompts to token ids, and check that they fit the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from mega_schema.errors import RequestError
from mega_schema.tokenizer.special_tokens import SpecialTokens, added_tokens
from mega_serve.api.bodies import name_field
from mega_serve.api.context import ApiContext
from mega_serve.api.sampling_fields import TokenId
from mega_serve.http.errors import HttpError

_CONTEXT = "context_length_exceeded"


def _kind_of_prompt(value: Any) -> str:
    """Return the tag of the prompt's type by its first element."""
    if not isinstance(value, list):
        return "(text)"
    first = value[0] if value else ""
    return "(ids)" if isinstance(first, int) else "(rows)" if isinstance(first, list) else "(texts)"


Prompt = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[str], Field(min_length=1), Tag("(texts)")]
    | Annotated[list[TokenId], Field(min_length=1), Tag("(ids)")]
    | Annotated[list[list[TokenId]], Field(min_length=1), Tag("(rows)")],
    Discriminator(_kind_of_prompt),
]


def check_prompt_count(context: ApiContext, prompt: Prompt, param: str) -> None:
    """Refuse more prompts than the server's limit.

    Args:
        param: the field that has the prompts.

    Raises:
        RequestError: there are more.
    """
    if isinstance(prompt, list) and not isinstance(prompt[0], int) and len(prompt) > context.limits.prompts:
        wanted = f"at most {context.limits.prompts}"
        raise RequestError(param, "too many prompts", found=len(prompt), wanted=wanted)


async def encode_prompts(
    context: ApiContext, prompt: Prompt, special_tokens: SpecialTokens, *, param: str
) -> tuple[list[str], list[list[int]]]:
    """Return the prompts as texts, which are empty if the client sent ids, and as ids.

    Args:
        param: the field that has the prompts.

    Raises:
        RequestError: a text has no ids, or an id is out of range.
    """
    if isinstance(prompt, str) or isinstance(prompt[0], str):
        texts = [prompt] if isinstance(prompt, str) else [str(text) for text in prompt]
        return texts, await encode_texts(context, texts, special_tokens=special_tokens, param=param)
    rows = [row for row in prompt if isinstance(row, list)] or [[i for i in prompt if isinstance(i, int)]]
    for row in rows:
        check_token_ids(context, row, param)
    return [], rows


async def encode_texts(
    context: ApiContext,
    texts: Sequence[str],
    *,
    special_tokens: SpecialTokens | None = None,
    param: str = "prompt",
) -> list[list[int]]:
    """Encode texts in a thread, without the interpreter's lock.

    Args:
        special_tokens: added around every text.
        param: the field that has the texts.

    Raises:
        RequestError: a text has no ids.
    """
    around = special_tokens or SpecialTokens()
    with name_field(param):
        characters = sum(map(len, texts))
        rows = await context.encoding_threads.run(characters, context.tokenizer.encode_batch, list(texts))
    return [[*around.prefix, *row, *around.suffix] for row in rows]


def find_special_tokens(context: ApiContext) -> SpecialTokens:
    """Return the ids that the tokenizer adds around a text (such as BOS), as Hugging Face's does."""
    return added_tokens(context.tokenizer)


def check_token_ids(context: ApiContext, ids: Sequence[int], param: str) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        RequestError: an id is out of range.
    """
    vocab_size = context.client.model.vocab_size
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RequestError(param, "no such token id", found=outside, wanted=f"0 to {vocab_size - 1}")


def truncate_prompts(
    context: ApiContext, rows: Sequence[list[int]], tokens: int | None, new_tokens: int
) -> list[list[int]]:
    """Return the last tokens of each prompt (vLLM's `truncate_prompt_tokens`).

    Args:
        tokens: at most; None: all; -1: as many as the context holds before `new_tokens`.

    Raises:
        RequestError: no token would be kept.
    """
    if tokens is None:
        return list(rows)
    if tokens == 0:
        raise RequestError("truncate_prompt_tokens", "keeps no token", found=0, wanted="1 or more, or -1")
    most = max(1, context.client.model.max_seq_len - new_tokens) if tokens == -1 else tokens
    return [row[-most:] for row in rows]


def check_length(
    context: ApiContext,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    rows: int,
    *,
    param: str = "prompt",
) -> None:
    """Refuse prompts that exceed the model's context or the server's limit.

    Args:
        rows: sequences per prompt.
        param: the field that has the prompts.

    Raises:
        RequestError: a prompt has no tokens.
        HttpError: 400, with limit and asked number of tokens.
    """
    if not all(prompts):
        raise RequestError(param, "a prompt has no tokens", wanted="at least one")
    longest = max(map(len, prompts))
    limit = context.client.model.max_seq_len
    if longest + new_tokens > limit:
        raise HttpError(400, context_message(limit, longest, new_tokens), param=param, code=_CONTEXT)
    total = rows * len(prompts) * (longest + new_tokens)
    if total > context.limits.request_tokens:
        raise HttpError(400, tokens_message(context.limits.request_tokens, total), param=param, code=_CONTEXT)


def default_new_tokens(context: ApiContext, longest: int, rows: int) -> int:
    """Return the new tokens of a request that names no number: as many as fit, at least one."""
    within_limit = context.limits.request_tokens // rows
    return max(1, min(context.client.model.max_seq_len, within_limit) - longest)


def context_message(limit: int, prompt_tokens: int, new_tokens: int) -> str:
    """Describe a request over the model's context, with limit and asked."""
    return (
        f"the model's context is {limit:,} tokens, and {prompt_tokens + new_tokens:,} were asked for "
        f"({prompt_tokens:,} in the longest prompt, {new_tokens:,} new); "
        "hint: shorten the prompt or ask for fewer new tokens"
    )


def tokens_message(limit: int, asked: int) -> str:
    """Describe a request over the server's limit of tokens, with limit and asked."""
    return (
        f"a request may hold {limit:,} tokens, and {asked:,} were asked for "
        "(sequences x tokens of the longest); hint: send fewer prompts at a time"
    )
