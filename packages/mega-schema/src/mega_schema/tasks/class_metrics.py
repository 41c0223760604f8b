"""Metrics of classification from the classes of the labels and of the predictions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mega_schema.tasks.pair_tasks import f1_name

Ints = NDArray[np.int64]


def accuracy(label_N: Ints, prediction_N: Ints) -> float:
    """Return the share of equal classes."""
    return float((label_N == prediction_N).mean())


def f1_of_class(label_N: Ints, prediction_N: Ints, number: int) -> float:
    """Return 2 TP / (2 TP + FP + FN) of a class; 0 if it is neither a label nor predicted."""
    is_label, is_prediction = label_N == number, prediction_N == number
    denominator = int(is_label.sum() + is_prediction.sum())
    return 2 * int((is_label & is_prediction).sum()) / denominator if denominator else 0.0


def macro_f1(label_N: Ints, prediction_N: Ints, classes: int) -> float:
    """Return the mean F1 of the classes that are a label or predicted."""
    present = [k for k in range(classes) if (label_N == k).any() or (prediction_N == k).any()]
    return float(np.mean([f1_of_class(label_N, prediction_N, k) for k in present]))


def class_metrics(label_N: Ints, prediction_N: Ints, classes: int, *, binary: bool) -> dict[str, float]:
    """Return accuracy and F1 by name.

    Args:
        binary: F1 is that of class 1, as for QQP; else the mean over the classes.
    """
    f1 = f1_of_class(label_N, prediction_N, 1) if binary else macro_f1(label_N, prediction_N, classes)
    return {"accuracy": accuracy(label_N, prediction_N), f1_name(binary=binary): f1}
