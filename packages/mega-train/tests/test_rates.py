"""The learning rate's course is Megatron's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mega_train.rates import LearningRate


def test_the_rate_is_megatrons_at_every_recorded_step(oracle: Callable[[str], Any]) -> None:
    # the oracle's weight-decay column, and the style WSD, are of things this trainer does not have yet
    styles = set()
    for case in oracle("lr_wd_schedules.json"):
        rate = LearningRate(
            peak=case["max_lr"],
            least=case["min_lr"],
            warmup=case["warmup"],
            decay=case["decay"],
            style=case["style"],
        )
        styles.add((case["style"], case["warmup"]))
        for samples, expected, _ in case["values_step_lr_wd"]:
            assert rate.at(samples) == pytest.approx(expected, rel=1e-12), (case["style"], samples)
    assert len(styles) == 8


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_decay_ends_at_the_least_rate_and_stays_there(style: Any) -> None:
    rate = LearningRate(peak=1.0, least=0.1, warmup=10, decay=50, style=style)
    course = [rate.at(samples) for samples in range(80)]
    assert course[0] == 0
    assert course[10] == 1.0
    assert course[:11] == sorted(course[:11])
    assert course[10:] == sorted(course[10:], reverse=True)
    assert course[50:] == pytest.approx([0.1] * 30)
