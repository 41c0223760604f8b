"""The answers that a model predicts to the questions of a file, and their metrics, as SQuAD defines them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mega_schema.tasks.answer_text import score_answer
from mega_schema.tasks.pair_features import IGNORED
from mega_schema.tasks.span_features import CLS_POSITION, SpanWindows
from mega_schema.tasks.span_options import SpanOptions
from mega_schema.tasks.squad_examples import SpanExample

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AnswerCandidate:
    """A part of the passage, or no answer: the empty text.

    Attributes:
        score: sum of the logits of its begin and of its end.
    """

    text: str
    score: float


class SpanPredictions:
    """The answers to the questions of a file.

    Attributes:
        allows_null: whether a question may have no answer, as in SQuAD 2.0.
    """

    def __init__(
        self,
        windows: SpanWindows,
        logits: NDArray[np.floating],
        options: SpanOptions,
        *,
        allows_null: bool,
    ) -> None:
        """Find the answers.

        Args:
            logits: (W, L, 2) of begin and end at the tokens of every window.
        """
        self.examples: Sequence[SpanExample] = windows.examples
        self.allows_null = allows_null
        self._windows = windows
        self._logits = logits.astype(np.float64)
        self._options = options

    @property
    def has_labels(self) -> bool:
        """Whether the file has the right answers."""
        return self.examples[0].answers is not None

    @cached_property
    def window_losses(self) -> Floats:
        """Mean of -ln P of begin and end, (W,), for the first accepted answer."""
        labels = np.array([(w.start_label, w.end_label) for w in self._windows.windows])
        assert (labels != IGNORED).all()
        width = self._logits.shape[1]
        is_real = np.arange(width) < self._windows.token_counts[:, None]
        logits = np.where(is_real[..., None], self._logits, -np.inf)
        highest = logits.max(1)
        log_sums = highest + np.log(np.exp(logits - highest[:, None]).sum(1))
        label_logits = np.take_along_axis(logits, labels[:, None], 1)[:, 0]
        losses: Floats = (log_sums - label_logits).mean(1)
        return losses

    @property
    def loss(self) -> float:
        """Mean loss of the windows."""
        return float(self.window_losses.mean())

    @cached_property
    def candidates(self) -> list[list[AnswerCandidate]]:
        """The best answers of every question, the best first; different texts, without the empty one."""
        by_example: list[list[AnswerCandidate]] = [[] for _ in self.examples]
        for numbers in self._windows_of_examples:
            for rank, number in enumerate(numbers):
                is_best = self._best_windows(numbers)[rank]
                by_example[self._windows.windows[number].example] += self._find_candidates(number, is_best)
        return [self._choose(candidates) for candidates in by_example]

    @cached_property
    def null_scores(self) -> Floats:
        """The score of no answer of every question: the least of its windows', at [CLS]."""
        scores = self._logits[:, CLS_POSITION].sum(1)
        return np.array([scores[numbers].min() for numbers in self._windows_of_examples])

    @cached_property
    def null_score_differences(self) -> Floats:
        """The score of no answer less that of the best answer; infinite without a candidate."""
        best = [candidates[0].score if candidates else -np.inf for candidates in self.candidates]
        differences: Floats = self.null_scores - np.array(best)
        return differences

    @cached_property
    def texts(self) -> list[str]:
        """The predicted answer of every question; empty: none."""
        threshold = self._options.null_score_diff_threshold
        is_null = self.null_score_differences > threshold
        return [
            "" if not candidates or (self.allows_null and null) else candidates[0].text
            for candidates, null in zip(self.candidates, is_null, strict=True)
        ]

    @cached_property
    def scores(self) -> Floats:
        """Exact match and F1 of every question, (N, 2)."""
        return self._score(self.texts)

    def metrics(self) -> dict[str, float]:
        """Return exact match and F1; of SQuAD 2.0 also by kind of question, and at the best threshold."""
        exact, f1 = self.scores.mean(0).tolist()
        values = {"exact_match": exact, "f1": f1}
        if not self.allows_null:
            return values
        has_answer = np.array([bool(example.answers) for example in self.examples])
        for name, is_of_kind in (("HasAns", has_answer), ("NoAns", ~has_answer)):
            if is_of_kind.any():
                exact, f1 = self.scores[is_of_kind].mean(0).tolist()
                values |= {f"{name}_exact": exact, f"{name}_f1": f1}
        best_texts = [candidates[0].text if candidates else "" for candidates in self.candidates]
        scores = self._score(best_texts)
        for name, score_N in zip(("exact", "f1"), scores.T, strict=True):
            value, threshold = find_best_threshold(
                score_N, self.null_score_differences, has_answer, np.array([bool(t) for t in best_texts])
            )
            values |= {f"best_{name}": value, f"best_{name}_thresh": threshold}
        return values

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield what a line of a file of predictions says of a question."""
        for number, example in enumerate(self.examples):
            candidates = self.candidates[number]
            row: dict[str, object] = {"id": example.id, "prediction": self.texts[number]}
            if example.answers is not None:
                exact, f1 = self.scores[number].tolist()
                answers = [answer.text for answer in example.answers]
                row |= {"answers": answers, "exact_match": exact, "f1": round(f1, 6)}
            if self.allows_null:
                difference = float(self.null_score_differences[number])
                row["null_score_diff"] = round(difference, 6) if np.isfinite(difference) else None
            row["candidates"] = [{"text": c.text, "score": round(c.score, 6)} for c in candidates]
            yield row

    def _score(self, texts: Sequence[str]) -> Floats:
        pairs = zip(texts, self.examples, strict=True)
        return np.array(
            [score_answer(text, [answer.text for answer in e.answers or ()]) for text, e in pairs]
        )

    @cached_property
    def _windows_of_examples(self) -> list[range]:
        counts = np.bincount([window.example for window in self._windows.windows])
        ends = np.cumsum(counts).tolist()
        return [range(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]

    def _best_windows(self, numbers: range) -> list[NDArray[np.bool_]]:
        """Return for each window of a question whether it gives each of its tokens the most context.

        As in BERT, that is the lesser number of tokens on its two sides; of equal windows, the first
        longest one.
        """
        windows = [self._windows.windows[number] for number in numbers]
        contexts = np.full((len(windows), windows[-1].end), -1.0)
        for row, window in zip(contexts, windows, strict=True):
            token_t = np.arange(window.begin, window.end)
            nearest = np.minimum(token_t - window.begin, window.end - 1 - token_t)
            row[window.begin : window.end] = nearest + 0.01 * (window.end - window.begin)
        best = contexts.argmax(0)
        return [best[window.begin : window.end] == row for row, window in enumerate(windows)]

    def _find_candidates(self, number: int, is_best: NDArray[np.bool_]) -> Iterator[AnswerCandidate]:
        """Yield the answers of a window; they begin where the window gives a token the most context."""
        window, passage = self._windows.windows[number], self._windows.passage(number)
        first = self._windows.first_position(number)
        start_t, end_t = self._logits[number, first : first + window.end - window.begin].T
        count = self._options.n_best_size
        start_S, end_E = (np.argsort(-logits, kind="stable")[:count] for logits in (start_t, end_t))
        tokens = end_E[None] - start_S[:, None]
        is_valid = (tokens >= 0) & (tokens < self._options.max_answer_length) & is_best[start_S][:, None]
        score_SE = start_t[start_S][:, None] + end_t[end_E]
        rows, columns = np.nonzero(is_valid)
        order = np.argsort(-score_SE[rows, columns], kind="stable")[:count]
        context = self.examples[window.example].context
        for row, column in zip(rows[order], columns[order], strict=True):
            begin = passage.begins[window.begin + start_S[row]]
            end = passage.ends[window.begin + end_E[column]]
            yield AnswerCandidate(context[begin:end].strip(), float(score_SE[row, column]))

    def _choose(self, candidates: Sequence[AnswerCandidate]) -> list[AnswerCandidate]:
        by_text = dict[str, AnswerCandidate]()
        for candidate in sorted(candidates, key=lambda candidate: -candidate.score):
            if candidate.text:
                by_text.setdefault(candidate.text, candidate)
        return list(by_text.values())[: self._options.n_best_size]


def find_best_threshold(
    score_N: Floats, null_difference_N: Floats, has_answer_N: NDArray[np.bool_], predicts_N: NDArray[np.bool_]
) -> tuple[float, float]:
    """Return the best mean score over all thresholds, and its threshold, as SQuAD 2.0's script does.

    Args:
        score_N: of the best answer of every question, whatever its null score.
        null_difference_N: a question is answered if this does not exceed the threshold.
        has_answer_N: whether the question has an answer.
        predicts_N: whether there is a text to answer with.
    """
    order = np.argsort(null_difference_N, kind="stable")
    gains = np.where(has_answer_N, score_N, -predicts_N.astype(np.float64))[order]
    totals = (~has_answer_N).sum() + np.concatenate(([0.0], np.cumsum(gains)))
    best = int(totals.argmax())
    threshold = float(null_difference_N[order[best - 1]]) if best else 0.0
    return float(totals[best]) / len(score_N), threshold
