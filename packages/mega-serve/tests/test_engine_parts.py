"""Small parts of the engine: runs of free pages, the waiting queue, drafts, throughput."""

from __future__ import annotations

import random

from mega_serve.engine.free_pages import FreePages
from mega_serve.engine.speculation import PromptLookup
from mega_serve.engine.throughput import Throughput
from mega_serve.engine.waiting_queue import WaitingQueue


def test_free_pages_join_with_their_neighbours_in_any_order() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        free = FreePages(12)
        used: set[int] = set()
        for _ in range(40):
            if used and rng.random() < 0.5:
                page = rng.choice(sorted(used))
                used.remove(page)
                free.add(page)
            elif len(free):
                count = rng.randint(1, 4)
                pages = (
                    free.take_following(rng.randrange(12), count) if rng.random() < 0.5 else free.take(count)
                )
                assert len(pages) <= count
                assert pages == list(range(pages[0], pages[0] + len(pages))) if pages else True
                assert used.isdisjoint(pages)
                used.update(pages)
            assert free.pages() == sorted(set(range(12)) - used)
            assert len(free) == 12 - len(used)
        for page in sorted(used):
            free.add(page)
        assert free.take(12) == list(range(12))


def test_the_queue_gives_the_smallest_key_that_was_not_withdrawn() -> None:
    rng = random.Random(1)
    queue: WaitingQueue[int] = WaitingQueue()
    expected: dict[tuple[float, ...], int] = {}
    for number in range(5000):
        key = (float(rng.randrange(50)), float(number))
        queue.push(key, number)
        expected[key] = number
        if rng.random() < 0.9:
            withdrawn = rng.choice(list(expected))
            del expected[withdrawn]
            queue.discard(withdrawn)
            queue.discard(withdrawn)
        assert queue.first() == (expected[min(expected)] if expected else None)
        assert len(queue) == len(expected)
        assert len(queue._heap) <= max(64, 2 * len(expected)) + 1


def test_a_withdrawn_key_may_return() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    queue.push((1,), "first")
    queue.discard((1,))
    queue.push((1,), "second")
    queue.discard((1,))
    assert queue.first() is None


def test_a_draft_is_what_followed_the_longest_and_latest_match() -> None:
    lookup = PromptLookup(2, 3)
    assert lookup.draft([1, 2, 3, 4, 9, 1, 2], 2) == [3, 4]
    assert lookup.draft([1, 2, 3, 4, 9, 1, 2, 7], 2) == []
    assert lookup.draft([1, 2, 3, 4, 9, 1, 2, 7, 1, 2], 2) == [7, 1]
    assert lookup.draft([1, 2, 3, 4, 9, 1, 2, 7, 1, 2, 3], 1) == [4]
    assert PromptLookup(2, 4).draft([5], 3) == []
    assert PromptLookup(2, 4).draft([8, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert PromptLookup(1, 4).draft([5, 5], 3) == [5, 5, 5]


def test_drafts_of_a_growing_sequence_equal_those_of_a_fresh_index() -> None:
    rng = random.Random(2)
    tokens: list[int] = []
    lookup = PromptLookup(2, 4)
    drafted = 0
    for _ in range(300):
        tokens.append(rng.randrange(3))
        draft = lookup.draft(tokens, 4)
        assert draft == PromptLookup(2, 4).draft(tokens, 4)
        drafted += len(draft)
    assert drafted > 300


def test_throughput_is_of_the_last_ten_seconds() -> None:
    throughput = Throughput(100.0)
    assert throughput.tokens_per_second(100.0) == 0.0
    throughput.add(102.0, 10)
    assert throughput.tokens_per_second(104.0) == 2.5
    throughput.add(111.0, 20)
    assert throughput.tokens_per_second(111.0) == 3.0
    assert throughput.tokens_per_second(112.0) == 2.0
    assert throughput.tokens_per_second(121.0) == 0.0
