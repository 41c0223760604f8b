"""Prefix cache: full pages found by the tokens that they and all pages before them hold.

The key of a page is a chain of BLAKE2b digests: of the namespace, then of each page's token ids. Equal
digests are not trusted: a hit compares the token ids and the page before it, so a crafted collision cannot
show one client's text to another.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Digest = Callable[[bytes], bytes]


def blake2b_digest(content: bytes) -> bytes:
    """Return a digest of 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class CachedPage:
    """A full page that later sequences may share.

    Attributes:
        digest: of the chain up to this page.
        parent: the page before it; None for the first of a prompt.
        is_reused: a later sequence has shared it.
    """

    page: int
    digest: bytes
    namespace: str
    token_ids: tuple[int, ...]
    parent: CachedPage | None
    children: set[CachedPage] = field(default_factory=set)
    is_reused: bool = False


class PrefixCache:
    """The registered pages, and the order in which the unused ones are evicted.

    A page is registered only while the page before it is: evicting a page removes those after it too.

    Args:
        page_size: tokens of a page.
        digest: the hash function.
    """

    def __init__(self, page_size: int, digest: Digest = blake2b_digest) -> None:
        self._page_size = page_size
        self._digest = digest
        self._by_digest: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._unused: OrderedDict[int, None] = (
            OrderedDict()
        )  # pages without a holder, least recently used first

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    @property
    def unused_pages(self) -> int:
        """Number of registered pages without a holder."""
        return len(self._unused)

    def list_unused(self) -> list[int]:
        """Return the registered pages without a holder, the next to be evicted first."""
        return list(self._unused)

    def find_prefix(self, token_ids: Sequence[int], namespace: str, max_pages: int) -> Iterator[CachedPage]:
        """Yield the pages that hold the first tokens, up to the first page that is not registered."""
        parent: CachedPage | None = None
        for index in range(max_pages):
            page_token_ids = self._token_ids_of(token_ids, index)
            entry = self._by_digest.get(self._chain(parent, namespace, page_token_ids))
            if entry is None or not _is_same(entry, parent, namespace, page_token_ids):
                return
            yield entry
            parent = entry

    def register(
        self, page: int, index: int, token_ids: Sequence[int], namespace: str, parent: CachedPage | None
    ) -> CachedPage | None:
        """Register the page that holds the tokens of page `index` of a sequence.

        Returns:
            The entry of these tokens, which is another page's if that came first; None if the page cannot be
            registered, because the page before it is evicted or the digest belongs to other tokens.
        """
        if parent is not None and self._by_page.get(parent.page) is not parent:
            return None
        page_token_ids = self._token_ids_of(token_ids, index)
        digest = self._chain(parent, namespace, page_token_ids)
        entry = self._by_digest.get(digest)
        if entry is not None:
            return entry if _is_same(entry, parent, namespace, page_token_ids) else None
        entry = CachedPage(page, digest, namespace, page_token_ids, parent)
        self._by_digest[digest] = entry
        self._by_page[page] = entry
        if parent is not None:
            parent.children.add(entry)
        return entry

    def mark_used(self, page: int) -> None:
        """Protect a registered page from eviction: a sequence holds it again."""
        del self._unused[page]

    def mark_unused(self, page: int) -> None:
        """Let a registered page be evicted, after all that are unused by now."""
        self._unused[page] = None

    def evict(self) -> list[int]:
        """Evict the least recently used page and those after it; return the pages that become free."""
        page = next(iter(self._unused))
        return self._remove(self._by_page[page])

    def evict_unshared(self, page: int) -> list[int]:
        """Evict this page and those after it, if no sequence holds it and none has ever reused it.

        Returns:
            The pages that become free.
        """
        if page not in self._unused or self._by_page[page].is_reused:
            return []
        return self._remove(self._by_page[page])

    def clear(self) -> list[int]:
        """Remove all pages; return those that become free."""
        pages = list(self._unused)
        self._unused.clear()
        self._by_digest.clear()
        self._by_page.clear()
        return pages

    def _remove(self, root: CachedPage) -> list[int]:
        if root.parent is not None:
            root.parent.children.discard(root)
        pages = []
        entries = [root]
        while entries:
            entry = entries.pop()
            entries += entry.children
            del self._by_digest[entry.digest], self._by_page[entry.page]
            if entry.page in self._unused:
                del self._unused[entry.page]
                pages.append(entry.page)
        return pages

    def _chain(self, parent: CachedPage | None, namespace: str, page_token_ids: tuple[int, ...]) -> bytes:
        before = self._digest(namespace.encode("utf-8", "surrogatepass")) if parent is None else parent.digest
        return self._digest(before + array("q", page_token_ids).tobytes())

    def _token_ids_of(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self._page_size : (index + 1) * self._page_size])


def _is_same(
    entry: CachedPage, parent: CachedPage | None, namespace: str, page_token_ids: tuple[int, ...]
) -> bool:
    return entry.token_ids == page_token_ids and entry.parent is parent and entry.namespace == namespace
