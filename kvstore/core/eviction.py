"""Eviction: which copy leaves a full tier first.

A policy orders *candidates*: copies that the tree offers because nothing hangs on them. Leaf-first
LRU is the default: leaves first keeps each tier prefix-closed. A parent is used whenever a child
is, so a copy that becomes a leaf inherits the latest use of its last child (the tree does that).

Heaps are lazy: a use only changes the copy's ``last_use``; an entry that turns out to be older than
its copy takes the copy's place in the order when it comes up. So each copy has at most one entry,
and a lookup costs no heap operation. Where very many entries are older, renewing them goes on in
the next event: the caller answers LATER once an event has looked at enough of them, and nothing is
taken before the coldest has been found. Entries of copies that left otherwise (a clear, a failed
store) would stay for ever in a tier that never fills; so there are two heaps, and each offer moves
two entries from the end of the old one (what remains is a heap still) to the new one and drops the
dead. No step is long.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from kvstore.core.tree_nodes import Copy


class Look(Enum):
    """What a look at a candidate shows. LEAVES: it may leave. STAYS: not at present. LATER: this
    event has looked at enough; where the search ends without an answer, it goes on in the next."""

    LEAVES = "leaves"
    STAYS = "stays"
    LATER = "later"


LookAt = Callable[[Copy], Look]


class Policy(Protocol):
    """Order of eviction for copies of one size; registered under ``kvstore.policies``.

    The tree guarantees: ``offer`` is called when a copy becomes evictable, again after each time it
    was taken out and became evictable anew. An implementation is responsible for: ``take`` returns
    only copies that a ``look`` shows to LEAVE at that moment, looks at each candidate that it
    passes over, forgets those that STAY (they are offered again), and returns None where it holds
    none, or at the first LATER.
    """

    def offer(self, copy: Copy) -> None:
        """The copy may leave; a second offer of a copy that is still held is ignored."""

    def take(self, look: LookAt) -> Copy | None:
        """The copy to evict now, which the policy forgets."""

    def coldest_use(self, look: LookAt) -> int | None:
        """The last use of what ``take`` would return, which stays; None where that is None."""

    def trim(self) -> None:
        """A copy has left otherwise: forget one or two that have, if any are held. Short."""


MakePolicy = Callable[[], Policy]
_Entry = tuple[int, int, Copy]
_TRIM_ENTRIES = 2
_HELD_SETS = 256


class LeastRecentlyUsed:
    """Leaf-first LRU (see the module). Mutates nothing but itself."""

    _rank: Callable[[Copy], int] = staticmethod(Copy.use)

    def __init__(self) -> None:
        self._old: list[_Entry] = []
        self._new: list[_Entry] = []
        self._held: tuple[set[int], ...] = tuple(set() for _ in range(_HELD_SETS))
        self._ties = 0

    def __len__(self) -> int:
        return len(self._old) + len(self._new)

    def offer(self, copy: Copy) -> None:
        """Note a candidate."""
        held = self._held_with(copy)
        if id(copy) not in held:
            held.add(id(copy))
            self._ties += 1
            heapq.heappush(self._new, (self._rank(copy), self._ties, copy))
        self.trim()

    def take(self, look: LookAt) -> Copy | None:
        """The candidate used longest ago."""
        heap = self._settled(look)
        if heap is None:
            return None
        copy = heapq.heappop(heap)[2]
        self._held_with(copy).discard(id(copy))
        return copy

    def coldest_use(self, look: LookAt) -> int | None:
        """When the candidate used longest ago was used."""
        heap = self._settled(look)
        return None if heap is None else heap[0][0]

    def _settled(self, look: LookAt) -> list[_Entry] | None:
        """The heap whose first entry is the coldest candidate of all and may leave."""
        while heap := self._top():
            rank, _, copy = heap[0]
            found = look(copy)
            if found is Look.LATER:
                return None
            if found is Look.STAYS:
                heapq.heappop(heap)
                self._held_with(copy).discard(id(copy))
                continue
            use = self._rank(copy)
            if use == rank:
                return heap
            self._ties += 1
            heapq.heapreplace(heap, (use, self._ties, copy))
        return None

    def holds(self, copy: Copy) -> bool:
        """Whether the copy is a candidate."""
        return id(copy) in self._held_with(copy)

    def _held_with(self, copy: Copy) -> set[int]:
        """The set that tells whether a copy is held: one of many, as a set that grows stalls its
        caller; by the key, as by the address all would be equally full, and grow together."""
        return self._held[copy.key[-1]]

    def _top(self) -> list[_Entry]:
        """The heap whose first entry leaves first; an empty one if both are."""
        old, new = self._old, self._new
        if not old or not new:
            return old or new
        return old if old[0] < new[0] else new

    def trim(self) -> None:
        """Move two entries to the new heap, renewed, unless their copies are gone."""
        for _ in range(_TRIM_ENTRIES):
            if not self._old:
                self._old, self._new = self._new, []
            if not self._old:
                return
            entry = self._old.pop()
            copy = entry[2]
            if copy.live and copy.space.alive:
                heapq.heappush(self._new, (self._rank(copy), entry[1], copy))
            else:
                self._held_with(copy).discard(id(copy))


class FirstInFirstOut(LeastRecentlyUsed):
    """The copy that was offered first leaves first; for comparison."""

    _rank = staticmethod(lambda copy: 0)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LeastRecentlyUsed, "fifo": FirstInFirstOut}
"""Our policies by name; the daemon finds others under the entry points ``kvstore.policies``."""
