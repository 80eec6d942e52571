"""Eviction: which copy leaves a full tier first.

A policy orders *candidates*: copies that the tree offers because nothing hangs on them. Leaf-first
LRU is the default: simulation on a real conversation trace gave it the best hit rate at normal
sizes, and leaves first keeps each tier prefix-closed. A parent is used whenever a child is, so a
copy that becomes a leaf inherits the latest use of its last child (the tree does that).

The heap is lazy: a use only changes the copy's ``last_use``; an entry that turns out to be older
than its copy is pushed again when it comes up. So each copy has at most one entry, a lookup costs
no heap operation, and the heap never outgrows the copies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from kvstore.core.tree_nodes import Copy


class Policy(Protocol):
    """Order of eviction for copies of one size; registered under ``kvstore.policies``.

    The tree guarantees: ``offer`` is called when a copy becomes evictable, again after each time it
    was taken out and became evictable anew. An implementation is responsible for: ``take`` returns
    only copies for which ``evictable`` is true at that moment, or None when it holds none.
    """

    def offer(self, copy: Copy) -> None:
        """The copy may leave; a second offer of a copy that is still held is ignored."""

    def take(self, evictable: Callable[[Copy], bool]) -> Copy | None:
        """The copy to evict now, which the policy forgets; copies that aren't evictable any more
        are forgotten on the way (they are offered again)."""

    def coldest_use(self, evictable: Callable[[Copy], bool]) -> int | None:
        """The last use of what ``take`` would return, which stays; None when there is nothing."""


class LeastRecentlyUsed:
    """Leaf-first LRU (see the module). Mutates nothing but itself."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Copy]] = []
        self._held: set[int] = set()
        self._ties = 0

    def offer(self, copy: Copy) -> None:
        """Note a candidate."""
        if id(copy) in self._held:
            return
        self._held.add(id(copy))
        self._push(copy)

    def take(self, evictable: Callable[[Copy], bool]) -> Copy | None:
        """The candidate used longest ago."""
        if self.coldest_use(evictable) is None:
            return None
        copy = heapq.heappop(self._heap)[2]
        self._held.discard(id(copy))
        return copy

    def coldest_use(self, evictable: Callable[[Copy], bool]) -> int | None:
        """When the candidate used longest ago was used."""
        while self._heap:
            use, _, copy = self._heap[0]
            if not evictable(copy):
                heapq.heappop(self._heap)
                self._held.discard(id(copy))
            elif copy.use() > use:
                heapq.heappop(self._heap)
                self._push(copy)
            else:
                return use
        return None

    def _push(self, copy: Copy) -> None:
        self._ties += 1
        heapq.heappush(self._heap, (copy.use(), self._ties, copy))


class FirstInFirstOut(LeastRecentlyUsed):
    """The copy that was offered first leaves first; for comparison."""

    def _push(self, copy: Copy) -> None:
        self._ties += 1
        heapq.heappush(self._heap, (self._ties, self._ties, copy))

    def coldest_use(self, evictable: Callable[[Copy], bool]) -> int | None:
        """The place in the queue of the candidate that was offered first."""
        while self._heap:
            order, _, copy = self._heap[0]
            if evictable(copy):
                return order
            heapq.heappop(self._heap)
            self._held.discard(id(copy))
        return None


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LeastRecentlyUsed, "fifo": FirstInFirstOut}
"""Policies by name; others come through the entry points of the composition root."""
