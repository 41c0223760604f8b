"""Multiple choice: which continuation of a question does the model find most probable?

Metrics, in the definitions of lm-evaluation-harness where it has them:

    accuracy           the choice of the highest ln P is the answer (its `acc`)
    accuracy_norm      the same with ln P per character of the choice (its `acc_norm`)
    accuracy_bytes     the same with ln P per UTF-8 byte of the choice (its `acc_bytes`)
    bits_per_byte      -log2 P of the answer over its UTF-8 bytes, the mean over questions
    calibration_error  expected calibration error of the choices' probabilities
    brier              Brier score of the same probabilities (its `brier_score`)

The first of equal scores wins. The space before a choice is scored, but has no length. Probabilities are the
softmax of the ln P of the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mega_eval import metrics
from mega_eval.harness_encoding import Continuation, build_continuation_windows
from mega_eval.metrics import Metric
from mega_eval.models.interface import LanguageModel, WindowScores
from mega_eval.presets.question import ChoiceQuestion
from mega_eval.task_result import Example, TaskResult
from mega_eval.tasks.token_scores import score_tokens
from mega_eval.windows import Window

CALIBRATION_BINS = 10
PROMPT_CHARACTERS = 2000  # of a prompt in the samples; its end


@dataclass(frozen=True, slots=True)
class ChoiceItem:
    """A question with what comes before it.

    Attributes:
        id: unique within the task.
        prefix: description and few-shot examples.
    """

    id: str
    where: str
    question: ChoiceQuestion
    prefix: str = ""

    @property
    def continuations(self) -> list[Continuation]:
        """What the model scores, one for each choice."""
        question = self.question
        return [
            Continuation(self.where, self.prefix + context, question.delimiter + continuation)
            for context, continuation in zip(question.contexts, question.continuations, strict=True)
        ]


def evaluate(
    model: LanguageModel,
    items: Sequence[ChoiceItem],
    *,
    task: str,
    convention: str,
    group: str | None = None,
    counts: dict[str, int] | None = None,
    is_whole: bool = True,
) -> TaskResult:
    """Score the choices of every question.

    Args:
        task, convention: names in the result.
        group: the tag whose values get an accuracy each.
        counts: further counts of the result.
        is_whole: whether the items are all questions of the data.
    """
    pairs = [continuation for item in items for continuation in item.continuations]
    windows, truncations = build_continuation_windows(pairs, model.tokenizer, model.context_length)
    scores = model.score(windows)
    examples = []
    cut = start = 0
    for item in items:
        end = start + len(item.question.continuations)
        examples.append(_build_example(model, item, windows[start:end], scores[start:end]))
        cut += any(truncations[start:end])
        start = end
    return TaskResult(
        task=task,
        convention=convention,
        metrics=compute_metrics(examples) | (group_accuracies(examples, group) if group else {}),
        counts={
            "questions": len(items),
            "correct": int(sum(example.scores["correct"] for example in examples)),
            "questions_cut": cut,
            **(counts or {}),
        },
        examples=examples,
        is_whole=is_whole,
        tokens_read=sum(window.input_length for window in windows),
    )


def choose(logprobs: npt.NDArray[np.float64], lengths: Sequence[int]) -> int:
    """Return the choice of the highest ln P per length; one of no length is never chosen before others."""
    sizes = np.asarray(lengths, np.float64)
    rates = np.where(sizes > 0, logprobs / np.maximum(sizes, 1), -np.inf)
    return int(rates.argmax())


def score_question(question: ChoiceQuestion, logprobs: Sequence[float]) -> dict[str, float]:
    """Return the scores of a question from the ln P of its choices.

    `correct`, `correct_norm` and `correct_bytes` are 1 or 0; `confidence` is the probability of the choice
    of the highest ln P.
    """
    logprob, gold, texts = np.asarray(logprobs, np.float64), question.gold, question.continuations
    sizes = [len(text.encode()) for text in texts]
    probability = np.exp(logprob - logprob.max())
    probability /= probability.sum()
    one_hot = np.arange(len(texts)) == gold
    return {
        "correct": float(logprob.argmax() == gold),
        "correct_norm": float(choose(logprob, [len(text) for text in texts]) == gold),
        "correct_bytes": float(choose(logprob, sizes) == gold),
        "gold_bits_per_byte": -float(logprob[gold]) / math.log(2) / max(1, sizes[gold]),
        "brier": float(((probability - one_hot) ** 2).sum()),
        "confidence": float(probability.max()),
    }


def _build_example(
    model: LanguageModel, item: ChoiceItem, windows: Sequence[Window], scores: Sequence[WindowScores]
) -> Example:
    question, gold = item.question, item.question.gold
    logprobs = [float(score.logprobs.sum()) for score in scores]
    return Example(
        id=item.id,
        prompt=(item.prefix + question.contexts[gold])[-PROMPT_CHARACTERS:],
        expected=question.labels[gold],
        prediction=question.labels[int(np.argmax(logprobs))],
        scores=score_question(question, logprobs),
        tokens=score_tokens(model.tokenizer, windows[gold].targets, scores[gold]),
        choices=list(zip(question.labels, logprobs, strict=True)),
        tags=dict(question.tags),
    )


def compute_metrics(examples: Sequence[Example]) -> dict[str, Metric]:
    """Compute the metrics of the module's table from the examples' scores."""
    columns = {
        name: [example.scores[name] for example in examples]
        for name in ("correct", "correct_norm", "correct_bytes", "gold_bits_per_byte", "brier", "confidence")
    }

    def accuracy(score: str, rate: str) -> Metric:
        hits = [value == 1 for value in columns[score]]
        definition = f"questions whose answer has the highest ln P{rate} of all choices"
        return metrics.proportion(hits, definition, example_score=score)

    return {
        "accuracy": accuracy("correct", ""),
        "accuracy_norm": accuracy("correct_norm", " per character"),
        "accuracy_bytes": accuracy("correct_bytes", " per UTF-8 byte"),
        "bits_per_byte": metrics.mean(
            columns["gold_bits_per_byte"],
            "mean over questions of -log2 P of the answer over its UTF-8 bytes",
            higher_is_better=False,
            example_score="gold_bits_per_byte",
        ),
        "calibration_error": Metric(
            value=calibration_error(columns["confidence"], columns["correct"]),
            definition=(
                f"expected calibration error: {CALIBRATION_BINS} bins of equal width over the probability of "
                "the chosen answer (softmax of ln P over the choices), the mean of |accuracy - mean "
                "probability| of a bin, weighted by its questions; no standard error"
            ),
            count=len(examples),
            higher_is_better=False,
        ),
        "brier": metrics.mean(
            columns["brier"],
            "mean over questions of the squared distance between the choices' probabilities and the answer",
            higher_is_better=False,
            example_score="brier",
        ),
    }


def calibration_error(confidences: Sequence[float], hits: Sequence[float]) -> float:
    """Return the expected calibration error (Guo et al., arXiv:1706.04599, eq. 3)."""
    confidence, hit = np.asarray(confidences), np.asarray(hits)
    # bins (0, 0.1], (0.1, 0.2], ...
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, weights=hit - confidence, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum()) / len(confidence)


def group_accuracies(examples: Sequence[Example], group: str) -> dict[str, Metric]:
    """Return the accuracy of each value of a tag, by the name accuracy_VALUE; none if all have one value."""
    values = sorted({example.tags[group] for example in examples if group in example.tags})
    if len(values) < 2:
        return {}
    return {
        f"accuracy_{value}": metrics.proportion(
            [example.scores["correct"] == 1 for example in examples if example.tags.get(group) == value],
            f"accuracy of the questions whose {group} is {value}",
        )
        for value in values
    }
