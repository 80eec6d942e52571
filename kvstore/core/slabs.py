"""Slabs: a tier's bytes, cut into slabs of equal slots, one slot size a slab.

A slab is cut for a slot size when that size first needs it, and keeps it until it is reclaimed for
another: two models with different chunk sizes share a tier without fragments. Slots are objects
made when first used, so an untouched slab costs nothing.
"""

from __future__ import annotations

from collections import Counter
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
        "refused",
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
        self.refused = False

    def has_room(self) -> bool:
        """Whether a slot can be taken."""
        return not self.retired and (bool(self.free) or self.fresh < self.capacity)

    def used(self) -> int:
        """Slots that aren't FREE."""
        return len(self.slots) - len(self.free)


class SlabSpace:
    """All slabs of one tier. Mutated by the tier's tree only; at most ``limits.slabs`` are cut.

    A slab number that was cut before has its place on the device: ``growth_stopped`` (the device is
    full) forbids only those that never were.
    """

    def __init__(self, tier: TierName, limits: TierLimits) -> None:
        self.tier = tier
        self.limits = limits
        self.growth_stopped = False
        self._slabs: dict[int, Slab] = {}
        self._sizes: Counter[int] = Counter()
        self._never_cut = list(range(limits.slabs - 1, -1, -1))
        self._uncut: list[int] = []
        self._open: dict[int, dict[int, Slab]] = {}
        self._empty: dict[int, Slab] = {}

    def take(self, slot_bytes: int) -> Slot | None:
        """A FREE slot of this size: of a slab cut for it, or of one cut now, which may have been
        another size's that is entirely free. None where there is neither."""
        slab = self._open_slab(slot_bytes)
        if slab is None:
            return None
        self._empty.pop(slab.number, None)
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
            if not slab.used():
                self._unmake(slab)
            return
        self._open[slab.slot_bytes][slab.number] = slab
        if not slab.used():
            self._empty[slab.number] = slab

    def adopt(self, place: Place) -> Slot | None:
        """The FREE slot at a place found at start, outside the free list; None beyond the
        limits."""
        if place.slab >= self.limits.slabs or place.slot_bytes < 1:
            return None
        slab = self._slabs.get(place.slab)
        if slab is None:
            self._never_cut.remove(place.slab)
            slab = self._cut(place.slab, place.slot_bytes)
            slab.fresh = slab.capacity
            self._open[slab.slot_bytes].pop(slab.number, None)
        known = slab.slot_bytes == place.slot_bytes and place.index not in slab.slots
        if not known or not 0 <= place.index < slab.capacity:
            return None
        self._empty.pop(place.slab, None)
        return self._make(slab, place.index)

    def retire(self, number: int) -> None:
        """No slot of this slab is given out any more; once all are free, the slab is uncut
        again."""
        slab = self._slabs[number]
        slab.retired = True
        self._open[slab.slot_bytes].pop(number, None)
        if not slab.used():
            self._unmake(slab)

    def refuse(self, number: int) -> None:
        """The device had no place for a slab: unless it keeps something, it counts as never cut
        once its slots are free, and is tried after all others."""
        slab = self._slabs.get(number)
        states = (SlotState.READY, SlotState.DOOMED)
        if slab is None or any(slot.state in states for slot in slab.slots.values()):
            return
        slab.refused = True
        self.retire(number)

    def avoid(self, number: int) -> None:
        """A write failed in a slab: if nothing else is in it, its file may be of no use, and it is
        tried after all others."""
        slab = self._slabs.get(number)
        if slab is not None and slab.used() <= 1:
            self.refuse(number)

    def open_unseen(self) -> None:
        """A scan has ended: slots of adopted slabs that it didn't name are free."""
        for slab in self._slabs.values():
            missing = len(slab.slots) < slab.fresh
            for index in range(slab.fresh) if missing else ():
                if index not in slab.slots:
                    self.give_back(self._make(slab, index))

    def touch(self, slot: Slot, use: int) -> None:
        """Note a use of the slot, for reclaiming the coldest slab first."""
        slab = self._slabs[slot.place.slab]
        slab.last_use = max(slab.last_use, use)

    def coldest_foreign(self, slot_bytes: int) -> Slab | None:
        """The slab to reclaim for a size below its fair share: the coldest, without Moves and
        leases, of another size that has more than its share; None where this size has its share."""
        sizes = self._sizes
        mine = sizes[slot_bytes]
        if mine == len(self._slabs):
            return None
        total = len(self._slabs) + len(self._uncut)
        total += 0 if self.growth_stopped else len(self._never_cut)
        share = max(1, total // (len(+sizes) + (mine == 0)))
        if mine >= share:
            return None
        donors = (
            slab
            for slab in self._slabs.values()
            if slab.slot_bytes != slot_bytes
            and not slab.retired
            and sizes[slab.slot_bytes] > share - (mine == 0)
            and not any(_is_kept(slot) for slot in slab.slots.values())
        )
        return min(donors, key=lambda slab: (slab.last_use, slab.number), default=None)

    def lists(self, slot: Slot) -> bool:
        """Whether the slot is the one at its place."""
        slab = self._slabs.get(slot.place.slab)
        return slab is not None and slab.slots.get(slot.place.index) is slot

    def cuts(self) -> Iterator[Slab]:
        """All slabs that are cut."""
        return iter(self._slabs.values())

    def uncut_count(self) -> int:
        """Slabs that aren't cut."""
        return len(self._uncut) + len(self._never_cut)

    def check(self) -> None:
        """Raise InvariantError unless each slab is either cut or not, and free lists hold FREE
        slots."""
        numbers = sorted([*self._slabs, *self._uncut, *self._never_cut])
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
            if slab.number in self._empty and slab.used():
                raise InvariantError(f"{self.tier.value}: slab {slab.number} isn't empty")

    def _open_slab(self, slot_bytes: int) -> Slab | None:
        slabs = self._open.get(slot_bytes)
        if slabs:
            return next(iter(slabs.values()))
        if slot_bytes > self.limits.slab_bytes:
            return None
        if not self._uncut and (self.growth_stopped or not self._never_cut):
            spare = next((s for s in self._empty.values() if s.slot_bytes != slot_bytes), None)
            if spare is None:
                return None
            self._unmake(spare)
        numbers = self._uncut or self._never_cut
        return self._cut(numbers.pop(), slot_bytes)

    def _cut(self, number: int, slot_bytes: int) -> Slab:
        slab = Slab(number, slot_bytes, self.limits.slab_bytes // slot_bytes)
        self._slabs[number] = slab
        self._sizes[slot_bytes] += 1
        self._open.setdefault(slot_bytes, {})
        if slab.has_room():
            self._open[slot_bytes][number] = slab
        return slab

    def _make(self, slab: Slab, index: int) -> Slot:
        slot = Slot(Place(self.tier, slab.number, index, slab.slot_bytes))
        slab.slots[index] = slot
        return slot

    def _unmake(self, slab: Slab) -> None:
        del self._slabs[slab.number]
        self._sizes[slab.slot_bytes] -= 1
        self._open[slab.slot_bytes].pop(slab.number, None)
        self._empty.pop(slab.number, None)
        if slab.refused:
            self._never_cut.insert(0, slab.number)
        else:
            self._uncut.append(slab.number)


def _is_kept(slot: Slot) -> bool:
    return bool(slot.holders) or (slot.owner is not None and slot.owner.leases > 0)
