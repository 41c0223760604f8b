"""Initial values depend only on the seed, the name and the global index."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_model.init import initial_values
from mega_schema.arch import table
from mega_schema.params import Init, Param
from mega_schema.sharding import Slab, Split
from mega_schema.spec import gpt


def _whole_values(row: Param, seed: int = 1) -> torch.Tensor:
    zero = (0,) * len(row.shape)
    return initial_values([row], seed)(row.name, Slab(zero, row.shape, zero))


# about 3 streams of numbers: a box may begin and end in any of them
TALL = Param("tall", (130, 1500), "first", Init("normal", 0.5))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 129), st.integers(1, 130), st.integers(0, 1499), st.integers(1, 1500))
def test_a_box_is_the_part_of_the_whole(top: int, height: int, left: int, width: int) -> None:
    shape = (min(height, 130 - top), min(width, 1500 - left))
    box = Slab((top, left), shape, (0, 0))
    assert torch.equal(initial_values([TALL], 1)("tall", box), _whole_values(TALL)[box.in_global])


@pytest.mark.parametrize("tp", [2, 4])
def test_every_layout_starts_from_the_same_numbers(tp: int) -> None:
    row = Param("qkv", (48, 8), 0, Init("normal", 1.0), Split("tp", 0, (16, 16, 16)))
    whole, back = _whole_values(row), torch.zeros(48, 8)
    for rank in range(tp):
        for slab in row.slabs(rank, tp):
            back[slab.in_global] = initial_values([row], 1)("qkv", slab)
    assert torch.equal(back, whole)


def test_numbers_are_normal_with_the_rows_deviation() -> None:
    values = _whole_values(TALL)
    # of n values, the mean is off by std/sqrt(n) and the deviation by std/sqrt(2n): six of those
    n = values.numel()
    assert abs(float(values.mean())) < 6 * 0.5 / n**0.5
    assert abs(float(values.std()) - 0.5) < 6 * 0.5 / (2 * n) ** 0.5
    assert len(values.unique()) > 0.9 * n


def test_seed_and_name_decide_the_numbers() -> None:
    renamed = Param("other", TALL.shape, "first", TALL.init)
    assert torch.equal(_whole_values(TALL), _whole_values(TALL))
    assert not torch.isclose(_whole_values(TALL), _whole_values(TALL, 2)).all(1).any()
    assert not torch.isclose(_whole_values(TALL), _whole_values(renamed)).all(1).any()


def test_a_larger_vocabulary_begins_with_the_same_rows() -> None:
    small, large = (Param("embed", (n, 700), "first", Init("normal", 1.0)) for n in (150, 400))
    assert torch.equal(_whole_values(large)[:93], _whole_values(small)[:93])


def test_output_projections_start_narrower_by_depth() -> None:
    spec = gpt(layers=8, hidden=64, heads=4, vocab=50, max_seq_len=8)
    rows = {row.name: row for row in table(spec)}
    assert rows["layers.0.up.weight"].init.std == 0.02
    for name in ("layers.0.out.weight", "layers.7.down.weight"):
        assert rows[name].init.std == pytest.approx(0.02 / 4)
        assert float(_whole_values(rows[name]).std()) == pytest.approx(0.005, rel=0.1)
    assert (_whole_values(rows["layers.0.attn_norm.weight"]) == 1).all()
    assert (_whole_values(rows["layers.0.qkv.bias"]) == 0).all()


def test_uniform_values_are_bounded_by_the_two_sides_of_the_matrix() -> None:
    spec = gpt(layers=8, hidden=64, heads=4, vocab=50, max_seq_len=8, init="xavier_uniform", norm_1p=True)
    rows = {row.name: row for row in table(spec)}
    for name in ("layers.0.up.weight", "layers.0.down.weight"):  # and no narrower by depth
        values = _whole_values(rows[name])
        bound = (6 / (64 + 256)) ** 0.5
        assert float(values.abs().max()) == pytest.approx(bound, rel=0.01)
        assert float(values.abs().max()) <= bound
        assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    assert (_whole_values(rows["layers.0.attn_norm.weight"]) == 0).all()
