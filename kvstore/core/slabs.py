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
    """One slab of a tier: ``capacity`` slots of ``slot_bytes``, of which ``made`` exist as objects.

    ``free`` are those that are FREE, ``held`` counts those that a Move holds, ``leased`` those that
    a lease protects, ``filled`` those that are READY or DOOMED; ``last_use`` is the latest use of
    any. While ``adopting``, a scan tells which slots there are, and only those that it named are
    given out.
    """

    __slots__ = (
        "adopting",
        "capacity",
        "filled",
        "free",
        "held",
        "last_use",
        "leased",
        "made",
        "number",
        "refused",
        "retired",
        "slot_bytes",
        "slots",
        "tier",
        "unmade_from",
    )

    def __init__(self, tier: TierName, number: int, slot_bytes: int, capacity: int) -> None:
        self.tier = tier
        self.number = number
        self.slot_bytes = slot_bytes
        self.capacity = capacity
        self.slots: list[Slot | None] = []
        self.made = 0
        self.unmade_from = 0
        self.free: list[Slot] = []
        self.held = 0
        self.leased = 0
        self.filled = 0
        self.last_use = 0
        self.adopting = False
        self.retired = False
        self.refused = False

    def __iter__(self) -> Iterator[Slot]:
        """All slots that exist."""
        return (slot for slot in self.slots if slot is not None)

    def has_room(self) -> bool:
        """Whether a slot can be taken."""
        fresh = self.made < self.capacity and not self.adopting
        return not self.retired and (fresh or bool(self.free))

    def kept(self) -> bool:
        """Whether a Move holds a slot of it, or a lease protects one."""
        return self.held > 0 or self.leased > 0

    def used(self) -> int:
        """Slots that aren't FREE."""
        return self.made - len(self.free)

    def slot(self, index: int) -> Slot | None:
        """The slot at a place, if it exists."""
        return self.slots[index] if index < len(self.slots) else None

    def make(self, index: int) -> Slot:
        """The slot at a place, which doesn't exist yet."""
        slot = Slot(self, index)
        if index == len(self.slots):
            self.slots.append(slot)
        else:
            self.slots[index] = slot
        self.made += 1
        return slot

    def make_next(self) -> Slot:
        """The first slot that doesn't exist yet."""
        index = len(self.slots)
        if index == self.capacity:
            index = self.slots.index(None, self.unmade_from)
            self.unmade_from = index + 1
        return self.make(index)


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
        self._dead: list[Slab] = []
        self._donors: dict[int, list[Slab]] = {}

    def take(self, slot_bytes: int) -> Slot | None:
        """A FREE slot of this size: of a slab cut for it, or of one cut now, which may have been
        another size's that is entirely free. None where there is neither."""
        slab = self._open_slab(slot_bytes)
        if slab is None:
            return None
        self._empty.pop(slab.number, None)
        slot = slab.free.pop() if slab.free else slab.make_next()
        if not slab.has_room():
            self._open[slot_bytes].pop(slab.number, None)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Take back a slot that has become FREE."""
        if slot.state is not SlotState.FREE:
            raise InvariantError(f"{slot!r}: given back while not free")
        slab = slot.slab
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
            slab.slots = [None] * slab.capacity
            slab.adopting = True
            self._open[slab.slot_bytes].pop(slab.number, None)
        if slab.slot_bytes != place.slot_bytes or not 0 <= place.index < slab.capacity:
            return None
        if slab.slot(place.index) is not None:
            return None
        self._empty.pop(place.slab, None)
        return slab.make(place.index)

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
        if slab is None or slab.filled:
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
            if slab.adopting:
                slab.adopting = False
                if slab.has_room():
                    self._open[slab.slot_bytes][slab.number] = slab

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
        donors = self._donors.get(slot_bytes)
        if donors is None:
            donors = self._donors[slot_bytes] = [
                s for s in self.cuts() if s.slot_bytes != slot_bytes
            ]
            donors.sort(key=lambda slab: (slab.last_use, slab.number), reverse=True)
        while donors:
            slab = donors[-1]
            cut = self._slabs.get(slab.number) is slab and not slab.retired
            if cut and sizes[slab.slot_bytes] > share - (mine == 0) and not slab.kept():
                return slab
            donors.pop()
        return None

    def begin(self) -> None:
        """A new event begins: who can give slabs to another size is to be found out anew."""
        if self._donors:
            self._donors = {}

    def take_back(self, slab: Slab) -> None:
        """A retired slab goes on as it was."""
        slab.retired = False
        if slab.has_room():
            self._open[slab.slot_bytes][slab.number] = slab

    def bury(self, entries: int) -> int:
        """Take apart up to ``entries`` slots of slabs that are no more, whose references to one
        another nothing else would end; tells how many."""
        done = 0
        while self._dead and done < entries:
            slab = self._dead[-1]
            slab.free = []
            slots = slab.slots
            step = min(len(slots), entries - done)
            del slots[len(slots) - step :]
            done += step
            if not slots:
                self._dead.pop()
        return done

    def burying(self) -> bool:
        """Whether slabs are left to take apart."""
        return bool(self._dead)

    def lists(self, slot: Slot) -> bool:
        """Whether the slot is the one at its place."""
        slab = slot.slab
        return self._slabs.get(slab.number) is slab and slab.slot(slot.index) is slot

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
            free = {slot.index for slot in slab.free}
            if len(free) != len(slab.free):
                raise InvariantError(
                    f"{self.tier.value}: slab {slab.number} has a slot freed twice"
                )
            for slot in slab:
                if (slot.state is SlotState.FREE) != (slot.index in free):
                    raise InvariantError(f"{slot!r}: its state and the free list disagree")
            self._check_counts(slab)

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
        slab = Slab(self.tier, number, slot_bytes, self.limits.slab_bytes // slot_bytes)
        self._slabs[number] = slab
        self._sizes[slot_bytes] += 1
        self._open.setdefault(slot_bytes, {})
        if slab.has_room():
            self._open[slot_bytes][number] = slab
        return slab

    def _unmake(self, slab: Slab) -> None:
        del self._slabs[slab.number]
        self._sizes[slab.slot_bytes] -= 1
        self._open[slab.slot_bytes].pop(slab.number, None)
        self._empty.pop(slab.number, None)
        if slab.refused:
            self._never_cut.insert(0, slab.number)
        else:
            self._uncut.append(slab.number)
        self._dead.append(slab)

    def _check_counts(self, slab: Slab) -> None:
        filled = sum(slot.state in (SlotState.READY, SlotState.DOOMED) for slot in slab)
        held = sum(bool(slot.holders) for slot in slab)
        live = (SlotState.RESERVED, SlotState.READY)
        owners = [slot.owner for slot in slab if slot.state in live]
        leased = sum(owner is not None and owner.leases > 0 for owner in owners)
        counts = (sum(1 for _ in slab), filled, held, leased)
        if counts != (slab.made, slab.filled, slab.held, slab.leased):
            raise InvariantError(f"{self.tier.value}: slab {slab.number} counts wrong")
        if slab.number in self._empty and slab.used():
            raise InvariantError(f"{self.tier.value}: slab {slab.number} isn't empty")
        known = slab.number in self._open[slab.slot_bytes]
        if slab.has_room() and not known:
            raise InvariantError(f"{self.tier.value}: slab {slab.number} has room that is lost")
