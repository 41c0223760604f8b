import math
import random

import numpy as np
import pytest

from mega_eval import metrics


def test_a_proportion_has_the_standard_error_of_the_harness_and_wilson_s_interval():
    metric = metrics.proportion([True] * 3 + [False], "d")
    assert metric.value == 0.75
    assert metric.stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    # Wilson (1927) for 3 of 4
    assert metric.interval == pytest.approx((0.300642, 0.954413), abs=1e-6)
    assert metric.detectable == pytest.approx(2.8016 * math.sqrt(2) * metric.stderr, rel=1e-4)


def test_equal_scores_do_not_say_which_difference_is_detected():
    assert metrics.proportion([True] * 20, "d").detectable is None
    assert metrics.mean([1.5, 1.5], "d").detectable is None


@pytest.mark.parametrize("hits", [[True] * 20, [False] * 20, [True], [False]])
def test_intervals_of_a_proportion_stay_within_0_and_1(hits):
    low, high = metrics.proportion(hits, "d").interval
    assert 0 <= low < high <= 1
    assert low <= sum(hits) / len(hits) <= high


def test_a_mean_of_one_example_has_no_interval():
    metric = metrics.mean([2.5], "d")
    assert (metric.value, metric.stderr, metric.interval, metric.detectable) == (2.5, None, None, None)


def test_equal_scores_of_all_examples_give_no_interval():
    # an F1 of 0 was published as "95 % 0.0000 to 0.0000"
    metric = metrics.mean([0.0] * 9, "f1")
    assert (metric.value, metric.stderr, metric.interval, metric.detectable) == (0, 0, None, None)
    perplexity = metrics.exponential(metric, "exp")
    assert (perplexity.value, perplexity.interval) == (1, None)


def test_the_interval_of_a_ratio_covers_the_truth_in_95_of_100_draws():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(600):
        weights = rng.integers(1, 30, 200)
        sums = np.array([rng.exponential(2.0, int(weight)).sum() for weight in weights])
        low, high = metrics.ratio(sums, weights, "d").interval
        covered += low <= 2.0 <= high
    assert 0.92 <= covered / 600 <= 0.98


def test_a_mean_is_a_ratio_with_equal_weights():
    values = [random.Random(1).random() for _ in range(50)]
    metric = metrics.mean(values, "d")
    assert metric.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(50))


def test_a_perplexity_has_the_interval_of_its_loss():
    loss = metrics.mean([1.0, 2.0, 3.0], "d", higher_is_better=False, example_score="nats")
    perplexity = metrics.exponential(loss, "e", scale=1.5)
    assert perplexity.value == pytest.approx(math.exp(3))
    assert perplexity.interval == pytest.approx([math.exp(1.5 * end) for end in loss.interval])
    assert perplexity.stderr == pytest.approx(math.exp(3) * 1.5 * loss.stderr)
    assert (perplexity.higher_is_better, perplexity.example_score) == (False, "nats")
    assert metrics.exponential(loss, "e", scale=100, max_exponent=20).value == math.exp(20)


def test_a_scaled_metric_scales_its_uncertainty():
    loss = metrics.mean([1.0, 2.0, 3.0], "d")
    bits = metrics.scale_metric(loss, 0.5, "b")
    assert (bits.value, bits.stderr) == (1.0, pytest.approx(loss.stderr / 2))
    assert bits.interval == pytest.approx([end / 2 for end in loss.interval])
