"""The page pool: allocation, sharing, the prefix cache and its eviction."""

from __future__ import annotations

import random

import pytest

from mega_serve.engine.page_pool import PagePool, PageTable
from mega_serve.engine.prefix_cache import blake2b_digest


def open_table(
    pool: PagePool, tokens: list[int], namespace: str = "", *, reserve: int = 0
) -> PageTable | None:
    """Return the table of a prompt, as a sequence allocates it."""
    prefix = pool.find_prefix(tokens, namespace, len(tokens) - 1)
    return pool.open_table(namespace, prefix, pool.pages_of(len(tokens)), reserve=reserve)


def new_table(pool: PagePool, tokens: list[int], namespace: str = "") -> PageTable:
    table = open_table(pool, tokens, namespace)
    assert table is not None
    return table


def cached_page(pool: PagePool, token_id: int) -> int:
    (entry,) = pool.find_prefix([token_id], "", 1)
    return entry.page


def cached_tokens(pool: PagePool, tokens: list[int], namespace: str = "") -> int:
    return len(pool.find_prefix(tokens, namespace, len(tokens))) * pool.page_size


def test_a_sequence_grows_by_consecutive_pages_beside_others_that_grow() -> None:
    pool = PagePool(64, 1)
    tables = [new_table(pool, [number]) for number in range(4)]
    for pages in range(2, 9):
        assert all(pool.extend(table, pages) for table in tables)
    assert all(table.is_contiguous for table in tables)
    pool.check(tables)


def test_a_table_with_a_gap_is_not_contiguous() -> None:
    pool = PagePool(4, 1)
    tables = [new_table(pool, [number]) for number in range(4)]
    pool.release(tables[1])
    assert pool.extend(tables[3], 2)
    assert tables[3].pages == [tables[3].pages[0], tables[3].pages[1]]
    assert tables[3].is_contiguous == (tables[3].pages[0] + 1 == tables[3].pages[1])
    assert not tables[3].is_contiguous


def test_nothing_changes_where_too_few_pages_are_available() -> None:
    pool = PagePool(4, 2)
    table = new_table(pool, [1, 2, 3, 4, 5])
    assert open_table(pool, [7] * 4) is None
    assert open_table(pool, [7] * 2, reserve=1) is None
    assert not pool.extend(table, 5)
    assert pool.available_pages == 1
    pool.check([table])


def test_full_pages_of_equal_tokens_are_shared_within_a_namespace_only() -> None:
    pool = PagePool(16, 2)
    tokens = [1, 2, 3, 4, 5]
    table = new_table(pool, tokens, "key")
    pool.register(table, tokens, 5)
    assert cached_tokens(pool, tokens, "key") == 4
    assert cached_tokens(pool, tokens, "") == 0
    assert cached_tokens(pool, [1, 2, 9, 4], "key") == 2
    assert cached_tokens(pool, [3, 4], "key") == 0
    second = new_table(pool, tokens, "key")
    assert second.pages[:2] == table.pages[:2]
    assert second.pages[2] != table.pages[2]
    pool.check([table, second])


def test_the_last_token_of_a_prompt_is_never_found_in_the_cache() -> None:
    pool = PagePool(16, 2)
    tokens = [1, 2, 3, 4]
    table = new_table(pool, tokens)
    pool.register(table, tokens, 4)
    assert new_table(pool, tokens).pages[0] == table.pages[0]
    assert len(pool.find_prefix(tokens, "", 3)) == 1


def test_released_pages_stay_cached_until_they_are_needed_least_recently_used_first() -> None:
    pool = PagePool(4, 1)
    old = new_table(pool, [1, 2])
    pool.register(old, [1, 2], 2)
    new = new_table(pool, [3, 4])
    pool.register(new, [3, 4], 2)
    pool.release(old)
    pool.release(new)
    assert pool.available_pages == 4
    assert cached_tokens(pool, [1, 2]) == 2
    table = new_table(pool, [9])
    assert cached_tokens(pool, [1, 2]) == 1  # the end of a prefix goes before its beginning
    assert cached_tokens(pool, [3, 4]) == 2
    pool.check([table])


def test_a_growing_sequence_takes_the_next_page_from_the_cache_unless_it_was_shared() -> None:
    for is_shared in (False, True):
        pool = PagePool(8, 1)
        growing, cached = new_table(pool, [1]), new_table(pool, [2, 3])
        pool.register(cached, [2, 3], 2)
        pool.release(cached)
        if is_shared:
            pool.release(new_table(pool, [2, 9]))
        neighbour = cached_page(pool, 2)
        blocked = [page for page in pool._free.pages() if page < neighbour]
        assert pool.extend(growing, 1 + len(blocked))
        assert growing.pages[-1] + 1 == neighbour
        assert pool.extend(growing, 2 + len(blocked))
        assert growing.is_contiguous != is_shared
        assert cached_tokens(pool, [2, 3]) == (1 if is_shared else 0)  # the page of 3 is not shared
        pool.check([growing])


def test_eviction_of_a_page_removes_the_pages_after_it() -> None:
    pool = PagePool(3, 1)
    first = new_table(pool, [1, 5])
    pool.register(first, [1, 5], 1)
    second = new_table(pool, [1, 2])  # shares the page of token 1
    pool.register(second, [1, 2], 2)
    pool.release(second)
    assert cached_tokens(pool, [1, 2]) == 2
    pool.release(first)
    table = new_table(pool, [7, 8, 9])
    assert cached_tokens(pool, [1, 2]) == 0
    pool.check([table])


