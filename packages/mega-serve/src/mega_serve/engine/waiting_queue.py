"""A priority queue whose entries can be withdrawn."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[float, ...]

_PURGED_SIZE = 64  # a heap below this size is not worth cleaning


class WaitingQueue(Generic[T]):
    """Items in order of unique keys. Every operation takes O(log n), amortized."""

    def __init__(self) -> None:
        self._heap: list[Key] = []
        self._items: dict[Key, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def push(self, key: Key, item: T) -> None:
        """Add an item. A key that was withdrawn may be used again."""
        assert key not in self._items, "the key is in the queue"
        self._items[key] = item
        heapq.heappush(self._heap, key)

    def first_key(self) -> Key | None:
        """Return the smallest key; None if the queue is empty."""
        while self._heap and self._heap[0] not in self._items:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def first(self) -> T | None:
        """Return the item of the smallest key; None if the queue is empty."""
        key = self.first_key()
        return None if key is None else self._items[key]

    def discard(self, key: Key) -> None:
        """Withdraw an item, if it is in the queue."""
        self._items.pop(key, None)
        if len(self._heap) > max(_PURGED_SIZE, 2 * len(self._items)):
            self._heap = list(self._items)
            heapq.heapify(self._heap)
