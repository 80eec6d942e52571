"""Slabs: a tier's bytes, cut into slabs of equal slots, one slot size a slab.

A slab is cut for a slot size when that size first needs it, and keeps it until it is reclaimed for
another: two models with different chunk sizes share a tier without fragments. Slots are objects
made when first used, so an untouched slab costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.core.errors import InvariantError
from kvstore.core.limits import TierLimits
from kvstore.core.messages import Place, TierName
from kvstore.core.slots import Slot, SlotState


class Slab:
    """One slab: ``capacity`` slots of ``slot_bytes``. ``last_use`` is the latest use of any
    slot."""

    __slots__ = (
        "capacity",
        "free",
        "fresh",
        "last_use",
        "number",
        "retired",
        "slot_bytes",
        "slots",
    )

    def __init__(self, number: int, slot_bytes: int, capacity: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.capacity = capacity
        self.slots: dict[int, Slot] = {}
        self.free: list[Slot] = []
        self.fresh = 0
        self.last_use = 0
        self.retired = False

    def has_room(self) -> bool:
        """Whether a slot can be taken."""
        return not self.retired and (bool(self.free) or self.fresh < self.capacity)

    def used(self) -> int:
        """Slots that aren't FREE."""
        return len(self.slots) - len(self.free)


class SlabSpace:
    """All slabs of one tier. Mutated by the tier's tree only; at most ``limits.slabs`` are cut."""

    def __init__(self, tier: TierName, limits: TierLimits) -> None:
        self.tier = tier
        self.limits = limits
        self.growth_stopped = False
        self._slabs: dict[int, Slab] = {}
        self._uncut = list(range(limits.slabs - 1, -1, -1))
        self._open: dict[int, dict[int, Slab]] = {}

    def take(self, slot_bytes: int) -> Slot | None:
        """A FREE slot of this size, from a cut slab or a newly cut one; None where neither is
        there."""
        slab = self._open_slab(slot_bytes)
        if slab is None:
            return None
        if slab.free:
            slot = slab.free.pop()
        else:
            slot = self._make(slab, slab.fresh)
            slab.fresh += 1
        if not slab.has_room():
            self._open[slot_bytes].pop(slab.number, None)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Take back a slot that has become FREE."""
        if slot.state is not SlotState.FREE:
            raise InvariantError(f"{slot!r}: given back while not free")
        slab = self._slabs[slot.place.slab]
        slab.free.append(slot)
        if slab.retired:
            self._uncut_if_empty(slab)
        else:
            self._open[slab.slot_bytes][slab.number] = slab

    def adopt(self, place: Place) -> Slot | None:
        """The FREE slot at a place found at start, outside the free list; None beyond the
        limits."""
        if place.slab >= self.limits.slabs or place.slot_bytes < 1:
            return None
        slab = self._slabs.get(place.slab)
        if slab is None:
            capacity = self.limits.slab_bytes // place.slot_bytes
            slab = Slab(place.slab, place.slot_bytes, capacity)
            slab.fresh = capacity
            self._slabs[place.slab] = slab
            self._open.setdefault(place.slot_bytes, {})
            self._uncut.remove(place.slab)
        known = slab.slot_bytes == place.slot_bytes and place.index not in slab.slots
        if not known or not 0 <= place.index < slab.capacity:
            return None
        return self._make(slab, place.index)

    def retire(self, number: int) -> None:
        """No slot of this slab is given out any more; once all are free, the slab is uncut
        again."""
        slab = self._slabs[number]
        slab.retired = True
        self._open[slab.slot_bytes].pop(number, None)
        self._uncut_if_empty(slab)

    def retire_if_new(self, number: int) -> None:
        """Retire a slab that keeps nothing yet: its place on the device couldn't be had."""
        slab = self._slabs.get(number)
        states = (SlotState.READY, SlotState.DOOMED)
        if slab is not None and not any(slot.state in states for slot in slab.slots.values()):
            self.retire(number)

    def touch(self, slot: Slot, use: int) -> None:
        """Note a use of the slot, for reclaiming the coldest slab first."""
        slab = self._slabs[slot.place.slab]
        slab.last_use = max(slab.last_use, use)

    def coldest_foreign(self, slot_bytes: int) -> Slab | None:
        """The slab to reclaim for a size below its fair share: the coldest, without pins, of
        another size that has more than its share; None where this size has its share already."""
        sizes: dict[int, int] = {}
        for slab in self._slabs.values():
            sizes[slab.slot_bytes] = sizes.get(slab.slot_bytes, 0) + 1
        mine = sizes.get(slot_bytes, 0)
        share = self.limits.slabs // (len(sizes) + (slot_bytes not in sizes))
        if mine >= max(1, share):
            return None
        donors = (
            slab
            for slab in self._slabs.values()
            if slab.slot_bytes != slot_bytes
            and not slab.retired
            and sizes[slab.slot_bytes] > max(1, share) - (mine == 0)
            and not any(slot.holders for slot in slab.slots.values())
        )
        return min(donors, key=lambda slab: (slab.last_use, slab.number), default=None)

    def cuts(self) -> Iterator[Slab]:
        """All slabs that are cut."""
        return iter(self._slabs.values())

    def uncut_count(self) -> int:
        """Slabs that aren't cut."""
        return len(self._uncut)

    def check(self) -> None:
        """Raise InvariantError unless every slab is either cut or not, and free lists hold FREE
        slots."""
        numbers = sorted([*self._slabs, *self._uncut])
        if numbers != list(range(self.limits.slabs)):
            raise InvariantError(f"{self.tier.value}: slabs {numbers[:8]}... are lost or doubled")
        for slab in self._slabs.values():
            free = {slot.place.index for slot in slab.free}
            if len(free) != len(slab.free):
                raise InvariantError(
                    f"{self.tier.value}: slab {slab.number} has a slot freed twice"
                )
            for index, slot in slab.slots.items():
                if (slot.state is SlotState.FREE) != (index in free):
                    raise InvariantError(f"{slot!r}: its state and the free list disagree")

    def _open_slab(self, slot_bytes: int) -> Slab | None:
        slabs = self._open.get(slot_bytes)
        if slabs:
            return next(iter(slabs.values()))
        if not self._uncut or self.growth_stopped or slot_bytes > self.limits.slab_bytes:
            return None
        number = self._uncut.pop()
        slab = Slab(number, slot_bytes, self.limits.slab_bytes // slot_bytes)
        self._slabs[number] = slab
        self._open.setdefault(slot_bytes, {})[number] = slab
        return slab

    def _make(self, slab: Slab, index: int) -> Slot:
        slot = Slot(Place(self.tier, slab.number, index, slab.slot_bytes))
        slab.slots[index] = slot
        return slot

    def _uncut_if_empty(self, slab: Slab) -> None:
        if slab.used():
            return
        del self._slabs[slab.number]
        self._open[slab.slot_bytes].pop(slab.number, None)
        self._uncut.append(slab.number)
