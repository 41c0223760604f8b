import json
import random

import numpy as np
import pytest

from mega_eval.windows import Window, batches, ending, ids, sliding


def test_windows_and_masks_equal_megatrons_item_by_item(shared):
    cases = json.loads((shared / "golden/lm_windows.json").read_text())
    assert cases
    for case in cases:
        stream = ids(range(100, 100 + case["num_tokens"]))
        length = case["seq_len"]
        windows = sliding(stream, length, case["overlapping_eval"] or length)
        assert len(windows) == case["len"] == len(case["items"])
        for window, item in zip(windows, case["items"], strict=True):
            padded = [*window.tokens, *[0] * (length + 1 - len(window.tokens))]
            mask = [int(window.read - window.scored <= at < window.read) for at in range(length)]
            assert (padded, mask) == (item["text"], item["mask"])
        assert sum(window.scored for window in windows) == case["total_scored"]


@pytest.mark.parametrize("seed", range(200))
def test_every_token_but_the_first_is_scored_once_with_enough_before_it(seed):
    rng = random.Random(seed)
    length, count = rng.randint(1, 20), rng.randint(1, 90)
    stride = rng.randint(1, length)
    scored = []
    for number, window in enumerate(sliding(ids(range(count)), length, stride)):
        assert window.read <= length
        first = len(window.tokens) - window.scored
        scored += window.tokens[first:].tolist()
        if number and window.scored:
            assert first >= length - stride
    assert scored == list(range(1, count))


@pytest.mark.parametrize("seed", range(100))
def test_batches_take_every_window_that_scores_something_once_and_longest_first(seed):
    rng = random.Random(seed)
    windows = []
    for _ in range(rng.randint(0, 30)):
        size = rng.randint(1, 12)
        windows.append(Window(ids(range(size)), rng.randint(0, size - 1)))
    rows = rng.randint(1, 7)
    made = batches(windows, rows)
    assert all(1 <= len(batch) <= rows for batch in made)
    assert all(len(batch) == rows for batch in made[:-1])
    order = [number for batch in made for number in batch]
    assert sorted(order) == [n for n, w in enumerate(windows) if w.scored]
    lengths = [windows[n].read for n in order]
    assert lengths == sorted(lengths, reverse=True)


def test_an_ending_keeps_the_last_context_plus_one_tokens():
    window, cut = ending([1, 2, 3, 4], [5, 6], longest=4)
    assert (window.tokens.tolist(), window.scored, cut) == ([2, 3, 4, 5, 6], 2, True)


def test_an_ending_that_fits_is_not_cut():
    window, cut = ending([1, 2, 3], [5, 6], longest=4)
    assert (window.tokens.tolist(), window.scored, cut) == ([1, 2, 3, 5, 6], 2, False)


def test_a_target_longer_than_the_context_is_scored_from_its_second_kept_token():
    window, cut = ending([1], [2, 3, 4, 5, 6], longest=2)
    assert (window.tokens.tolist(), window.scored, cut) == ([4, 5, 6], 2, True)


def test_a_window_cannot_score_a_token_with_nothing_before_it():
    with pytest.raises(AssertionError):
        Window(np.arange(3), 3)
