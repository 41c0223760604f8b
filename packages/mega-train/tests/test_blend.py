"""The dataset of every sample of a blend equals Megatron's and the reference loop's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mega_train.data.blend import blend_blocks, dataset_samples, normalize

Shares = NDArray[np.float64]


def _blend(shares: Shares, size: int, sizes: list[int] | None = None) -> tuple[list[int], list[int]]:
    room = None if sizes is None else np.array(sizes, np.int64)
    blocks = list(blend_blocks(shares, size, room))
    return (
        np.concatenate([corpus for corpus, _ in blocks]).tolist(),
        np.concatenate([number for _, number in blocks]).tolist(),
    )


def _slowly(shares: list[float], size: int, sizes: list[int] | None = None) -> tuple[list[int], list[int]]:
    """The rule with Python's floats, and nothing shared with what it judges."""
    counts, chosen, numbers = [0] * len(shares), [], []
    for i in range(size):
        open_ones = [k for k in range(len(shares)) if sizes is None or counts[k] < sizes[k]]
        best = max(open_ones, key=lambda k: (shares[k] * max(i, 1.0) - counts[k], -k))
        chosen.append(best)
        numbers.append(counts[best])
        counts[best] += 1
    return chosen, numbers


def test_the_choices_are_megatrons(golden: Path, oracle: Callable[[str], Any]) -> None:
    cases = oracle("blending/cases.json")["cases"]
    assert len(cases) == 6
    for case in cases:
        sizes = case.get("exhaustive_sizes")
        shares = normalize(sizes or case["weights"])
        size = sum(sizes) if sizes else case["size"]
        if not sizes:
            assert shares.tolist() == case["normalized"]
        for ours, name in zip(
            _blend(shares, size, sizes), ("dataset_index", "dataset_sample_index"), strict=True
        ):
            theirs = np.load(golden / "blending" / f"{case['case']}_{name}.npy")
            assert ours == theirs.tolist(), (case["case"], name)
        if not sizes:
            assert np.bincount(_blend(shares, size)[0]).tolist() == case["counts"]
    for block in blend_blocks(normalize([1, 2]), 5):
        assert [array.dtype.name for array in block] == cases[0]["dtypes"]


def test_the_samples_made_of_each_corpus_are_megatrons(oracle: Callable[[str], Any]) -> None:
    cases = oracle("blending/cases.json")["sizes_1p005"]
    assert len(cases) == 3
    for case in cases:
        for weight, counts in zip(case["weights"], case["per_dataset"], strict=True):
            dataset_counts = [dataset_samples(weight, target, "surplus") for target in case["targets"]]
            assert dataset_counts == [(count, count) for count in counts]


_WEIGHTS = st.one_of(
    st.floats(1e-6, 1), st.integers(1, 9).map(float), st.sampled_from([0.1, 0.2, 0.25, 1 / 3, 1e-3])
)


@settings(max_examples=40, deadline=None)
@given(st.lists(_WEIGHTS, min_size=1, max_size=7), st.integers(1, 6000))
def test_runs_side_by_side_choose_as_the_loop_does(weights: list[float], size: int) -> None:
    shares = normalize(weights)
    assert _blend(shares, size) == _slowly(shares.tolist(), size)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 2500), min_size=1, max_size=6))
def test_a_corpus_that_is_used_up_is_not_chosen_again(sizes: list[int]) -> None:
    shares = normalize([float(size) for size in sizes])
    counts = _blend(shares, sum(sizes), sizes)
    assert counts == _slowly(shares.tolist(), sum(sizes), sizes)
    assert np.bincount(counts[0], minlength=len(sizes)).tolist() == sizes


@pytest.mark.parametrize(
    "weights",
    [
        [1.0] * 300,  # more corpora than a byte counts, all of them alike: ties everywhere
        [0.7, 0.2, 0.1 - 1e-5, 6e-6, 4e-6],  # chosen so seldom that a wrong guess outlasts many columns
        [3.0, 1.0, 1.0, 1.0, 2.0],
    ],
)
def test_long_blends_choose_as_the_loop_does(weights: list[float]) -> None:
    shares, size = normalize(weights), 60_000
    counts = np.zeros(len(shares))
    chosen, numbers = _blend(shares, size)
    for i in range(size):
        best = int(np.argmax(shares * max(i, 1) - counts))
        assert (chosen[i], numbers[i]) == (best, counts[best]), i
        counts[best] += 1


def test_every_sample_of_a_corpus_comes_once_and_in_order() -> None:
    chosen, numbers = (np.array(column) for column in _blend(normalize([5, 2, 1]), 300_000))
    for corpus, share in enumerate([5 / 8, 2 / 8, 1 / 8]):
        of_it = numbers[chosen == corpus]
        assert of_it.tolist() == list(range(len(of_it)))
        assert abs(len(of_it) - share * len(chosen)) < 2
