"""Classification of texts and pairs of texts, and multiple choice, by a fine-tuned encoder.

Metrics:

    accuracy        the class of the highest logit is the label
    f1              QQP: F1 of class 1
    macro_f1        others: the mean F1 of the classes that are a label or predicted
    loss            mean of -ln P of the label
    accuracy_NAME   of several files, the accuracy of each (`dev_matched`; `middle`, `high`)

The first of equal logits wins. The intervals of both F1 are linearised: a ratio of sums, and the mean of such
ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mega_eval import metrics
from mega_eval.metrics import Z95, Metric
from mega_eval.models.classifier_model import ClassifierModel
from mega_eval.task_result import Example, TaskResult
from mega_schema.tasks.class_metrics import f1_of_class
from mega_schema.tasks.class_predictions import ClassPredictions
from mega_schema.tasks.pair_examples import PairExample
from mega_schema.tasks.pair_features import EncodedExamples, SpecialIds
from mega_schema.tasks.race_examples import LabelledExample

CONVENTION = "classification"
_PROMPT_CHARACTERS = 2000


def evaluate(
    model: ClassifierModel,
    files: Mapping[str, Sequence[LabelledExample]],
    labels: Sequence[str],
    *,
    task: str,
    length: int,
    batch_size: int | None,
    binary: bool,
    is_whole: bool,
    on_progress: Callable[[int], object] = lambda count: None,
) -> TaskResult:
    """Classify the examples of every file.

    Args:
        files: examples by the name of their file.
        labels: the classes in the order of the model's logits, by the names of the data.
        length: tokens of the longest sample; longer texts are cut.
        binary: F1 is that of class 1.
        is_whole: whether these are all examples.
        on_progress: called with the number of examples of each batch.
    """
    pairs = [(name, example) for name, examples in files.items() for example in examples]
    examples = [example for _, example in pairs]
    special = SpecialIds.from_tokenizer(model.tokenizer)
    samples = EncodedExamples(examples, model.tokenizer, special, length, labels)
    logits = np.zeros((len(examples), len(labels)), np.float32)
    for numbers, batch in model.compute_logits(samples, batch_size):
        logits[numbers] = batch
        on_progress(len(numbers))
    predictions = ClassPredictions(examples, labels, logits)
    rows = [
        _build_example(predictions, number, name if len(files) > 1 else "")
        for number, (name, _) in enumerate(pairs)
    ]
    values = _compute_metrics(predictions, rows, binary=binary)
    if len(files) > 1:
        values |= {
            f"accuracy_{name}": metrics.proportion(
                [row.scores["correct"] == 1 for row in rows if row.tags["file"] == name],
                f"accuracy of the examples of {name}",
            )
            for name in files
        }
    return TaskResult(
        task=task,
        convention=CONVENTION,
        metrics=values,
        counts={
            "examples": len(examples),
            "correct": int((predictions.classes == predictions.label_numbers).sum()),
            "examples_cut": int((samples.token_counts == length).sum()),
        },
        examples=rows,
        is_whole=is_whole,
        tokens_read=samples.total_tokens,
    )


def _build_example(predictions: ClassPredictions, number: int, file: str) -> Example:
    example = predictions.examples[number]
    logprobs = predictions.log_probabilities[number]
    label, prediction = int(predictions.label_numbers[number]), int(predictions.classes[number])
    if isinstance(example, PairExample):
        texts = [example.first, example.second or ""]
    else:
        texts = [example.article, *example.choices]
    return Example(
        id=f"{file}:{example.id}" if file else example.id,
        prompt="\n".join(texts).strip()[-_PROMPT_CHARACTERS:],
        expected=predictions.labels[label],
        prediction=predictions.labels[prediction],
        scores={
            "correct": float(label == prediction),
            "loss": -float(logprobs[label]),
            "f1_hits": 2.0 * (label == prediction == 1),
            "f1_hits_weight": float((label == 1) + (prediction == 1)),
        },
        choices=list(zip(predictions.labels, logprobs.tolist(), strict=True)),
        tags={"file": file} if file else {},
    )


def _compute_metrics(
    predictions: ClassPredictions, rows: Sequence[Example], *, binary: bool
) -> dict[str, Metric]:
    column = {name: [row.scores[name] for row in rows] for name in rows[0].scores}
    values = {
        "accuracy": metrics.proportion(
            [value == 1 for value in column["correct"]],
            "examples whose label has the highest logit",
            example_score="correct",
        )
    }
    if not binary:
        values["macro_f1"] = macro_f1(predictions.label_numbers, predictions.classes, len(predictions.labels))
    elif any(column["f1_hits_weight"]):
        values["f1"] = metrics.ratio(
            column["f1_hits"],
            column["f1_hits_weight"],
            "2 TP / (2 TP + FP + FN) of class 1",
            higher_is_better=True,
            example_score="f1_hits",
        )
    values["loss"] = metrics.mean(
        column["loss"],
        "mean of -ln P of the label, in nats",
        higher_is_better=False,
        example_score="loss",
    )
    return values


def macro_f1(label_N: NDArray[np.int64], prediction_N: NDArray[np.int64], classes: int) -> Metric:
    """Return the mean F1 of the classes that are a label or predicted, with its linearised standard error."""
    count = len(label_N)
    present = [k for k in range(classes) if (label_N == k).any() or (prediction_N == k).any()]
    scores = []
    residual_N = np.zeros(count)
    for number in present:
        is_label, is_prediction = label_N == number, prediction_N == number
        score = f1_of_class(label_N, prediction_N, number)
        weight_N = is_label.astype(np.float64) + is_prediction
        hit_N = 2.0 * (is_label & is_prediction)
        residual_N += (hit_N - score * weight_N) / weight_N.sum() / len(present)
        scores.append(score)
    value = float(np.mean(scores))
    stderr = math.sqrt(count / max(1, count - 1) * float(residual_N @ residual_N))
    return Metric(
        value=value,
        definition="mean over the classes of 2 TP / (2 TP + FP + FN)",
        count=count,
        stderr=stderr if count > 1 else None,
        interval=(value - Z95 * stderr, value + Z95 * stderr) if stderr and count > 1 else None,
        higher_is_better=True,
    )
