"""What a task computed: metrics, counts, and every example by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mega_eval.metrics import Metric


@dataclass(frozen=True, slots=True)
class TargetToken:
    """A token of a target, as the page of a result shows it.

    Attributes:
        text: its text.
        logprob: ln P, given all tokens before it.
        is_greedy: whether it is the most probable token.
    """

    text: str
    logprob: float
    is_greedy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One example of a task with the model's answer.

    Attributes:
        id: the example's own id, or its line or window in the file; unique within the task, and the same for
            every model, so that two results can be paired.
        prompt: what the model read; the end of it, if it is long.
        expected, prediction: the gold answer and the model's, as texts.
        scores: numbers of this example; metrics name those that they are made from
            (`Metric.example_score`). True and False are 1 and 0. The weight of `X`, in a ratio metric, is
            `X_weight`.
        tokens: scores of the gold answer's tokens.
        choices: of a multiple-choice task, the text and ln P of each choice.
        tags: what subsets may be formed by, such as the subject.
    """

    id: str
    prompt: str
    expected: str
    prediction: str
    scores: Mapping[str, float]
    tokens: Sequence[TargetToken] = ()
    choices: Sequence[tuple[str, float]] = ()
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The numbers that a task computed.

    Attributes:
        task: its name.
        convention: which of the published definitions was followed, as "strict" or "openai"; part of the
            name of the result file.
        metrics: by name, the most important first.
        counts: numbers without uncertainty, such as passages that were cut.
        examples: every example, in the order of the file.
        is_whole: whether every example of the data was evaluated.
        tokens_read: tokens the model read, without padding and without the prefixes that it read once for
            several examples.
    """

    task: str
    convention: str
    metrics: dict[str, Metric]
    counts: dict[str, int]
    examples: Sequence[Example] = ()
    is_whole: bool = True
    tokens_read: int = 0

    @property
    def values(self) -> dict[str, float]:
        """The values of the metrics, by name."""
        return {name: metric.value for name, metric in self.metrics.items()}
