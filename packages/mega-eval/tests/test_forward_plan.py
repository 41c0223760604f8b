"""Plans of forward passes: each target once, within the limits, a shared prefix once."""

import random

import numpy as np
import pytest

from mega_eval.forward_plan import plan_passes
from mega_eval.window_trie import MIN_SHARED, build_trie, list_nodes
from mega_eval.windows import Window, as_tokens


def random_windows(rng, *, count=30, longest=60):
    """Return windows of which many begin alike, some are equal, and some are prefixes of others."""
    stems = [[rng.randrange(5) for _ in range(rng.randint(1, longest))] for _ in range(4)]
    windows = []
    for _ in range(count):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(0, len(stem))] + [rng.randrange(5) for _ in range(rng.randint(0, 12))]
        tokens = (tokens + [1, 2])[: max(2, len(tokens))]
        windows.append(Window(as_tokens(tokens), rng.randint(1, len(tokens) - 1)))
    return windows


def read_inputs(passes):
    """Follow the passes with a cache of ids; yield each pass with the ids before the end of each node."""
    cache = []
    for planned in passes:
        tree = planned.tree
        assert tree.cached <= len(cache)
        paths = []
        for node, parent in enumerate(tree.parent_C.tolist()):
            before = cache[: tree.cached] if parent < 0 else paths[parent]
            first = int(tree.first_C[node])
            paths.append([*before, *planned.token_T[first : first + int(tree.count_C[node])].tolist()])
        if planned.stores:
            cache = paths[0]
        yield planned, paths


LIMITS = [(20, None), (100, 3), (1000, 1), (10_000, None)]


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize(("max_tokens", "max_windows"), LIMITS)
@pytest.mark.parametrize("seed", range(5))
def test_each_target_is_predicted_once_from_all_tokens_before_it(
    seed, max_tokens, max_windows, share_prefixes
):
    windows = random_windows(random.Random(seed))
    plan = plan_passes(windows, max_tokens=max_tokens, max_windows=max_windows, share_prefixes=share_prefixes)
    predicted = set()
    for planned, paths in read_inputs(plan):
        tree = planned.tree
        columns = (planned.target_row_K, planned.target_K, planned.window_K, planned.index_K)
        for row, target, number, index in zip(*(column.tolist() for column in columns), strict=True):
            window, token = windows[number], int(planned.row_R[row])
            node = int(np.searchsorted(tree.first_C, token, side="right")) - 1
            position = int(tree.position_T[token])
            assert paths[node][: position + 1] == window.tokens[: position + 1].tolist()
            assert target == window.tokens[position + 1]
            assert index == position - (window.input_length - window.target_length)
            assert (number, index) not in predicted
            predicted.add((number, index))
    assert len(predicted) == sum(window.target_length for window in windows)


@pytest.mark.parametrize(("max_tokens", "max_windows"), LIMITS)
def test_only_a_window_that_is_longer_has_a_pass_beyond_the_limits(max_tokens, max_windows):
    windows = random_windows(random.Random(7))
    for planned in plan_passes(windows, max_tokens=max_tokens, max_windows=max_windows):
        assert planned.tree.tokens <= max_tokens or len(planned.tree.count_C) == 1
        assert max_windows is None or planned.sequences <= max_windows


def test_without_sharing_every_token_of_every_window_is_computed():
    windows = random_windows(random.Random(8))
    plan = list(plan_passes(windows, max_tokens=100, share_prefixes=False))
    assert sum(planned.tree.tokens for planned in plan) == sum(window.input_length for window in windows)
    assert not any(planned.stores for planned in plan)


def test_a_prefix_of_all_windows_is_computed_once_and_read_by_every_pass():
    rng = random.Random(9)
    prefix = [rng.randrange(9) for _ in range(50)]
    windows = [Window(as_tokens(prefix + [i % 7, *(i * n % 11 for n in range(1, 9))]), 3) for i in range(40)]
    plan = list(plan_passes(windows, max_tokens=80))
    assert [planned.stores for planned in plan] == [True] + [False] * (len(plan) - 1)
    assert len(plan) > 3
    assert (plan[0].tree.tokens, plan[0].tree.cached) == (50, 0)
    assert {planned.tree.cached for planned in plan[1:]} == {50}


def test_windows_with_one_input_share_the_row_of_their_targets():
    """Choices of one token each, such as letters."""
    context = list(range(20))
    windows = [Window(as_tokens([*context, letter]), 1) for letter in (30, 31, 32, 33)]
    [planned] = plan_passes(windows, max_tokens=100)
    assert planned.tree.tokens == 20
    assert planned.row_R.tolist() == [19]
    assert planned.target_row_K.tolist() == [0, 0, 0, 0]
    assert sorted(planned.target_K.tolist()) == [30, 31, 32, 33]


def test_the_longest_windows_come_first():
    windows = [Window(as_tokens(range(i, i + n)), 1) for i, n in enumerate((5, 40, 12, 33, 7))]
    plan = list(plan_passes(windows, max_tokens=45))
    assert [planned.tree.tokens for planned in plan] == [39, 43, 10]


@pytest.mark.parametrize("seed", range(10))
def test_no_two_siblings_of_a_trie_begin_with_many_equal_tokens(seed):
    windows = random_windows(random.Random(seed), count=60)
    for node in list_nodes([build_trie(windows)]):
        begins = [
            tuple(windows[child.window].tokens[: child.start + MIN_SHARED])
            for child in node.children
            if child.end >= child.start + MIN_SHARED
        ]
        assert len(set(begins)) == len(begins)


def test_nested_windows_of_any_number_are_planned():
    """A chain of windows, each one token longer, is deeper than Python's limit of recursion."""
    windows = [Window(as_tokens([*range(n), 0]), 1) for n in range(20, 1500)]
    plan = list(plan_passes(windows, max_tokens=400, max_windows=2))
    assert sum(len(planned.target_K) for planned in plan) == len(windows)
    assert sum(planned.tree.tokens for planned in plan) == 1499


@pytest.mark.parametrize("seed", range(10))
def test_windows_with_answers_change_no_pass_that_another_window_needs(seed):
    rng = random.Random(seed)
    windows = random_windows(rng, count=60)
    answered = frozenset(rng.sample(range(60), 45))
    whole = list(read_inputs(plan_passes(windows, max_tokens=40)))
    rest = list(read_inputs(plan_passes(windows, max_tokens=40, answered=answered)))
    inputs = [paths for _, paths in whole]
    assert all(paths in inputs for _, paths in rest)
    assert len(rest) < len(whole)
    scored = {
        (number, index)
        for planned, _ in rest
        for number, index in zip(planned.window_K, planned.index_K, strict=True)
    }
    needed = [(n, i) for n, w in enumerate(windows) if n not in answered for i in range(w.target_length)]
    assert scored.issuperset(needed)