def test_a_collision_of_digests_is_no_hit() -> None:
    pool = PagePool(16, 2, digest=lambda content: b"equal")
    tokens = [1, 2, 3, 4, 5]
    table = new_table(pool, tokens, "key")
    pool.register(table, tokens, 4)
    assert cached_tokens(pool, tokens, "key") == 2  # the second page has the digest of the first
    assert cached_tokens(pool, [1, 2, 9, 9], "key") == 2
    assert cached_tokens(pool, [9, 2, 3, 4], "key") == 0
    assert cached_tokens(pool, tokens, "other") == 0


def test_equal_tokens_after_another_page_are_no_hit_even_if_the_digest_is_equal() -> None:
    def digest(content: bytes) -> bytes:
        # pages of tokens [3, 4] collide, whatever comes before them
        return b"same" if content.endswith(bytes([3, *[0] * 7, 4, *[0] * 7])) else blake2b_digest(content)

    pool = PagePool(16, 2, digest=digest)
    first = new_table(pool, [1, 2, 3, 4])
    pool.register(first, [1, 2, 3, 4], 4)
    second = new_table(pool, [8, 9, 3, 4])
    pool.register(second, [8, 9, 3, 4], 4)
    assert cached_tokens(pool, [1, 2, 3, 4]) == 4
    assert cached_tokens(pool, [8, 9, 3, 4]) == 2


def test_a_fork_shares_full_pages_and_copies_the_partly_filled_one() -> None:
    pool = PagePool(8, 2)
    table = new_table(pool, [1, 2, 3, 4, 5])
    fork = pool.fork(table, 3)
    assert fork is not None
    copy, pairs = fork
    assert copy.pages[:1] == table.pages[:1]
    assert pairs == [(table.pages[1], copy.pages[1])]
    assert copy.pages[1] not in table.pages
    whole = pool.fork(table, 4)
    assert whole is not None
    assert whole[0].pages == table.pages[:2]
    assert whole[1] == []
    pool.check([table, copy, whole[0]])
    for released in (table, copy, whole[0]):
        pool.release(released)
    pool.check([])
    assert pool.available_pages == 8


def test_a_fork_without_a_page_for_the_copy_changes_nothing() -> None:
    pool = PagePool(2, 2)
    table = new_table(pool, [1, 2, 3])
    assert pool.fork(table, 3) is None
    pool.check([table])


def test_a_cleared_cache_finds_nothing_and_loses_no_page() -> None:
    pool = PagePool(4, 1)
    table = new_table(pool, [1, 2])
    pool.register(table, [1, 2], 2)
    released = new_table(pool, [3, 4])
    pool.register(released, [3, 4], 2)
    pool.release(released)
    pool.clear_cache()
    assert cached_tokens(pool, [1, 2]) == cached_tokens(pool, [3, 4]) == 0
    pool.check([table])


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, table: table.pages.append(table.pages[0]),
        lambda pool, table: table.pages.pop(),
        lambda pool, table: pool._free.take(1),
        lambda pool, table: pool._free.add(table.pages[0]),
        lambda pool, table: pool._cache.mark_unused(5),
    ],
)
def test_the_check_finds_a_damaged_pool(damage) -> None:  # type: ignore[no-untyped-def]
    pool = PagePool(8, 1)
    table = new_table(pool, [1, 2, 3])
    pool.check([table])
    damage(pool, table)
    with pytest.raises(AssertionError):
        pool.check([table])


def test_random_histories_lose_no_page_and_find_only_what_was_registered() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        pool = PagePool(rng.randint(4, 40), rng.choice([1, 2, 3]), prefix_caching=rng.random() < 0.8)
        live: list[tuple[PageTable, list[int]]] = []
        content: dict[int, tuple[int, ...]] = {}  # what a page's tokens and those before it are
        for _ in range(60):
            action = rng.random()
            if action < 0.4:
                tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
                prefix = pool.find_prefix(tokens, "", len(tokens) - 1)
                for index, entry in enumerate(prefix):
                    assert content[entry.page] == tuple(tokens[: (index + 1) * pool.page_size])
                if (table := open_table(pool, tokens)) is not None:
                    live.append((table, tokens))
            elif live and action < 0.6:
                table, tokens = rng.choice(live)
                tokens.append(rng.randrange(2))
                if not pool.extend(table, pool.pages_of(len(tokens))):
                    tokens.pop()
            elif live and action < 0.75:
                table, tokens = rng.choice(live)
                length = rng.randint(1, len(tokens))
                if (fork := pool.fork(table, length)) is not None:
                    live.append((fork[0], tokens[:length]))
            elif live:
                table, tokens = live.pop(rng.randrange(len(live)))
                pool.release(table)
            for table, tokens in live:
                full = len(tokens) // pool.page_size
                for index in range(full):
                    content[table.pages[index]] = tuple(tokens[: (index + 1) * pool.page_size])
                pool.register(table, tokens, len(tokens))
            pool.check(table for table, _ in live)
        for table, _ in live:
            pool.release(table)
        pool.check([])
        assert pool.available_pages == pool.num_pages
