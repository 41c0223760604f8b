"""Compare results of several models on the same examples, pair by pair."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from mega_eval import paired_statistics
from mega_eval.metrics import Metric
from mega_eval.paired_statistics import Floats
from mega_eval.result_reader import EvaluationResult
from mega_eval.task_result import Example
from mega_schema.errors import ConfigError, FormatError

Pairs = Literal["first", "all"]
_RELATIVE_TOLERANCE = 1e-6  # between a metric and its value computed again from the examples
_MAX_TEXT = 40  # characters of a text in a message
_MAX_NAMES = 3  # metrics that a note names


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """A metric of two results on the same examples.

    Attributes:
        first, second: names of the models.
        values: the metric of the first and of the second result.
        difference: second minus first.
        interval: 95 % interval of the difference, from the paired bootstrap.
        p_value: of "no difference", two-sided.
        q_value: the p-value adjusted for all comparisons that were made together.
        test: "mcnemar" for 0/1 scores, else "bootstrap".
        discordant: examples that only the first, and only the second model answers correctly; of "mcnemar".
        count: examples.
    """

    task: str
    convention: str
    metric: str
    first: str
    second: str
    values: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    p_value: float
    test: str
    discordant: tuple[int, int] | None
    count: int
    higher_is_better: bool | None
    q_value: float = math.nan

    def verdict(self, level: float) -> str:
        """Return "better", "worse" or "different" for the second model if q is below the level, else ""."""
        if self.q_value >= level:
            return ""
        if self.higher_is_better is None:
            return "different"
        return "better" if (self.difference > 0) == self.higher_is_better else "worse"


@dataclass(frozen=True, slots=True)
class ScoreColumn:
    """The scores of one metric over the examples of one result, in the order of the ids.

    Attributes:
        numerators, weights: (rows,); the metric is made from Σ numerators / Σ weights.
        rows: numbers of the examples that have the score, in the order of the ids; the last words of
            `perplexity` and the tasks of `core` are some of the examples.
    """

    metric: Metric
    numerators: Floats
    weights: Floats
    rows: tuple[int, ...]

    def to_values(self, ratios: Floats) -> Floats:
        """Return the metric's values from ratios of sums."""
        scaled = self.metric.scale * ratios
        if self.metric.max_exponent is None:
            return scaled
        values: Floats = np.exp(np.minimum(self.metric.max_exponent, scaled))
        return values

    @property
    def value(self) -> float:
        """The metric, computed again from the examples."""
        return float(self.to_values(self.numerators.sum(keepdims=True) / self.weights.sum())[0])

    @property
    def is_binary(self) -> bool:
        """Whether the metric is a mean of zeros and ones."""
        is_mean = (
            self.metric.scale == 1 and self.metric.max_exponent is None and bool((self.weights == 1).all())
        )
        return is_mean and bool(np.isin(self.numerators, (0.0, 1.0)).all())


def compare_results(
    results: Sequence[EvaluationResult], *, pairs: Pairs = "first", resamples: int = 10_000, seed: int = 1234
) -> tuple[list[MetricComparison], list[str]]:
    """Compare every metric that examples can be paired by, and adjust the p-values over all comparisons.

    Args:
        pairs: "first" compares each result with the first of its task; "all" compares every two.
        resamples, seed: of the bootstrap.

    Returns:
        the comparisons, and notes about what a reader must know or what was left out.

    Raises:
        FormatError: two results are not of the same task, convention, data and examples.
        ConfigError: a result is given twice.
    """
    _check_paths(results)
    comparisons, notes = [], []
    for group in group_results(results):
        for result in group[1:]:
            _check_examples(group[0], result)
            notes += list(_list_differences(group[0], result))
        names = _name_models(group)
        for left, right in itertools.combinations(range(len(group)), 2):
            if left == 0 or pairs == "all":
                pair, pair_names = (group[left], group[right]), (names[left], names[right])
                metrics, omissions = _compare_pair(pair, pair_names, resamples=resamples, seed=seed)
                comparisons += metrics
                notes += omissions
    q_values = paired_statistics.benjamini_hochberg([comparison.p_value for comparison in comparisons])
    adjusted = [replace(c, q_value=q) for c, q in zip(comparisons, q_values, strict=True)]
    return adjusted, list(dict.fromkeys(notes))


def _check_paths(results: Sequence[EvaluationResult]) -> None:
    """Check that no result is given twice.

    Raises:
        ConfigError: one is.
    """
    paths = [result.path.resolve() for result in results]
    for index, (path, result) in enumerate(zip(paths, results, strict=True)):
        if path in paths[:index]:
            raise ConfigError(
                result.path,
                "is given twice",
                wanted="results of different models",
                hint="name the result of the other model",
            )


