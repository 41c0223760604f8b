import json
import random

import numpy as np
import pytest

from mega_eval.windows import Window, as_tokens, sliding_windows, suffix_window


def test_windows_and_masks_equal_megatrons_item_by_item(shared):
    cases = json.loads((shared / "golden/lm_windows.json").read_text())
    assert cases
    for case in cases:
        stream = as_tokens(range(100, 100 + case["num_tokens"]))
        length = case["seq_len"]
        windows = sliding_windows(stream, length, case["overlapping_eval"] or length)
        assert len(windows) == case["len"] == len(case["items"])
        for window, item in zip(windows, case["items"], strict=True):
            padded = [*window.tokens, *[0] * (length + 1 - len(window.tokens))]
            mask = [
                int(window.input_length - window.target_length <= position < window.input_length)
                for position in range(length)
            ]
            assert (padded, mask) == (item["text"], item["mask"])
        assert sum(window.target_length for window in windows) == case["total_scored"]


@pytest.mark.parametrize("seed", range(200))
def test_every_token_but_the_first_is_scored_once_with_enough_before_it(seed):
    rng = random.Random(seed)
    length = rng.randint(1, 20)
    count = rng.randint(1, 90)
    stride = rng.randint(1, length)
    scored = []
    for number, window in enumerate(sliding_windows(as_tokens(range(count)), length, stride)):
        assert window.input_length <= length
        first = len(window.tokens) - window.target_length
        scored += window.tokens[first:].tolist()
        if number and window.target_length:
            assert first >= length - stride
    assert scored == list(range(1, count))


def test_a_suffix_window_keeps_the_last_context_plus_one_tokens():
    window, truncated = suffix_window([1, 2, 3, 4], [5, 6], max_length=4)
    assert (window.tokens.tolist(), window.target_length, truncated) == ([2, 3, 4, 5, 6], 2, True)


def test_a_suffix_window_that_fits_is_not_truncated():
    window, truncated = suffix_window([1, 2, 3], [5, 6], max_length=4)
    assert (window.tokens.tolist(), window.target_length, truncated) == ([1, 2, 3, 5, 6], 2, False)


def test_a_target_longer_than_the_context_is_scored_from_its_second_token_in_the_window():
    window, truncated = suffix_window([1], [2, 3, 4, 5, 6], max_length=2)
    assert (window.tokens.tolist(), window.target_length, truncated) == ([4, 5, 6], 2, True)


def test_a_window_cannot_score_a_token_with_nothing_before_it():
    with pytest.raises(AssertionError):
        Window(np.arange(3), 3)
