"""Eviction: which copy leaves a full tier first.

A policy orders *candidates*: copies that the tree offers because nothing hangs on them. Leaf-first
LRU is the default: leaves first keeps each tier prefix-closed. A parent is used whenever a child
is, so a copy that becomes a leaf inherits the latest use of its last child (the tree does that).

Heaps are lazy: a use only changes the copy's ``last_use``; an entry that turns out to be older than
its copy is pushed again when it comes up. So each copy has at most one entry, and a lookup costs no
heap operation. Entries of copies that left otherwise (a clear, a failed store) would stay for ever
in a tier that never fills; so there are two heaps, and each offer moves two entries from the end of
the old one (what remains is a heap still) to the new one and drops the dead. No step is long.
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

    def trim(self) -> None:
        """A copy has left otherwise: forget one or two that have, if any are held. Short."""


_Entry = tuple[int, int, Copy]
_TRIM_ENTRIES = 2
RENEW_ENTRIES = 5
_HELD_SETS = 256


class LeastRecentlyUsed:
    """Leaf-first LRU (see the module). Mutates nothing but itself."""

    def __init__(self) -> None:
        self._old: list[_Entry] = []
        self._new: list[_Entry] = []
        self._chosen: _Entry | None = None
        self._held: tuple[set[int], ...] = tuple(set() for _ in range(_HELD_SETS))
        self._ties = 0

    def __len__(self) -> int:
        return len(self._old) + len(self._new) + (self._chosen is not None)

    def offer(self, copy: Copy) -> None:
        """Note a candidate."""
        held = self._held_with(copy)
        if id(copy) not in held:
            held.add(id(copy))
            self._push(copy)
        self.trim()

    def take(self, evictable: Callable[[Copy], bool]) -> Copy | None:
        """The candidate used longest ago."""
        if self.coldest_use(evictable) is None or self._chosen is None:
            return None
        copy = self._chosen[2]
        self._chosen = None
        self._held_with(copy).discard(id(copy))
        return copy

    def coldest_use(self, evictable: Callable[[Copy], bool]) -> int | None:
        """When the candidate used longest ago was used."""
        if self._chosen is not None:
            heapq.heappush(self._new, self._chosen)
            self._chosen = None
        renewed: list[_Entry] = []
        while (heap := self._top()) and len(renewed) < RENEW_ENTRIES:
            entry = heapq.heappop(heap)
            copy = entry[2]
            if not evictable(copy):
                self._held_with(copy).discard(id(copy))
            elif self._rank(copy) > entry[0]:
                self._ties += 1
                renewed.append((self._rank(copy), self._ties, copy))
            elif not renewed or entry < min(renewed):
                self._chosen = entry
                break
            else:
                heapq.heappush(self._new, entry)
                break
        if self._chosen is None and renewed:
            self._chosen = min(renewed)
            renewed.remove(self._chosen)
        for entry in renewed:
            heapq.heappush(self._new, entry)
        return None if self._chosen is None else self._chosen[0]

    def holds(self, copy: Copy) -> bool:
        """Whether the copy is a candidate."""
        return id(copy) in self._held_with(copy)

    def _held_with(self, copy: Copy) -> set[int]:
        """The set that tells whether a copy is held: one of many, as a set that grows stalls its
        caller."""
        return self._held[id(copy) >> 4 & _HELD_SETS - 1]

    def _rank(self, copy: Copy) -> int:
        return copy.use()

    def _push(self, copy: Copy) -> None:
        self._ties += 1
        heapq.heappush(self._new, (self._rank(copy), self._ties, copy))

    def _top(self) -> list[_Entry]:
        """The heap whose first entry leaves first; an empty one if both are."""
        if self._old and self._new:
            return min(self._old, self._new, key=lambda heap: heap[0][:2])
        return self._old or self._new

    def trim(self) -> None:
        """Move two entries to the new heap, unless their copies are gone."""
        for _ in range(_TRIM_ENTRIES):
            if not self._old:
                self._old, self._new = self._new, []
            if not self._old:
                return
            entry = self._old.pop()
            copy = entry[2]
            if copy.live and copy.space.alive:
                heapq.heappush(self._new, entry)
            else:
                self._held_with(copy).discard(id(copy))


class FirstInFirstOut(LeastRecentlyUsed):
    """The copy that was offered first leaves first; for comparison."""

    def _rank(self, copy: Copy) -> int:
        return 0


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LeastRecentlyUsed, "fifo": FirstInFirstOut}
"""Our policies by name; the daemon finds others under the entry points ``kvstore.policies``."""
