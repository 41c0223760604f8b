"""The pages of the KV cache: who holds them, which are free, which keep a prefix for later.

Every page is in one of three states: held by one or more sequences, cached (registered in the prefix cache
and held by none) or free. Cached pages are evicted when the free ones run out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mega_serve.engine.free_pages import FreePages
from mega_serve.engine.prefix_cache import CachedPage, Digest, PrefixCache, blake2b_digest


class PageTable:
    """The pages of one sequence, in order: its block table.

    Attributes:
        pages: page i holds positions i · page_size and following.
        is_contiguous: the page numbers are consecutive.
        namespace: of the prefix cache.
        registered_pages: leading pages that were offered to the prefix cache.
        last_entry: the entry of the last of them; None if there is none.
        is_registrable: later pages can still be offered.
    """

    __slots__ = ("is_contiguous", "is_registrable", "last_entry", "namespace", "pages", "registered_pages")

    def __init__(self, namespace: str = "") -> None:
        self.pages: list[int] = []
        self.is_contiguous = True
        self.namespace = namespace
        self.registered_pages = 0
        self.last_entry: CachedPage | None = None
        self.is_registrable = True

    def append(self, pages: Iterable[int]) -> None:
        """Append pages at the end of the sequence."""
        for page in pages:
            if self.pages and page != self.pages[-1] + 1:
                self.is_contiguous = False
            self.pages.append(page)


class PagePool:
    """Allocates pages to sequences, shares them between sequences and caches prefixes.

    Args:
        num_pages: pages of the pool.
        page_size: tokens of a page.
        prefix_caching: keep full pages for later sequences with the same first tokens.
        digest: the hash function of the prefix cache.

    Attributes:
        releases: number of tables released so far. Until it changes, no more pages become available.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        digest: Digest = blake2b_digest,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.releases = 0
        self._holders = [0] * num_pages
        self._free = FreePages(num_pages)
        self._cache = PrefixCache(page_size, digest)
        self._prefix_caching = prefix_caching

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated: free and cached ones."""
        return len(self._free) + self._cache.unused_pages

    @property
    def held_pages(self) -> int:
        """Pages that sequences hold."""
        return self.num_pages - self.available_pages

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages that this many tokens take."""
        return -(-tokens // self.page_size)

    def find_prefix(self, token_ids: Sequence[int], namespace: str, max_tokens: int) -> list[CachedPage]:
        """Find the registered pages of the first tokens, `max_tokens` tokens at most."""
        if not self._prefix_caching:
            return []
        return list(self._cache.find_prefix(token_ids, namespace, max_tokens // self.page_size))

    def open_table(
        self, namespace: str, prefix: Sequence[CachedPage], pages: int, *, reserve: int = 0
    ) -> PageTable | None:
        """Allocate the pages of a sequence that begins with a prefix found by `find_prefix`.

        Args:
            pages: number of pages of the table, those of the prefix included.
            reserve: pages that must remain available afterwards.

        Returns:
            None if too few pages are available; nothing is changed then.
        """
        reused = sum(1 for entry in prefix if not self._holders[entry.page])
        if pages - len(prefix) + reserve > self.available_pages - reused:
            return None
        table = PageTable(namespace)
        for entry in prefix:
            entry.is_reused = True
            self._hold(entry.page)
        table.append(entry.page for entry in prefix)
        table.registered_pages = len(prefix)
        table.last_entry = prefix[-1] if prefix else None
        self.extend(table, pages)
        return table

    def extend(self, table: PageTable, pages: int) -> bool:
        """Grow a table to this many pages, by the pages that follow its last one where possible.

        A cached page that follows it is evicted out of turn, unless its prefix was shared before.

        Returns:
            False if too few pages are available; nothing is changed then.
        """
        count = pages - len(table.pages)
        if count <= 0:
            return True
        if count > self.available_pages:
            return False
        while len(self._free) < count:
            self._add_free(self._cache.evict())
        while count:
            if table.pages:
                # a full cache has few free pages: without this, tables would soon be scattered over the pool
                self._add_free(self._cache.evict_unshared(table.pages[-1] + 1))
            run = self._free.take_following(table.pages[-1], count) if table.pages else []
            run = run or self._free.take(count)
            for page in run:
                self._holders[page] = 1
            table.append(run)
            count -= len(run)
        return True

    def fork(self, table: PageTable, tokens: int) -> tuple[PageTable, list[tuple[int, int]]] | None:
        """Make a table for another sequence that begins with the first `tokens` tokens of this one.

        Full pages are shared. A partly filled last page is copied, because both sequences write to it.

        Returns:
            The table and the (source, target) pages that the runner must copy before its next step; None if
            too few pages are available.
        """
        shared, partial = divmod(tokens, self.page_size)
        if partial and not self.available_pages:
            return None
        copy = PageTable(table.namespace)
        for page in table.pages[:shared]:
            self._hold(page)
        copy.append(table.pages[:shared])
        copy.registered_pages = min(table.registered_pages, shared)
        copy.is_registrable = table.is_registrable
        copy.last_entry = table.last_entry
        for _ in range(table.registered_pages - copy.registered_pages):
            copy.last_entry = copy.last_entry and copy.last_entry.parent
        if not partial:
            return copy, []
        self.extend(copy, shared + 1)
        return copy, [(table.pages[shared], copy.pages[shared])]

    def register(self, table: PageTable, token_ids: Sequence[int], tokens: int) -> None:
        """Register the full pages among the first `tokens` tokens in the prefix cache."""
        if not self._prefix_caching:
            return
        while table.is_registrable and (table.registered_pages + 1) * self.page_size <= tokens:
            index = table.registered_pages
            table.last_entry = self._cache.register(
                table.pages[index], index, token_ids, table.namespace, table.last_entry
            )
            table.registered_pages += 1
            table.is_registrable = table.last_entry is not None

    def release(self, table: PageTable) -> None:
        """Give up all pages of a table: registered ones stay cached, the last page is evicted first."""
        for page in reversed(table.pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._cache:
                self._cache.mark_unused(page)
            else:
                self._free.add(page)
        table.pages = []
        table.is_registrable = False
        self.releases += 1

    def clear_cache(self) -> None:
        """Forget all prefixes, because the weights have changed. Sequences keep the pages that they hold."""
        self._add_free(self._cache.clear())

    def check(self, tables: Iterable[PageTable]) -> None:
        """Assert the invariants of the pool against the tables of all sequences.

        Every page is free, cached or held, in one state only, and is held as often as tables contain it.
        """
        holders = Counter(page for table in tables for page in table.pages)
        free = self._free.pages()
        cached = self._cache.list_unused()
        assert len(free) == len(self._free), "the count of free pages is wrong"
        assert len(free) + len(cached) + len(holders) == self.num_pages, "a page is lost or has two states"
        assert {*free, *cached, *holders} == set(range(self.num_pages)), "a page is lost or has two states"
        assert all(self._holders[page] == holders[page] for page in range(self.num_pages)), "wrong holders"
        assert all(page in self._cache for page in cached), "a cached page is not registered"
        assert not any(page in self._cache for page in free), "a free page is registered"

    def _add_free(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._free.add(page)

    def _hold(self, page: int) -> None:
        if not self._holders[page] and page in self._cache:
            self._cache.mark_used(page)
        self._holders[page] += 1
