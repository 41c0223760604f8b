"""Charts: their points, gaps, axes and ticks, read from the SVG."""

from __future__ import annotations

import math
import re

import pytest

from mega_train.reports.charts import Curve, format_count, render_chart


def _chart(ys: list[float], **look: bool) -> str:
    xs = [float(x) for x in range(1, len(ys) + 1)]
    return render_chart("c", [Curve("a", "#000000", xs, ys)], "Words.", **look)


def _lines(chart: str, number: int = 1) -> list[list[tuple[float, float]]]:
    """The parts of a curve between its gaps, in pixels."""
    path = re.search(rf'<g id="c-{number}"><title>[^<]*</title> <path d="([^"]*)"', chart)
    assert path is not None
    parts = [part.replace("L", " ").split() for part in path[1].split("M")[1:]]
    return [list(zip(map(float, part[::2]), map(float, part[1::2]), strict=True)) for part in parts]


def _places(chart: str, number: int = 1) -> list[tuple[float, float]]:
    (line,) = _lines(chart, number)
    return line


def _markers(chart: str, number: int = 1) -> int:
    group = chart.partition(f'<g id="c-{number}">')[2]
    return re.split(r'<g id="c-\d+">|<path d="M 64 234 L 916 234', group)[0].count("<use")


def test_a_chart_has_the_points_of_every_curve() -> None:
    curves = [
        Curve("a", "#000000", [0.0, 5.0, 10.0], [1.0, 2.0, 4.0]),
        Curve("b", "#000000", [10.0], [3.0], dots=True, hollow=True),
    ]
    chart = render_chart("c", curves, "Words.", marks=[(5.0, "words", "#000000")])
    places = _places(chart, 1)
    assert [x for x, _ in places] == [64, 490, 916]
    ys = [y for _, y in places]
    assert ys[0] - ys[1] == pytest.approx((ys[1] - ys[2]) / 2, abs=0.2)
    (single,) = _places(chart, 2)
    assert single == pytest.approx((916, (ys[1] + ys[2]) / 2), abs=0.2)
    assert [_markers(chart, number) for number in (1, 2)] == [3, 1]
    assert chart.count("fill: var(--page); stroke: #000000; stroke-width: 2") == 1, "a ring"
    assert _places(chart, 3) == [(490, 234), (490, 10)]
    assert re.findall("<title>(.*?)</title>", chart) == ["a", "b", "words"]


def test_a_missing_value_is_a_gap_and_one_between_two_gaps_is_marked() -> None:
    nan = math.nan
    lines = _lines(_chart([1.0, 2.0, nan, 3.0, 4.0, 5.0]))
    assert [len(line) for line in lines] == [2, 3]
    many = [1.0] * 50 + [nan, 1.0, nan] + [1.0] * 50
    assert _markers(_chart(many)) == 1
    assert _markers(_chart([1.0] * 50)) == 0


def test_a_decade_of_a_logarithmic_axis_is_as_high_as_the_next() -> None:
    ys = [y for _, y in _places(_chart([1.0, 10.0, 100.0], log=True))]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    ys = [y for _, y in _places(_chart([0.0, 10.0, 100.0], log=True))]
    assert ys[0] - ys[1] == pytest.approx((ys[1] - ys[2]) / 9, abs=0.2), "0 has no logarithm"


def _ticks(chart: str) -> list[str]:
    """The labels of the vertical axis."""
    return re.findall(r"text-anchor: end[^>]*>([^<]*)<", chart)


@pytest.mark.parametrize(
    ("ys", "look", "labels"),
    [
        ([2.1, 3.9], {}, ["2.5", "3", "3.5"]),
        ([2.1, 3.9], {"zero": True}, ["0", "1", "2", "3"]),
        ([2.1, 10.9], {"log": True}, ["2", "3", "4", "5", "6", "8", "10"]),
        ([0.5, 90.0], {"log": True}, ["0.5", "1", "2", "5", "10", "20", "50", "100"]),
        ([0.5, 65536.0], {"log": True}, ["1", "10", "100", "1000", "10k", "100k"]),
    ],
)
def test_ticks_are_round_numbers(ys: list[float], look: dict[str, bool], labels: list[str]) -> None:
    assert _ticks(_chart(ys, **look)) == labels


@pytest.mark.parametrize("ys", [[2.5], [0.0], [3.0, 3.0], [-1.0, -1.0], [1e-9, 1e9], [5e-324, 1.0]])
def test_values_that_hardly_make_an_axis_are_drawn(ys: list[float]) -> None:
    for look in ({}, {"zero": True}, {"log": True}):
        places = _places(_chart(ys, **look))
        assert len(places) == len(ys)
        assert all(64 <= x <= 916 and 10 <= y <= 234 for x, y in places)


def test_many_points_become_means_in_a_band_that_keeps_what_stood_out() -> None:
    ys = [1.0] * 4000
    ys[2000] = 9.0
    ys[3000] = math.nan
    chart = _chart(ys)
    assert len(_places(chart)) == 400
    band = re.search(r' d="M ([^"]*) z "/> </defs> <g> <use [^>]* y="260" style="fill-opacity: 0.2"/>', chart)
    assert band is not None
    tops = [260 + float(point.split()[1]) for point in band[1].split("L")]
    assert min(tops) < 30, "the one value reaches the top"
    assert len(chart) < 50_000


def test_nothing_to_draw_is_no_chart() -> None:
    assert render_chart("c", [Curve("a", "#000000", [], [])], "Words.") == ""


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0"), (950, "950"), (12500, "12.5k"), (2e6, "2M"), (3.25e9, "3.25G"), (1e13, "10T")],
)
def test_large_numbers_are_short(value: float, words: str) -> None:
    assert format_count(value) == words