def group_results(results: Sequence[EvaluationResult]) -> list[list[EvaluationResult]]:
    """Group results that can be paired: of one task, convention and data.

    Raises:
        FormatError: a result has no partner; the message names the first difference from the nearest result.
    """
    groups: dict[tuple[object, ...], list[EvaluationResult]] = {}
    for result in results:
        groups.setdefault(_key(result), []).append(result)
    for group in reversed(groups.values()):  # the first file is what the user compares with
        if len(group) == 1:
            raise _missing_partner_error(group[0], [result for result in results if result is not group[0]])
    return list(groups.values())


def _key(result: EvaluationResult) -> tuple[object, ...]:
    return result.task, result.convention, result.data_hashes


def _missing_partner_error(lone: EvaluationResult, candidates: Sequence[EvaluationResult]) -> FormatError:
    def count_equal(candidate: EvaluationResult) -> int:
        pairs = zip(_key(lone), _key(candidate), strict=True)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    if not candidates:
        return FormatError(lone.path, "nothing to compare it with", wanted="two results at least")
    partner = max(candidates, key=count_equal)
    equal = count_equal(partner)
    what = ("task", "convention", "sha256 of the data")[equal]
    values = [_key(result)[equal] for result in (lone, partner)]
    shown = [", ".join(d[:12] for d in value) if isinstance(value, tuple) else value for value in values]
    return FormatError(
        f"{lone.path}: {what}",
        "differs",
        found=shown[0] or "none",
        wanted=f"{shown[1]}, that of {partner.path}",
    )


def _check_examples(first: EvaluationResult, second: EvaluationResult) -> None:
    """Check that two results have the same examples.

    Raises:
        FormatError: their ids or their expected answers differ.
    """
    ours, theirs = (_examples_by_key(result) for result in (second, first))
    hint = "evaluate both models with the same file and the same --limit"
    for where, names, wanted in ((second, ours, theirs), (first, theirs, ours)):
        if missing := next((name for name in wanted if name not in names), None):
            found = f"{len(names):,} examples without {missing}"
            raise FormatError(
                f"{where.path}: examples", "differ", found=found, wanted=f"{len(wanted):,}", hint=hint
            )
    for name, example in ours.items():
        texts = [answer.expected.strip() for answer in (example, theirs[name])]
        if texts[0] != texts[1]:
            shown = [repr(text[:_MAX_TEXT]) for text in texts]
            raise FormatError(
                f"{second.path}: expected answer of {name}",
                "differs",
                found=shown[0],
                wanted=f"{shown[1]}, that of {first.path}",
                hint="tokens and windows of different tokenizers cannot be paired",
            )


def _examples_by_key(result: EvaluationResult) -> dict[str, Example]:
    """Return the examples by their ids, without the name of the file if they are lines of a single one.

    Equal files can have different names; their order by id is the same.
    """
    names = {example.id.rpartition(":")[0] for example in result.examples}
    start = len(names.pop()) + 1 if len(names) == 1 and "" not in names else 0
    return {example.id[start:]: example for example in result.examples}


def _list_differences(first: EvaluationResult, second: EvaluationResult) -> Iterator[str]:
    """Yield notes about what differs between two results besides the model."""
    options = [result.record["options"] for result in (first, second)]
    for name in dict.fromkeys((*options[0], *options[1])):
        values = [record.get(name) for record in options]
        if values[0] != values[1]:
            yield f"option {name} differs: {values[0]} in {first.path}, {values[1]} in {second.path}"
    dtypes = [result.record["model"]["dtype"] for result in (first, second)]
    if dtypes[0] != dtypes[1]:
        yield f"dtype differs: {dtypes[0]} in {first.path}, {dtypes[1]} in {second.path}"
    models = [result.record["model"]["sha256"] for result in (first, second)]
    if models[0] == models[1]:
        yield f"one model: {first.path} and {second.path} have the same weights"
    for result in (first, second):
        if not result.record["publishable"]:
            yield f"{result.path} is not publishable: examples were left out"


def _name_models(group: Sequence[EvaluationResult]) -> list[str]:
    names = [result.model_name for result in group]
    return [
        f"{name} ({result.path.name})" if names.count(name) > 1 else name
        for name, result in zip(names, group, strict=True)
    ]


