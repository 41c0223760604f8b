"""Prompts of a load: random tokens, shared prefixes, a file of prompts, ShareGPT conversations."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from mega_schema.errors import ConfigError, FormatError

# the vocabulary of prompts for a server without /tokenize: frequent English words are a token each
WORDS: Final = tuple(
    word
    for line in (
        "time year people way day man thing woman life child world school state family student group country",
        "problem hand part place case week company system program question work number night point",
        "home water room mother area money story fact month lot right study book eye job word business issue",
        "side kind head house service friend father power hour game line end member law car city name",
    )
    for word in line.split(" ")
)
_EXAMPLE_LINE: Final = '{"prompt": "..."}'
_MIN_SHAREGPT_TOKENS: Final = 4
_MAX_SHAREGPT_PROMPT: Final = 1024
_MAX_SHAREGPT_TOKENS: Final = 2048
_ALIGN_ROUNDS: Final = 8  # re-encodings of a random text until it has the asked number of tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the number of tokens to ask for.

    Attributes:
        content: text, or token ids.
        tokens: of the prompt; None if nobody counted them.
    """

    content: str | list[int]
    tokens: int | None
    output_tokens: int


class PromptTokenizer(Protocol):
    """What the workloads need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    async def encode(self, text: str) -> list[int]: ...

    async def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths drawn uniformly around a mean, as vLLM's random data set draws them.

    Attributes:
        range_ratio: half the width of the range, as a fraction of the mean, in [0, 1).
    """

    input_tokens: int
    output_tokens: int
    range_ratio: float

    def sample(self, count: int, generator: np.random.Generator) -> list[tuple[int, int]]:
        """Return (input, output) lengths, at least 1 each."""
        columns = [
            generator.integers(
                max(math.floor(mean * (1 - self.range_ratio)), 1),
                max(math.ceil(mean * (1 + self.range_ratio)), 1) + 1,
                size=count,
            ).tolist()
            for mean in (self.input_tokens, self.output_tokens)
        ]
        return list(zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes random prompts in the best form that the server takes.

    Attributes:
        tokenizer: the server's; None writes words, whose number of tokens is not known.
        takes_ids: whether the server takes token ids: lengths are then exact.
    """

    tokenizer: PromptTokenizer | None
    takes_ids: bool
    generator: np.random.Generator

    @property
    def form(self) -> str:
        """What the prompts are made of, for the report."""
        if self.tokenizer is None:
            return "words"
        return "token ids" if self.takes_ids else "text"

    def random_units(self, count: int) -> list[int]:
        """Return random ids; without a tokenizer, random numbers of words."""
        if self.tokenizer is None:
            return [int(i) for i in self.generator.integers(0, len(WORDS), size=count)]
        usable = self._usable_ids()
        return [int(i) for i in usable[self.generator.integers(0, len(usable), size=count)]]

    async def write(self, units: list[int], output_tokens: int) -> Prompt:
        """Return a prompt of these random units.

        Raises:
            ServerError: the server's tokenizer failed.
        """
        if self.tokenizer is None:
            return Prompt(" ".join(WORDS[i] for i in units), None, output_tokens)
        if self.takes_ids:
            return Prompt(units, len(units), output_tokens)
        ids = units
        text = ""
        for _ in range(_ALIGN_ROUNDS):
            text = await self.tokenizer.decode(ids)
            encoded = await self.tokenizer.encode(text)
            if len(encoded) == len(units):
                return Prompt(text, len(units), output_tokens)
            # tokens at a seam can merge, so the text has more or fewer of them than it was written from
            ids = encoded[: len(units)]
            ids += self.random_units(len(units) - len(ids))
        return Prompt(text, len(encoded), output_tokens)

    def _usable_ids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        assert self.tokenizer is not None
        ids = np.arange(self.tokenizer.vocab_size)
        return ids[~np.isin(ids, list(self.tokenizer.special_ids))]


async def random_prompts(
    writer: PromptWriter, count: int, lengths: RandomLengths, prefix_tokens: int
) -> AsyncIterator[Prompt]:
    """Yield prompts of random tokens; `prefix_tokens` more at the front are the same in all."""
    prefix = writer.random_units(prefix_tokens)
    for input_tokens, output_tokens in lengths.sample(count, writer.generator):
        yield await writer.write(prefix + writer.random_units(input_tokens), output_tokens)


async def prefix_repetition_prompts(
    writer: PromptWriter,
    count: int,
    *,
    prefix_tokens: int,
    suffix_tokens: int,
    prefixes: int,
    output_tokens: int,
) -> list[Prompt]:
    """Return prompts that share prefixes, in random order; as many per prefix, so at most `count`.

    Raises:
        ConfigError: there are fewer prompts than prefixes.
    """
    if count < prefixes:
        raise ConfigError(
            "--num-prompts", "is less than --prefix-repetition-num-prefixes", found=count, wanted=prefixes
        )
    prompts = []
    for _ in range(prefixes):
        prefix = writer.random_units(prefix_tokens)
        for _ in range(count // prefixes):
            prompts.append(await writer.write(prefix + writer.random_units(suffix_tokens), output_tokens))
    return [prompts[i] for i in writer.generator.permutation(len(prompts))]


def read_custom_prompts(path: Path, output_tokens: int) -> list[Prompt]:
    """Return the prompts of JSON lines with the key "prompt" and, optionally, "output_tokens".

    Raises:
        FormatError: a line has no prompt, or the file is empty.
    """
    prompts = []
    for number, line in enumerate(_read_lines(path), 1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise FormatError(where, "is not JSON", wanted=_EXAMPLE_LINE) from None
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise FormatError(where, "has no text", wanted=_EXAMPLE_LINE)
        tokens = row.get("output_tokens", output_tokens)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise FormatError(where, "output_tokens", found=tokens, wanted="an integer above 0")
        prompts.append(Prompt(text, None, tokens))
    if not prompts:
        raise FormatError(path, "has no prompts", wanted=f"{_EXAMPLE_LINE} on each line")
    return prompts


async def read_sharegpt_prompts(
    path: Path,
    count: int,
    output_tokens: int | None,
    tokenizer: PromptTokenizer | None,
    order: Callable[[int], Sequence[int]],
) -> list[Prompt]:
    """Return the first messages of conversations; the answers give the numbers of tokens to ask for.

    Very short and very long conversations are left out, as vLLM does.

    Args:
        output_tokens: ask for this many instead.
        order: returns the order in which to read that many conversations.

    Raises:
        FormatError: the file is not a list of conversations, or none is usable.
        ConfigError: the server cannot count the tokens of the answers.
    """
    if tokenizer is None and output_tokens is None:
        what = "needs /tokenize, which this server lacks"
        raise ConfigError("--dataset-name sharegpt", what, hint="add --sharegpt-output-len 128")
    pairs = list(_read_conversations(path))
    prompts: list[Prompt] = []
    for i in order(len(pairs)):
        if len(prompts) == count:
            break
        question, answer = pairs[i]
        tokens = len(await tokenizer.encode(question)) if tokenizer is not None else None
        wanted = output_tokens
        if wanted is None:
            assert tokenizer is not None
            wanted = len(await tokenizer.encode(answer))
            if wanted < _MIN_SHAREGPT_TOKENS:
                continue
        if tokens is not None and (
            tokens < _MIN_SHAREGPT_TOKENS
            or tokens > _MAX_SHAREGPT_PROMPT
            or tokens + wanted > _MAX_SHAREGPT_TOKENS
        ):
            continue
        prompts.append(Prompt(question, tokens, wanted))
    if not prompts:
        raise FormatError(path, "has no usable conversation", wanted="two turns of 4 to 1,024 tokens")
    return prompts


def repeat_prompts(
    prompts: Sequence[Prompt], count: int, generator: np.random.Generator, *, shuffle: bool, oversample: bool
) -> list[Prompt]:
    """Return `count` prompts: shuffled, and repeated at random where there are fewer."""
    chosen = [prompts[i] for i in generator.permutation(len(prompts))] if shuffle else list(prompts)
    if len(chosen) < count and oversample:
        chosen += [chosen[i] for i in generator.integers(0, len(chosen), size=count - len(chosen))]
    return chosen[:count]


def _read_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except UnicodeDecodeError:
        raise FormatError(path, "is not UTF-8") from None


def _read_conversations(path: Path) -> Iterator[tuple[str, str]]:
    wanted = '[{"conversations": [{"from": "human", "value": "..."}, ...]}, ...]'
    try:
        rows = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        raise FormatError(path, "is not JSON", wanted=wanted) from None
    if not isinstance(rows, list):
        raise FormatError(path, "is not a list of conversations", wanted=wanted)
    for row in rows:
        turns = row.get("conversations") if isinstance(row, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        if isinstance(values[0], str) and isinstance(values[1], str):
            yield values[0], values[1]
