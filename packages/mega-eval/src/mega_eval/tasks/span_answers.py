"""Answers in passages (SQuAD 1.1 and 2.0) by a fine-tuned encoder.

Metrics, by the formulas of SQuAD's scripts, as fractions:

    exact_match, f1                 of all questions
    HasAns_exact, HasAns_f1, ...    SQuAD 2.0: of the questions with an answer, and without (NoAns)
    best_exact, best_f1             SQuAD 2.0: at the best threshold of the score of no answer (.._thresh)
    loss                            mean of -ln P of begin and end over the windows

The questions of a passage are not independent: intervals are percentiles of a bootstrap over passages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mega_eval import metrics
from mega_eval.metrics import Metric
from mega_eval.models.classifier_model import ClassifierModel
from mega_eval.paired_statistics import bootstrap_ratios, percentile_interval
from mega_eval.task_result import Example, TaskResult
from mega_schema.task_heads import SPAN_LABELS
from mega_schema.tasks.pair_features import SpecialIds
from mega_schema.tasks.span_features import SpanWindows
from mega_schema.tasks.span_options import SpanOptions
from mega_schema.tasks.span_predictions import SpanPredictions
from mega_schema.tasks.squad_examples import SpanExample

CONVENTION = "spans"
_PROMPT_CHARACTERS = 2000
_RESAMPLES, _SEED = 1000, 1234
_DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {"exact_match": "the answer equals an accepted one", "f1": "word F1 with the best accepted answer"}
)


def evaluate(
    model: ClassifierModel,
    examples: Sequence[SpanExample],
    options: SpanOptions,
    *,
    length: int,
    batch_size: int | None,
    allows_null: bool,
    is_whole: bool,
    on_progress: Callable[[int], object] = lambda count: None,
) -> TaskResult:
    """Answer the questions.

    Args:
        length: tokens of a question with a window of its passage.
        allows_null: whether a question may have no answer.
        is_whole: whether these are all questions of the file.
        on_progress: called with the number of windows of each batch.
    """
    special = SpecialIds.from_tokenizer(model.tokenizer)
    windows = SpanWindows(examples, model.tokenizer, special, length, options)
    logits = np.zeros((len(windows), length, len(SPAN_LABELS)), np.float32)
    for numbers, batch in model.compute_logits(windows, batch_size):
        outputs = batch.reshape(len(numbers), -1, len(SPAN_LABELS))
        logits[numbers, : outputs.shape[1]] = outputs
        on_progress(len(numbers))
    predictions = SpanPredictions(windows, logits, options, allows_null=allows_null)
    return TaskResult(
        task="squad",
        convention=CONVENTION,
        metrics=_compute_metrics(predictions),
        counts={
            "questions": len(examples),
            "questions_without_answer": sum(not example.answers for example in examples),
            "windows": len(windows),
        },
        examples=[_build_example(predictions, number) for number in range(len(examples))],
        is_whole=is_whole,
        tokens_read=windows.total_tokens,
    )


def _build_example(predictions: SpanPredictions, number: int) -> Example:
    example = predictions.examples[number]
    exact, f1 = predictions.scores[number].tolist()
    answers = list(dict.fromkeys(answer.text for answer in example.answers or ()))
    return Example(
        id=example.id,
        prompt=f"{example.context}\n{example.question}"[-_PROMPT_CHARACTERS:],
        expected=" | ".join(answers),
        prediction=predictions.texts[number],
        scores={"exact_match": exact, "f1": f1},
        tags={"answerable": str(bool(answers)).lower()} if predictions.allows_null else {},
    )


def _compute_metrics(predictions: SpanPredictions) -> dict[str, Metric]:
    values = predictions.metrics()
    has_answer = np.array([bool(example.answers) for example in predictions.examples])
    groups = {"": np.ones(len(has_answer), bool), "HasAns_": has_answer, "NoAns_": ~has_answer}
    result = dict[str, Metric]()
    for prefix, is_of_group in groups.items():
        for column, (score, definition) in enumerate(_DEFINITIONS.items()):
            name = score if not prefix else f"{prefix}{score.removesuffix('_match')}"
            if name in values:
                scores = predictions.scores[:, column]
                result[name] = _bootstrap(
                    predictions, scores, is_of_group, definition, "" if prefix else score
                )
    for name in ("best_exact", "best_f1"):
        if name in values:
            for key, what in ((name, "at the best threshold"), (f"{name}_thresh", "the best threshold")):
                result[key] = Metric(
                    value=values[key],
                    definition=f"{what} of the score of no answer, chosen on these questions",
                    count=len(has_answer),
                    higher_is_better=True if key == name else None,
                )
    result["loss"] = metrics.mean(
        predictions.window_losses.tolist(),
        "mean of -ln P of begin and end over the windows, in nats",
        higher_is_better=False,
    )
    return result


def _bootstrap(
    predictions: SpanPredictions,
    score_N: NDArray[np.float64],
    is_of_group_N: NDArray[np.bool_],
    definition: str,
    example_score: str,
) -> Metric:
    """Return the mean score of a group of questions, with an interval of a bootstrap over passages."""
    numbers = {
        text: number for number, text in enumerate(dict.fromkeys(e.context for e in predictions.examples))
    }
    passage_N = np.array([numbers[example.context] for example in predictions.examples])[is_of_group_N]
    sums, counts = (
        np.bincount(passage_N, weights)[np.unique(passage_N)][:, None]
        for weights in (score_N[is_of_group_N], np.ones(len(passage_N)))
    )
    draws = bootstrap_ratios(sums, counts, resamples=_RESAMPLES, seed=_SEED)[:, 0]
    stderr = float(draws.std(ddof=1))
    return Metric(
        value=float(score_N[is_of_group_N].mean()),
        definition=f"{definition}; questions, bootstrap over passages",
        count=int(is_of_group_N.sum()),
        stderr=stderr if len(sums) > 1 else None,
        interval=percentile_interval(draws) if stderr and len(sums) > 1 else None,
        higher_is_better=True,
        example_score=example_score or None,
    )