def _compare_pair(
    pair: tuple[EvaluationResult, EvaluationResult], names: tuple[str, str], *, resamples: int, seed: int
) -> tuple[list[MetricComparison], list[str]]:
    columns: dict[str, tuple[ScoreColumn, ScoreColumn]] = {}
    omissions = []
    for name, metric in pair[0].metrics.items():
        if name not in pair[1].metrics:
            continue
        first, second = (find_column(result, result.metrics[name]) for result in pair)
        if first is not None and second is not None and first.rows == second.rows:
            columns[name] = first, second
        elif metric.interval is not None:
            omissions.append(name)
    if not columns:
        raise FormatError(pair[1].path, "has no metric whose examples can be paired")
    draws: dict[str, Floats] = {}
    for rows in dict.fromkeys(first.rows for first, _ in columns.values()):
        draws |= _draw_differences(
            {name: both for name, both in columns.items() if both[0].rows == rows}, resamples, seed
        )
    metrics = [_compare_metric(pair, names, name, both, draws[name]) for name, both in columns.items()]
    return metrics, [_describe_omissions(pair[0].task, omissions)] if omissions else []


def _draw_differences(
    columns: Mapping[str, tuple[ScoreColumn, ScoreColumn]], resamples: int, seed: int
) -> dict[str, Floats]:
    """Return bootstrap draws of the difference of each metric; all metrics are of the same examples."""
    flat = [column for both in columns.values() for column in both]
    ratios = paired_statistics.bootstrap_ratios(
        np.stack([column.numerators for column in flat], axis=1),
        np.stack([column.weights for column in flat], axis=1),
        resamples=resamples,
        seed=seed,
    )
    values = [column.to_values(ratios[:, index]) for index, column in enumerate(flat)]
    return {name: values[2 * index + 1] - values[2 * index] for index, name in enumerate(columns)}


def _describe_omissions(task: str, metrics: Sequence[str]) -> str:
    shown = ", ".join(metrics[:_MAX_NAMES]) + (", ..." if len(metrics) > _MAX_NAMES else "")
    if len(metrics) == 1:
        return f"{task} {shown}: left out, because its examples cannot be paired"
    return f"{task}: {len(metrics)} metrics left out, because no scores of examples pair them: {shown}"


def _compare_metric(
    pair: tuple[EvaluationResult, EvaluationResult],
    names: tuple[str, str],
    name: str,
    columns: tuple[ScoreColumn, ScoreColumn],
    draws: Floats,
) -> MetricComparison:
    """Compare one metric; `draws` are bootstrap draws of the difference."""
    first, second = columns
    discordant = None
    if first.is_binary and second.is_binary:
        gains = second.numerators - first.numerators
        discordant = int((gains < 0).sum()), int((gains > 0).sum())
    return MetricComparison(
        task=pair[0].task,
        convention=pair[0].convention,
        metric=name,
        first=names[0],
        second=names[1],
        values=(first.value, second.value),
        difference=second.value - first.value,
        interval=paired_statistics.percentile_interval(draws),
        p_value=paired_statistics.bootstrap_p_value(draws)
        if discordant is None
        else paired_statistics.mcnemar_exact(*discordant),
        test="bootstrap" if discordant is None else "mcnemar",
        discordant=discordant,
        count=len(first.numerators),
        higher_is_better=first.metric.higher_is_better,
    )


def find_column(result: EvaluationResult, metric: Metric) -> ScoreColumn | None:
    """Return the scores of a metric; None if it is not made from scores of examples."""
    name = metric.example_score
    if name is None:
        return None
    examples = sorted(result.examples, key=lambda example: example.id)
    rows = tuple(row for row, example in enumerate(examples) if name in example.scores)
    if not rows:
        return None
    column = ScoreColumn(metric, *_read_scores([examples[row] for row in rows], name), rows)
    if not math.isclose(column.value, metric.value, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-9):
        return None
    return column


def _read_scores(examples: Sequence[Example], name: str) -> tuple[Floats, Floats]:
    numerators = np.array([example.scores[name] for example in examples], np.float64)
    weights = np.array([example.scores.get(f"{name}_weight", 1.0) for example in examples], np.float64)
    return numerators, weights


def list_models(results: Sequence[EvaluationResult]) -> list[Mapping[str, object]]:
    """Return path, task, model and hashes of each result, for the record of a comparison."""
    return [
        {
            "path": str(Path(result.path).resolve()),
            "task": result.task,
            "convention": result.convention,
            "model": result.record["model"]["source"],
            "model_sha256": result.record["model"]["sha256"],
            "data_sha256": list(result.data_hashes),
            "publishable": result.record["publishable"],
        }
        for result in results
    ]
