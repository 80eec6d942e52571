"""Room: where a slot comes from when a tier is full.

In this order: a tenant at its quota gives up what leaves first of its own; a free slot; slots of
hidden copies, swept now; a slab of another size that has more than its share; what leaves first of
what frees this size. An event makes only so much room; where that isn't enough, whoever asks is
told to ask again in the next one, so that nothing is refused while anything may leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.core.messages import TierName
from kvstore.core.slabs import Slab
from kvstore.core.slots import Slot, SlotState
from kvstore.core.stats import Drop

if TYPE_CHECKING:
    from kvstore.core.quotas import Account
    from kvstore.core.tree import Tree
    from kvstore.core.tree_nodes import Copy

STEP_COPIES = 256
"""Copies that one event sweeps, dooms, or looks at as candidates, to make room in a tier."""
_SWEEP_ENTRIES = 64
"""Hidden copies freed at most to make room for one slot."""


class Room:
    """How a tree makes room. Mutates the tree by its verbs only."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._left = STEP_COPIES
        self._leaving: Slab | None = None
        self._next = 0

    def begin(self) -> None:
        """A new event begins."""
        self._left = STEP_COPIES
        self._tree.candidates.begin(STEP_COPIES)
        self._tree.slabs.begin()

    def take(self, slot_bytes: int, guard: Copy, account: Account) -> Slot | Drop | None:
        """A FREE slot for a copy, which stays, and its tenant's account; why there is none; or
        None where there may be one in the next event."""
        if account.lacks(slot_bytes) and not self._fit(account, slot_bytes, guard):
            if self._goes_on():
                return None
            host = self._tree.tier is TierName.HOST
            return Drop.HOST_QUOTA if host else Drop.NVME_QUOTA
        slabs, candidates = self._tree.slabs, self._tree.candidates
        slot = slabs.take(slot_bytes)
        if slot is None and self._sweep():
            slot = slabs.take(slot_bytes)
        if slot is not None:
            return slot
        candidates.guard = guard
        try:
            if self._reclaim(slot_bytes):
                slot = slabs.take(slot_bytes)
            while slot is None and self._evict(slot_bytes):
                slot = slabs.take(slot_bytes)
        finally:
            candidates.release()
        if slot is not None:
            return slot
        if self._leaving is not None or self._goes_on():
            return None
        return Drop.HOST_FULL if self._tree.tier is TierName.HOST else Drop.NVME_FULL

    def _goes_on(self) -> bool:
        """Whether more room may be made in the next event."""
        hidden = self._left <= 0 and self._tree.sweeping()
        return hidden or self._tree.candidates.looks_left < 0

    def _fit(self, account: Account, slot_bytes: int, guard: Copy) -> bool:
        """Make a tenant that is at its quota give up what leaves first of its own; tells whether a
        slot of this size fits now."""
        candidates = self._tree.candidates
        candidates.guard = guard
        try:
            while account.lacks(slot_bytes):
                if self._sweep():
                    continue
                found = candidates.take_of(account.tenant)
                if found is None:
                    return False
                self._tree.evict(*found)
        finally:
            candidates.release()
        return True

    def _sweep(self) -> bool:
        swept = self._tree.sweep(max(0, min(_SWEEP_ENTRIES, self._left)))
        self._left -= swept
        return swept > 0

    def _reclaim(self, slot_bytes: int) -> bool:
        """Doom every copy with a slot in a slab of another size, in steps, so that it can be cut
        for this one; tells whether a slot may have come of it. What is held or leased meanwhile is
        spared, and its slab gives out slots again."""
        slabs = self._tree.slabs
        slab = self._leaving or slabs.coldest_foreign(slot_bytes)
        if slab is None:
            return False
        if self._leaving is None:
            self._leaving, self._next = slab, 0
            slabs.retire(slab.number)
        elif slab.kept():
            self._leaving = None
            slabs.take_back(slab)
            return True
        while self._next < len(slab.slots) and self._left > 0:
            slot = slab.slots[self._next]
            self._next += 1
            if slot is not None and slot.owner is not None and slot.state is not SlotState.FREE:
                self._tree.evictions += slot.owner.live
                self._tree.doom(slot.owner)
                self._left -= 1
        if self._next < len(slab.slots):
            return False
        self._leaving = None
        return True

    def _evict(self, slot_bytes: int) -> bool:
        """Evict what leaves first among what frees a slot of this size."""
        found = self._tree.candidates.take(slot_bytes)
        if found is None:
            return False
        self._tree.evict(*found)
        return True
