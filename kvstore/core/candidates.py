"""Candidates: the copies of a tier that could leave, and which leaves first.

WINDOW parts leave before whole copies: they serve the last tokens of one hit only. A whole copy is
a candidate while it is a leaf without lease or Move. Copies whose slots have different sizes (the
shards of a pipeline) queue together under the sizes that evicting them frees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.core.eviction import Policy
from kvstore.core.layout import Part
from kvstore.core.slots import Slot, SlotState
from kvstore.core.tree_nodes import Copy

Sizes = tuple[int, ...]
_BOTH = [Part.FULL, Part.WINDOW]


class Candidates:
    """A policy for each combination of slot sizes. ``guard`` is the copy that room is made for."""

    def __init__(self, policy: Callable[[], Policy]) -> None:
        self.guard: Copy | None = None
        self.looks_left = 0
        self._policy = policy
        self._copies: dict[Sizes, Policy] = {}
        self._windows: dict[Sizes, Policy] = {}

    def offer(self, copy: Copy) -> None:
        """Note a copy that may be evictable, whole or in part."""
        if self.evictable(copy):
            self._queue(self._copies, copy, Part.FULL).offer(copy)
        if self.window_evictable(copy):
            self._queue(self._windows, copy, Part.WINDOW).offer(copy)

    def take(self, slot_bytes: int) -> tuple[Copy, list[Part]] | None:
        """The copy, and its parts, to evict for a slot of this size; None where there is none, or
        with ``looks_left`` below 0, where it wasn't found within the looks that there were."""
        copy = self._coldest(self._windows, slot_bytes, self.window_evictable)
        if copy is not None:
            return copy, [Part.WINDOW]
        copy = self._coldest(self._copies, slot_bytes, self.evictable)
        return None if copy is None else (copy, _BOTH)

    def trim(self) -> None:
        """A copy has left otherwise: policies may forget some that have."""
        for queues in (self._copies, self._windows):
            for policy in queues.values():
                policy.trim()

    def evictable(self, copy: Copy) -> bool:
        """Whether the whole copy may leave."""
        if not self._loose(copy) or copy.first_child is not None:
            return False
        return _all_idle(copy.slots())

    def window_evictable(self, copy: Copy) -> bool:
        """Whether the copy's WINDOW part may leave."""
        return self._loose(copy) and copy.window_ready > 0 and _all_idle(copy.part(Part.WINDOW))

    def _coldest(
        self, queues: dict[Sizes, Policy], slot_bytes: int, test: Callable[[Copy], bool]
    ) -> Copy | None:
        """Take the copy used longest ago from all queues that free a slot of this size. Policies
        pass over copies that may not leave; when no look is left, the next is taken for granted and
        looked at here: it is offered again when it may leave. The guard costs no look, as it comes
        back each time."""

        def look(copy: Copy) -> bool:
            if copy is self.guard:
                return False
            self.looks_left -= 1
            return self.looks_left < 0 or test(copy)

        best: tuple[int, Policy] | None = None
        policies = [policy for sizes, policy in queues.items() if slot_bytes in sizes]
        if len(policies) == 1:
            best = (0, policies[0])
        for policy in policies if best is None else ():
            use = policy.coldest_use(look)
            if use is not None and (best is None or use < best[0]):
                best = (use, policy)
        copy = None if best is None else best[1].take(look)
        return copy if copy is not None and test(copy) else None

    def _loose(self, copy: Copy) -> bool:
        return copy.live and copy.space.alive and not copy.leases and copy is not self.guard

    def _queue(self, queues: dict[Sizes, Policy], copy: Copy, part: Part) -> Policy:
        found = [slot.slab.slot_bytes for slot in copy.part(part) if slot is not None]
        sizes = tuple(found) if len(found) == 1 else tuple(sorted(set(found)))
        policy = queues.get(sizes)
        if policy is None:
            policy = queues[sizes] = self._policy()
        return policy


def _all_idle(slots: Iterable[Slot | None]) -> bool:
    for slot in slots:
        if slot is not None and (slot.state is not SlotState.READY or slot.holders):
            return False
    return True
