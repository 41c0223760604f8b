"""Ranks, coordinates and stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_schema.errors import LayoutError
from mega_schema.parallel_layout import Coordinates, Layout, split_layers

DEGREE = st.integers(1, 5)


@given(DEGREE, DEGREE, DEGREE, DEGREE)
def test_ranks_and_coordinates_are_one_to_one(tp: int, pp: int, dp: int, cp: int) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp)
    coordinates = [layout.coordinates(rank) for rank in range(layout.world)]
    assert len(set(coordinates)) == layout.world == tp * pp * dp * cp
    assert [layout.rank(coordinate) for coordinate in coordinates] == list(range(layout.world))


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
    assert [stage.is_first for stage in stages] == [place == 0 for place in range(pp)]
    assert [stage.is_last for stage in stages] == [place == pp - 1 for place in range(pp)]


def test_data_parallel_takes_what_remains() -> None:
    assert Layout.from_world_size(12, tp=2, pp=3) == Layout(tp=2, pp=3, dp=2)
    assert Layout.from_world_size(24, tp=2, pp=3, cp=2) == Layout(tp=2, pp=3, cp=2, dp=2)


@pytest.mark.parametrize(
    ("world", "tp", "pp", "message"),
    [
        (6, 4, 1, r"world size: is not a multiple of tp x pp: found 6 processes, .*; hint: torchrun .* 4$"),
        (4, 0, 1, r"--tensor-model-parallel-size: not a degree: found 0, wanted 1 or more"),
        (4, 1, -1, r"--pipeline-model-parallel-size: not a degree: found -1"),
    ],
)
def test_ranks_that_are_no_whole_number_of_models_are_refused(
    world: int, tp: int, pp: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.from_world_size(world, tp=tp, pp=pp)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 30))
def test_virtual_stages_go_around_the_places(pp: int, vp: int, more: int) -> None:
    layers, layout = pp * vp + more, Layout(pp=pp, vp=vp)
    stages = [layout.stage(place, layers, chunk) for chunk in range(vp) for place in range(pp)]
    assert [stage.index for stage in stages] == list(range(pp * vp))
    assert {stage.count for stage in stages} == {pp * vp}
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.index for stage in stages if stage.is_first or stage.is_last] == sorted({0, pp * vp - 1})


@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 30), st.data())
def test_layers_are_assigned_once_each_however_they_are_asked_for(
    pp: int, vp: int, more: int, data: st.DataObject
) -> None:
    layers = pp * vp + more
    first = data.draw(st.none() | st.integers(vp, layers - (pp - 1) * vp))
    left = layers - (first or vp) - (pp - 2) * vp
    last = data.draw(st.none() | st.integers(vp, left)) if pp > 2 or first is None else None
    embedding = first is None and data.draw(st.booleans())
    head = last is None and data.draw(st.booleans())
    sizes = split_layers(layers, pp=pp, vp=vp, first=first, last=last, embedding=embedding, head=head)
    assert len(sizes) == pp * vp
    assert sum(sizes) == layers
    assert first is None or sum(sizes[::pp]) == first
    assert last is None or sum(sizes[pp - 1 :: pp]) == last
    free = {place for place in range(pp) if (first is None or place) and (last is None or place < pp - 1)}
    units = list(sizes)
    units[0] += embedding
    units[-1] += head
    counts = [units[stage] for stage in range(pp * vp) if stage % pp in free]
    assert all(unit > 0 for unit in units)
    assert not counts or max(counts) - min(counts) <= 1
    assert Layout(pp=pp, vp=vp, layers_per_stage=sizes).stage(pp - 1, layers, vp - 1).layers[-1:] in (
        range(layers - 1, layers),
        range(layers, layers),
    )


def test_embedding_and_head_count_as_layers_when_asked() -> None:
    assert split_layers(12, pp=4) == (3, 3, 3, 3)
    assert split_layers(10, pp=4) == (2, 3, 3, 2)
    assert split_layers(10, pp=4, embedding=True, head=True) == (2, 3, 3, 2)
    assert split_layers(11, pp=4, head=True) == (3, 3, 3, 2)
    assert split_layers(2, pp=4, embedding=True, head=True) == (0, 1, 1, 0)
    assert split_layers(14, pp=2, vp=2, embedding=True, head=True) == (3, 4, 4, 3)
    assert split_layers(12, pp=4, first=2, last=4) == (2, 3, 3, 4)
    assert split_layers(12, pp=2, vp=2, first=5) == (2, 4, 3, 3)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"first": 0},
            r"--decoder-first-.*: not a number of layers that a stage can have: found 0, wanted 1",
        ),
        ({"last": 8}, r"--decoder-last-.*: not a number .*: found 8, wanted 1 to 7"),
        ({"first": 1, "vp": 2}, r"--decoder-first-.*: not a number .*: found 1, wanted 2 to 7"),
        (
            {"first": 4, "last": 3, "pp": 2},
            r"--decoder-last-.*: does not leave .*: found 4 \+ 3 of 8 layers, wanted 4",
        ),
        (
            {"first": 4, "last": 3},
            r"--decoder-first-.*: a stage would have no layer: found 1 layers left for 2",
        ),
        (
            {"vp": 3},
            r"--num-virtual-.*: a stage would have no layer: found 4 x 3 stages for 8 .* wanted at most 2",
        ),
        (
            {"pp": 1, "first": 3},
            r"--decoder-first-.*: needs pipeline parallelism.*; hint: leave it out",
        ),
    ],
)
def test_a_dealing_that_cannot_be_is_refused(asked: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        split_layers(8, **{"pp": 4, **asked})


def test_a_stage_without_a_layer_is_refused() -> None:
    with pytest.raises(LayoutError, match="found 4 stages for 3 layers, wanted at most 3; hint: .* 3$"):
        Layout(pp=4).stage(0, 3)
