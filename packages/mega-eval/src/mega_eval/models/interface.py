"""The interface of a model for the tasks: score tokens and generate text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mega_eval.windows import Window
from mega_schema.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class WindowScores:
    """Scores of the targets of one window.

    Attributes:
        logprobs: (target_length,) ln P of each target given all tokens before it in the window, float64.
        is_greedy: (target_length,) whether the target is the most probable token.
        greedy_ids: (target_length,) the most probable tokens; empty where the model does not tell.
    """

    logprobs: npt.NDArray[np.float64]
    is_greedy: npt.NDArray[np.bool_]
    greedy_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue greedily.

    Attributes:
        prompt: ids; a prompt that leaves no room for `max_tokens` loses its beginning.
        max_tokens: most tokens of the answer.
        stop: strings that end the answer; they are not part of it.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Which model a result is of.

    Attributes:
        source: the checkpoint's folder, or the server's URL.
        sha256: hash of spec and weights; of a server, of its model's name and URL.
        tokenizer_sha256: content hash of the tokenizer.
        iteration: of a checkpoint.
        dtype: of weights and activations.
        device: "cpu", "cuda:0"; of a server "remote".
        layout: tp, pp and dp of the ranks that evaluated it.
        parameters: number of weights, if known.
        tokens: tokens that it was trained on, if known.
        noise: of a server, the largest difference of a token's ln P between a request alone and among others.
        versions: of the software that computes its answers, other than this program's.
    """

    source: str
    sha256: str
    tokenizer_sha256: str
    iteration: int | None
    dtype: str
    device: str
    layout: dict[str, int] = field(default_factory=lambda: {"tp": 1, "pp": 1, "dp": 1})
    parameters: int | None = None
    tokens: int | None = None
    noise: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


class RequestModel(Protocol):
    """A source of models: answers requests in batches, in the order that is fastest for it."""

    @property
    def context_length(self) -> int:
        """Largest number of tokens a window may read."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens the model predicts; ids of a window are smaller."""

    @property
    def identity(self) -> ModelIdentity:
        """Which model it is."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    def score_batches(
        self, windows: Sequence[Window], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, WindowScores]]]:
        """Yield the scores of a batch of windows at a time, each with its index; every window has targets.

        Args:
            answered: indices whose scores the caller has. The batches are the same without them, so that
                scores are bitwise reproducible; a batch of which all are answered is left out.
        """

    def generate_batches(
        self, requests: Sequence[GenerationRequest], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, str]]]:
        """Yield greedy continuations of a batch of prompts at a time, as `score_batches` does."""

    def close(self) -> None:
        """End processes and connections."""


class Scorer(Protocol):
    """What a task that only scores needs of a model."""

    @property
    def context_length(self) -> int:
        """Largest number of tokens a window may read."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens the model predicts; ids of a window are smaller."""

    def score(self, windows: Sequence[Window]) -> list[WindowScores]:
        """Score each window; the result has the order of `windows`."""


class LanguageModel(Scorer, Protocol):
    """A model with its tokenizer, as tasks use it."""

    @property
    def identity(self) -> ModelIdentity:
        """Which model it is."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Continue each prompt greedily; the result has the order of `requests`."""

    def close(self) -> None:
        """End processes and connections."""
