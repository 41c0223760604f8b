"""Ranks, coordinates and stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_schema.errors import LayoutError
from mega_schema.layout import Coordinates, Layout

DEGREE = st.integers(1, 5)


@given(DEGREE, DEGREE, DEGREE, DEGREE)
def test_ranks_and_coordinates_are_one_to_one(tp: int, pp: int, dp: int, cp: int) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp)
    found = [layout.coordinates(rank) for rank in range(layout.world)]
    assert len(set(found)) == layout.world == tp * pp * dp * cp
    assert [layout.rank(at) for at in found] == list(range(layout.world))


def test_tensor_parallel_ranks_are_neighbours_and_stages_far_apart() -> None:
    layout = Layout(tp=2, pp=2, dp=3)
    assert layout.coordinates(1) == Coordinates(tp=1, dp=0, pp=0)
    assert layout.coordinates(2) == Coordinates(tp=0, dp=1, pp=0)
    assert layout.coordinates(6) == Coordinates(tp=0, dp=0, pp=1)


def test_context_parallel_ranks_lie_between_tensor_and_data_parallel_ones() -> None:
    layout = Layout(tp=2, pp=2, dp=3, cp=2)
    assert layout.coordinates(2) == Coordinates(tp=0, cp=1, dp=0, pp=0)
    assert layout.coordinates(4) == Coordinates(tp=0, cp=0, dp=1, pp=0)
    assert layout.coordinates(12) == Coordinates(tp=0, cp=0, dp=0, pp=1)


@given(st.integers(1, 12), st.integers(0, 40))
def test_stages_hold_every_layer_once_in_order_and_nearly_evenly(pp: int, more: int) -> None:
    layers, layout = pp + more, Layout(pp=pp)
    stages = [layout.stage(place, layers) for place in range(pp)]
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes[0], sizes[-1]) <= min(sizes[1:-1], default=max(sizes))
    assert [stage.first for stage in stages] == [place == 0 for place in range(pp)]
    assert [stage.last for stage in stages] == [place == pp - 1 for place in range(pp)]


def test_data_parallel_takes_what_remains() -> None:
    assert Layout.of(12, tp=2, pp=3) == Layout(tp=2, pp=3, dp=2)
    assert Layout.of(24, tp=2, pp=3, cp=2) == Layout(tp=2, pp=3, cp=2, dp=2)


@pytest.mark.parametrize(
    ("world", "tp", "pp", "said"),
    [
        (6, 4, 1, r"world size: is not a multiple of tp x pp: found 6 processes, .*; hint: torchrun .* 4$"),
        (4, 0, 1, r"--tensor-model-parallel-size: not a degree: found 0, wanted 1 or more"),
        (4, 1, -1, r"--pipeline-model-parallel-size: not a degree: found -1"),
    ],
)
def test_ranks_that_are_no_whole_number_of_models_are_refused(
    world: int, tp: int, pp: int, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.of(world, tp=tp, pp=pp)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 30))
def test_virtual_stages_go_around_the_places(pp: int, vp: int, more: int) -> None:
    layers, layout = pp * vp + more, Layout(pp=pp, vp=vp)
    stages = [layout.stage(place, layers, chunk) for chunk in range(vp) for place in range(pp)]
    assert [stage.index for stage in stages] == list(range(pp * vp))
    assert {stage.count for stage in stages} == {pp * vp}
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.index for stage in stages if stage.first or stage.last] == sorted({0, pp * vp - 1})


def test_a_stage_without_a_layer_is_refused() -> None:
    with pytest.raises(LayoutError, match="found 4 stages for 3 layers, wanted at most 3; hint: .* 3$"):
        Layout(pp=4).stage(0, 3)
