"""Metrics of a result on its contaminated and on its clean examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mega_eval import metrics
from mega_eval.comparison import ScoreColumn, find_column
from mega_eval.metrics import Metric
from mega_eval.result_reader import EvaluationResult
from mega_schema.errors import FormatError


@dataclass(frozen=True, slots=True)
class SubsetMetric:
    """A metric on two subsets of the examples.

    Attributes:
        difference: dirty minus clean.
        interval: its 95 % interval, from those of the two subsets (Zou and Donner 2008, doi:10.1002/sim.3095;
            for proportions it is Newcombe's hybrid score interval); None where one has no interval.
    """

    clean: Metric
    dirty: Metric
    difference: float
    interval: tuple[float, float] | None


def split_metrics(result: EvaluationResult, is_dirty: Mapping[str, bool]) -> dict[str, SubsetMetric]:
    """Compute every metric that is made from example scores on both subsets.

    Args:
        is_dirty: whether an example is contaminated, by its id.

    Returns:
        the metrics by name, without those that have no examples in one of the subsets.

    Raises:
        FormatError: an example of the result is not in `is_dirty`.
    """
    ids = sorted(example.id for example in result.examples)
    if unknown := next((name for name in ids if name not in is_dirty), None):
        raise FormatError(
            result.path,
            "its examples are not those of the file",
            found=unknown,
            wanted=f"ids such as {next(iter(is_dirty), 'none')}",
        )
    mask = np.array([is_dirty[name] for name in ids], np.bool_)
    if mask.all() or not mask.any():
        return {}
    subsets = {}
    for name, metric in result.metrics.items():
        column = find_column(result, metric)
        if column is None:
            continue
        is_dirty_row = mask[list(column.rows)]
        if is_dirty_row.all() or not is_dirty_row.any():
            continue
        clean, dirty = _compute_metric(column, ~is_dirty_row), _compute_metric(column, is_dirty_row)
        subsets[name] = SubsetMetric(clean, dirty, dirty.value - clean.value, _interval(clean, dirty))
    return subsets


def _compute_metric(column: ScoreColumn, mask: npt.NDArray[np.bool_]) -> Metric:
    metric = column.metric
    if column.is_binary:
        return metrics.proportion((column.numerators[mask] == 1).tolist(), metric.definition)
    base = metrics.ratio(column.numerators[mask], column.weights[mask], metric.definition)
    if metric.max_exponent is None:
        return metrics.scale_metric(base, metric.scale, metric.definition)
    return metrics.exponential(base, metric.definition, scale=metric.scale, max_exponent=metric.max_exponent)


def _interval(clean: Metric, dirty: Metric) -> tuple[float, float] | None:
    if clean.interval is None or dirty.interval is None:
        return None
    difference = dirty.value - clean.value
    below = math.hypot(dirty.value - dirty.interval[0], clean.interval[1] - clean.value)
    above = math.hypot(dirty.interval[1] - dirty.value, clean.value - clean.interval[0])
    return difference - below, difference + above
