"""A model as the tasks use it: batches in any order become results in the order of the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from mega_eval.models.interface import (
    GenerationRequest,
    ModelIdentity,
    RequestModel,
    WindowScores,
)
from mega_eval.windows import Window
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer

# called with the number of requests; yields the function that is called with the number of answered ones
Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]


class EvaluationSession:
    """A `LanguageModel` over a `RequestModel`.

    Args:
        model: answers the requests.
        progress: shows the number of answered requests.
    """

    def __init__(
        self, model: RequestModel, *, progress: Progress = lambda total: nullcontext(lambda answered: None)
    ) -> None:
        self._model = model
        self._progress = progress
        self.context_length = model.context_length
        self.vocab_size = model.vocab_size

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
        with self._progress(len(indices)) as update:
            for batch in self._model.score_batches([windows[index] for index in indices]):
                for number, score in batch:
                    if not np.isfinite(score.logprobs).all():
                        raise FormatError(
                            self.identity.source,
                            "the model's scores are not finite numbers",
                            hint="an earlier --load",
                        )
                    scores[indices[number]] = score
                update(len(batch))
        return scores

    def generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Continue each prompt greedily."""
        texts = [""] * len(requests)
        with self._progress(len(requests)) as update:
            for batch in self._model.generate_batches(requests):
                for number, text in batch:
                    texts[number] = text
                update(len(batch))
        return texts

    def close(self) -> None:
        """End the model's processes and connections."""
        self._model.close()
