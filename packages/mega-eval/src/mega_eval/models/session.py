"""A model as the tasks use it: batches in any order become results in the order of the requests.

A session takes the answers it can from its cache, and appends those of the model to it, batch by batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np

from mega_eval.models.answer_cache import AnswerCache, hash_request, hash_window
from mega_eval.models.interface import (
    GenerationRequest,
    ModelIdentity,
    RequestModel,
    WindowScores,
)
from mega_eval.windows import Window
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer

Request = TypeVar("Request")
Answer = TypeVar("Answer")
# called with the number of requests; yields the function that is called with the number of answered ones
Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]


class EvaluationSession:
    """A `LanguageModel` over a `RequestModel`.

    Args:
        model: answers the requests.
        progress: shows the number of answered requests.
        cache: answers of the same model from earlier runs; receives those of this one.

    Attributes:
        cached_requests: number of requests whose answers were in the cache.
        cached_seconds: the time that the earlier runs took for them.
    """

    def __init__(
        self,
        model: RequestModel,
        *,
        progress: Progress = lambda total: nullcontext(lambda answered: None),
        cache: AnswerCache | None = None,
    ) -> None:
        self._model = model
        self._progress = progress
        self._cache = cache
        self.context_length = model.context_length
        self.vocab_size = model.vocab_size
        self.cached_requests = 0
        self.cached_seconds = 0.0

    @property
    def identity(self) -> ModelIdentity:
        """Which model it is."""
        return self._model.identity

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self._model.tokenizer

    def score(self, windows: Sequence[Window]) -> list[WindowScores]:
        """Score each window; one without targets costs nothing.

        Raises:
            FormatError: a log-probability is not finite, as with the weights of a run that diverged.
        """
        scores = [WindowScores(np.zeros(0), np.zeros(0, dtype=np.bool_)) for _ in windows]
        indices = [index for index, window in enumerate(windows) if window.target_length]
        requests = [windows[index] for index in indices]
        cache = self._cache
        if cache is None:
            answers = self._answer(requests, self._score_batches)
        else:
            answers = self._answer_cached(
                requests, self._score_batches, hash_window, cache.find_scores, cache.add_scores
            )
        for index, answer in zip(indices, answers, strict=True):
            scores[index] = answer
        return scores

    def generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Continue each prompt greedily."""
        cache = self._cache
        if cache is None:
            return self._answer(requests, self._model.generate_batches)
        return self._answer_cached(
            requests, self._model.generate_batches, hash_request, cache.find_text, cache.add_texts
        )

    def _score_batches(
        self, windows: Sequence[Window], answered: Collection[int]
    ) -> Iterator[list[tuple[int, WindowScores]]]:
        for batch in self._model.score_batches(windows, answered):
            if not all(np.isfinite(score.logprobs).all() for _, score in batch):
                raise FormatError(
                    self.identity.source,
                    "the model's scores are not finite numbers",
                    hint="--load with an earlier checkpoint",
                )
            yield batch

    def _answer_cached(
        self,
        requests: Sequence[Request],
        answer_batches: Callable[[Sequence[Request], Collection[int]], Iterator[list[tuple[int, Answer]]]],
        hash_content: Callable[[Request], bytes],
        find: Callable[[bytes], tuple[Answer, float] | None],
        add: Callable[[Mapping[bytes, Answer], float], None],
    ) -> list[Answer]:
        """Answer the requests from the cache if possible, and add the model's answers to the cache."""
        digests = [hash_content(request) for request in requests]
        known: dict[int, Answer] = {}
        for index, digest in enumerate(digests):
            if (entry := find(digest)) is not None:
                known[index], seconds = entry
                self.cached_seconds += seconds
        self.cached_requests += len(known)

        def store(batch: Mapping[int, Answer], seconds: float) -> None:
            add({digests[index]: answer for index, answer in batch.items()}, seconds)

        return self._answer(requests, answer_batches, known, store)

    def _answer(
        self,
        requests: Sequence[Request],
        answer_batches: Callable[[Sequence[Request], Collection[int]], Iterator[list[tuple[int, Answer]]]],
        known: Mapping[int, Answer] | None = None,
        store: Callable[[Mapping[int, Answer], float], None] | None = None,
    ) -> list[Answer]:
        """Answer the requests that are not in `known`, and return the answers to all in their order."""
        answers = dict(known or {})
        with self._progress(len(requests)) as update:
            if answers:
                update(len(answers))
            start = time.perf_counter()
            for batch in answer_batches(requests, frozenset(answers)):
                # a batch may repeat answers from the cache: it is computed whole, so that its other numbers
                # are bitwise those of a run that was not interrupted
                new = {index: answer for index, answer in batch if index not in answers}
                answers.update(new)
                now = time.perf_counter()
                if store is not None and new:
                    store(new, now - start)
                start = now
                update(len(new))
        return [answers[index] for index in range(len(requests))]

    def finish(self) -> None:
        """Call once the result is written: a temporary cache is removed."""
        if self._cache is not None:
            self._cache.finish()

    def close(self) -> None:
        """End the model's processes and connections, and close the cache."""
        self._model.close()
        if self._cache is not None:
            self._cache.close()
