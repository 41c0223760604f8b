"""The greedy continuation of a prompt, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from mega_eval.batch_size import window_size_error
from mega_eval.generation_plan import halve_batches
from mega_eval.models.interface import GenerationRequest
from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer

Answer = TypeVar("Answer")


class GreedyContinuation:
    """The tokens after a prompt, up to the end of the document or a stop string.

    Attributes:
        ids: the tokens, without the one that ends the document.
        is_finished: whether no token is to follow.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        assert request.max_tokens > 0, "a continuation without tokens"
        self._request = request
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.is_finished = False

    def add(self, token: int) -> None:
        """Append a token. A stop string may begin in one token and end in another."""
        if token == self._tokenizer.identity.eod:
            self.is_finished = True
            return
        self.ids.append(token)
        if len(self.ids) == self._request.max_tokens:
            self.is_finished = True
        elif self._request.stop:
            text = self._tokenizer.decode(self.ids)
            self.is_finished = any(stop in text for stop in self._request.stop)

    @property
    def text(self) -> str:
        """The text before the first stop string."""
        return cut_at_stop(self._tokenizer.decode(self.ids), self._request.stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    return text[: min((text.find(word) for word in stop if word in text), default=len(text))]


def cut_prompt(request: GenerationRequest, context_length: int) -> GenerationRequest:
    """Return the request with the end of its prompt that leaves room for the continuation.

    Raises:
        RequestError: the prompt has no tokens.
    """
    if not request.prompt:
        raise RequestError("prompts", "a prompt has no tokens", wanted="at least one")
    return replace(request, prompt=request.prompt[-max(1, context_length - request.max_tokens) :])


def answer_batches(
    batches: Sequence[Sequence[int]],
    requests: Sequence[GenerationRequest],
    answered: Collection[int],
    answer: Callable[[Sequence[GenerationRequest]], Sequence[Answer] | None],
) -> Iterator[list[tuple[int, Answer]]]:
    """Yield the answers to a batch at a time, each with the number of its request.

    A batch that does not fit in memory is cut into halves, and so are those after it.

    Args:
        batches: numbers of requests; a batch of which all are answered is left out.
        answer: answers the requests of a batch; None: they do not fit in memory.

    Raises:
        ConfigError: one request alone does not fit.
    """
    left = [list(batch) for batch in batches]
    while left:
        batch = left.pop(0)
        if all(number in answered for number in batch):
            continue
        chosen = [requests[number] for number in batch]
        answers = answer(chosen)
        if answers is not None:
            yield list(zip(batch, answers, strict=True))
        elif len(batch) == 1:
            raise window_size_error(len(chosen[0].prompt) + chosen[0].max_tokens)
        else:
            left = halve_batches([batch, *left], len(batch))
