"""The schedules of learning rate and weight decay are Megatron's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from mega_train.schedules.lr import LRSchedule, ParamSchedules, WeightDecaySchedule


def test_rate_and_weight_decay_are_megatrons_at_every_recorded_step(oracle: Callable[[str], Any]) -> None:
    kinds = set()
    for case in oracle("lr_wd_schedules.json"):
        rate = LRSchedule(
            peak=case["max_lr"],
            least=case["min_lr"],
            warmup=case["warmup"],
            decay=case["decay"],
            style=case["style"],
        )
        decay = WeightDecaySchedule(
            start=case["start_wd"], end=case["end_wd"], samples=case["wd_steps"], style=case["wd_style"]
        )
        kinds.add((case["style"], case["warmup"], case["wd_style"]))
        for samples, expected, expected_decay in case["values_step_lr_wd"]:
            assert rate.lr_at(samples) == pytest.approx(expected, rel=1e-12), (case["style"], samples)
            assert decay.value_at(samples) == pytest.approx(expected_decay, rel=1e-12), samples
    assert len(kinds) == 16


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_decay_ends_at_the_least_rate_and_stays_there(style: Any) -> None:
    rate = LRSchedule(peak=1.0, least=0.1, warmup=10, decay=50, style=style)
    rates = [rate.lr_at(samples) for samples in range(80)]
    assert rates[0] == 0
    assert rates[10] == 1.0
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[50:] == pytest.approx([0.1] * 30)


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * math.sqrt(0.5) - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_stays_at_its_peak_and_then_falls(style: Any, half: float) -> None:
    """No oracle has it: the values are those of the formula in the reference, worked out by hand."""
    rate = LRSchedule(peak=1.0, least=0.2, warmup=10, decay=100, style="WSD", anneal=40, anneal_style=style)
    assert [rate.lr_at(samples) for samples in (5, 10, 35, 60)] == [0.5, 1.0, 1.0, 1.0]
    assert rate.lr_at(80) == pytest.approx(0.2 + 0.8 * half)
    assert rate.lr_at(100) == pytest.approx(0.2)
    assert rate.lr_at(101) == 0.2


def test_a_warm_up_begins_where_it_is_told_to() -> None:
    rate = LRSchedule(peak=1.0, least=0.0, warmup=10, decay=50, style="constant", initial=0.5)
    assert [rate.lr_at(samples) for samples in (0, 5, 10, 11)] == [0.5, 0.75, 1.0, 1.0]


def test_weight_decay_grows_along_half_a_cosine_and_stays() -> None:
    decay = WeightDecaySchedule(start=0.1, end=0.3, samples=100, style="cosine")
    assert [decay.value_at(samples) for samples in (0, 50, 100, 101)] == pytest.approx([0.1, 0.2, 0.3, 0.3])


def test_schedules_come_back_from_what_a_checkpoint_says() -> None:
    rate = LRSchedule(peak=1.0, least=0.1, warmup=10.5, decay=50, style="WSD", anneal=5)
    schedules = ParamSchedules(rate, WeightDecaySchedule(start=0.1, end=0.2, samples=9, style="linear"))
    assert ParamSchedules.from_state_dict(schedules.state_dict()) == schedules
    with pytest.raises(TypeError):
        ParamSchedules.from_state_dict({"lr_schedule": {"peak": 1}, "wd_schedule": {}})
