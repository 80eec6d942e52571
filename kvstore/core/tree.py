"""Tree: one local tier's prefix tree, and the verbs that change what is in it.

Two rules make a lookup one bisection:

* *Commit in order*: a shard's slot becomes READY only when the parent's slot of that shard is; a
  slot whose bytes landed earlier waits (``landed``). So READY slots of each shard are
  prefix-closed, hence so are the visible copies.
* *Leave from the leaves*: only leaves are evicted. What must go from the middle (corrupt bytes, a
  slab taken for another size) is doomed: the copy leaves at once, its subtree is hidden and swept
  in bounded steps. While anything is hidden, what a bisection finds is checked by a walk up.

Whoever waits for a slot is told through ``settled``, new READY slots appear in ``committed``, and
``lost`` counts cancelled ones; the service drains them after each event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvstore.core.candidates import Candidates
from kvstore.core.errors import InvariantError
from kvstore.core.eviction import Policy
from kvstore.core.hidden import Hidden
from kvstore.core.keys import KEY_BYTES
from kvstore.core.layout import Part
from kvstore.core.limits import TierLimits, slot_bytes
from kvstore.core.messages import ChunkHeader, MoveID, TierName
from kvstore.core.slabs import Slab, SlabSpace
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.stats import Drop
from kvstore.core.tickets import Wait
from kvstore.core.tree_nodes import Copy, Index, gap_above, lands, may_commit

_SWEEP_ENTRIES = 64
"""Hidden copies freed at most to make room for one slot."""


class Tree:
    """The copies of one tier. Mutated by the core's thread only."""

    def __init__(self, tier: TierName, limits: TierLimits, policy: Callable[[], Policy]) -> None:
        self.tier = tier
        self.slabs = SlabSpace(tier, limits)
        self.settled: list[tuple[Wait, bool]] = []
        self.committed: list[Slot] = []
        self.lost: Counter[Drop] = Counter()
        self.evictions = 0
        self.watched = False
        self.changed: list[tuple[Copy, bool]] = []  # who came or left, while it is watched
        self.chunks = 0  # in the indices of spaces that are alive
        self.scanning = False  # a scan restores the tree: more may be found
        self._candidates = Candidates(policy)
        self._hidden = Hidden()
        self._last_rooted: Copy | None = None
        self._uses = 0

    # ------------------------------------------------------------ reading

    def find(self, space: Space, key: bytes) -> Copy | None:
        """The copy of a key, visible or not; None where it isn't in the index."""
        return space.index[self.tier].get(key)

    def visible_run(self, space: Space, keys: bytes) -> int:
        """How many leading keys of a chain that starts at a root are visible."""
        count = len(keys) // KEY_BYTES
        index = space.index[self.tier]
        run = index.visible_run(keys, count)
        while run and self._hidden.subtrees():
            copy = index.get(keys[(run - 1) * KEY_BYTES : run * KEY_BYTES])
            gap = None if copy is None else self._gap(copy)
            if gap is None:
                return run
            run = index.visible_run(keys, min(run - 1, gap.depth + 1))
        return run

    def current(self, space: Space, header: ChunkHeader) -> Slot | None:
        """The RESERVED or READY slot of one part of one chunk shard."""
        copy = self._attached(space, header)
        return None if copy is None else copy.slot(header.part, header.shard)

    def keeps(self, space: Space, slot: Slot) -> bool:
        """Whether this tier has, or is getting, what another tier's slot keeps."""
        copy = None if slot.owner is None else self.find(space, slot.owner.key)
        if copy is None or copy.slot(slot.part, slot.shard) is None:
            return False
        return self.rooted(copy)

    def ready(self, space: Space, key: bytes, part: Part, shard: int) -> Slot | None:
        """The READY slot of one part of one chunk shard."""
        copy = self.find(space, key)
        slot = None if copy is None else copy.slot(part, shard)
        return slot if slot is not None and slot.state is SlotState.READY else None

    def touch(self, copy: Copy) -> None:
        """Note a use of the copy."""
        self._uses += 1
        copy.last_use = self._uses
        for slot in copy.slots():
            slot.slab.last_use = self._uses

    def start_uses_at(self, use: int) -> None:
        """Uses from now on are later than ``use`` (the newest write that a scan found)."""
        self._uses = max(self._uses, use)

    # ------------------------------------------------------------ filling

    def reserve(self, space: Space, header: ChunkHeader) -> Slot | Drop:
        """A RESERVED slot for one part of one chunk shard, which must have none yet.

        The FULL part needs the parent's slot of that shard (RESERVED or READY); the WINDOW part
        needs the chunk's own FULL slot. May evict. A refusal leaves everything as it was, apart
        from what eviction or reclaiming freed on the way.
        """
        copy = self._attached(space, header)
        fresh = copy is None
        if copy is None:
            parent = None if header.depth == 0 else self.find(space, header.parent)
            if parent is not None and not self.rooted(parent):
                parent = None
            if (header.depth > 0 and parent is None) or header.part is Part.WINDOW:
                return Drop.PARENT_MISSING
            copy = Copy(space, header.key, header.depth, parent)
            copy.link()
        if not self._may_hold(copy, header):
            slot = None
            reason = Drop.PARENT_MISSING
        else:
            slot = self._allocate(slot_bytes(self.tier, header.payload_bytes), copy)
            reason = Drop.HOST_FULL if self.tier is TierName.HOST else Drop.NVME_FULL
            if slot is not None and not self._may_hold(copy, header):
                self.slabs.give_back(slot)
                slot, reason = None, Drop.PARENT_MISSING
        if slot is None:
            if fresh:
                self._orphan(copy)
            return reason
        slot.reserve(copy, header.shard, header.part, header.payload_bytes)
        copy.put(header.part, header.shard, slot)
        if fresh:
            self.touch(copy)
            self.enter(copy)
        return slot

    def landed(self, slot: Slot) -> None:
        """A RESERVED slot's bytes are whole: commit it, and what waited for it, as far as the order
        allows. A slot whose namespace was cleared meanwhile is cancelled instead."""
        copy = slot.owner
        if slot.state is not SlotState.RESERVED or copy is None:
            return
        if not copy.live or not copy.space.alive:
            self.fail(slot, Drop.CLEARED)
            return
        slot.landed = True
        self._advance(copy, slot.shard)

    def fail(self, slot: Slot, reason: Drop | None = None) -> None:
        """A RESERVED slot will not be filled: cancel it, counted under ``reason``, and what of the
        same shard hangs below it, counted as PARENT_LOST."""
        stack = [slot]
        while stack:
            top = stack.pop()
            copy = top.owner
            if top.state is not SlotState.RESERVED or copy is None:
                continue
            self._cancel(top, reason)
            reason = Drop.PARENT_LOST
            if top.part is Part.FULL:
                below = [copy.slot(Part.WINDOW, top.shard)]
                below += [child.slot(Part.FULL, top.shard) for child in copy.children()]
                stack += [s for s in below if s is not None]
            else:
                self._leave_if_empty(copy)
            if top.part is Part.FULL and copy.slot(Part.WINDOW, top.shard) is None:
                self._leave_if_empty(copy)

    def let_go(self, slot: Slot, move: MoveID) -> None:
        """A Move that held the slot has ended."""
        slot.let_go(move)
        if slot.free_if_dead():
            self.slabs.give_back(slot)
        elif slot.owner is not None:
            self.offer(slot.owner)

    # ------------------------------------------------------------ leaving

    def lease(self, copy: Copy) -> None:
        """Protect a copy's presence."""
        copy.leases += 1

    def unlease(self, copy: Copy) -> None:
        """End one lease's protection."""
        if copy.leases < 1:
            raise InvariantError(f"{copy!r}: a lease ended twice")
        copy.leases -= 1
        self.offer(copy)

    def doom(self, copy: Copy) -> None:
        """Take a copy out at once, whatever hangs on it; its subtree is hidden and swept later."""
        if not copy.live:
            return
        self._drop(copy)
        self._hidden.add(copy)

    def enter(self, copy: Copy) -> None:
        """Enter a copy into its space's index."""
        index = copy.space.index[self.tier]
        before = len(index)
        index.put(copy)
        self.chunks += len(index) - before

    def drop_space(self, space: Space) -> None:
        """A space has died: its copies are freed by sweeps."""
        index = space.index[self.tier]
        self.chunks -= len(index)
        self._hidden.add_index(index)

    def drop_index(self, index: Index) -> None:
        """Give up copies that are in no space's index; they are freed by sweeps."""
        self._hidden.add_index(index)

    def sweep(self, entries: int) -> int:
        """Free up to ``entries`` hidden copies; tells how many were freed."""
        freed = 0
        while freed < entries:
            copy = self._hidden.next()
            if copy is None:
                break
            self._drop(copy)
            self._hidden.add(copy)
            freed += 1
        return freed

    def sweeping(self) -> bool:
        """Whether hidden copies are left."""
        return bool(self._hidden)

    def offer(self, copy: Copy) -> None:
        """Tell the policies that a copy may be evictable."""
        self._candidates.offer(copy)

    def _leave(self, copy: Copy) -> None:
        """Take a copy out of its space's index."""
        copy.live = False
        if copy.space.index[self.tier].remove(copy) and copy.space.alive:
            self.chunks -= 1

    def _attached(self, space: Space, header: ChunkHeader) -> Copy | None:
        """The chunk's copy; one that is hidden is taken out first."""
        copy = self.find(space, header.key)
        if copy is not None and not self.rooted(copy):
            self.doom(copy)
            return None
        return copy

    def rooted(self, copy: Copy) -> bool:
        """Whether nothing above a copy is doomed."""
        return not self._hidden.subtrees() or self._gap(copy) is None

    def _gap(self, copy: Copy) -> Copy | None:
        """The doomed copy that a copy hangs below, if any. The copy last found to hang below none
        ends the next walk."""
        gap = gap_above(copy, self._last_rooted)
        if gap is None:
            self._last_rooted = copy
        return gap

    def _may_hold(self, copy: Copy, header: ChunkHeader) -> bool:
        if not copy.live or copy.slot(header.part, header.shard) is not None:
            return False
        if header.part is Part.WINDOW:
            return copy.slot(Part.FULL, header.shard) is not None
        parent = copy.parent
        if parent is None:
            return header.depth == 0
        return parent.live and parent.slot(Part.FULL, header.shard) is not None

    def _advance(self, copy: Copy, shard: int) -> None:
        stack = [copy]
        while stack:
            top = stack.pop()
            full, window = top.slot(Part.FULL, shard), top.slot(Part.WINDOW, shard)
            if full is not None and may_commit(full, top.parent):
                self._commit(full)
                stack += top.children()
            above = full is not None and full.state is SlotState.READY
            if window is not None and above and lands(window):
                self._commit(window)
            self.offer(top)

    def _commit(self, slot: Slot) -> None:
        slot.commit()
        copy = slot.owner
        if copy is None:
            raise InvariantError(f"{slot!r}: commits without a copy")
        copy.count_ready(slot.part, 1)
        if self.watched and slot.part is Part.FULL and copy.visible():
            self.changed.append((copy, True))
        self.settled += [(wait, True) for wait in slot.take_waits()]
        self.committed.append(slot)

    def _cancel(self, slot: Slot, reason: Drop | None) -> None:
        copy = slot.owner
        if reason is not None:
            self.lost[reason] += 1
        if copy is not None and copy.slot(slot.part, slot.shard) is slot:
            copy.put(slot.part, slot.shard, None)
        self.settled += [(wait, False) for wait in slot.take_waits()]
        slot.cancel()
        if slot.free_if_dead():
            self.slabs.give_back(slot)

    def _leave_if_empty(self, copy: Copy) -> None:
        if copy.live and not copy.slots():
            self._orphan(copy)
        elif copy.live:
            self.offer(copy)

    def _orphan(self, copy: Copy) -> None:
        """Take out a copy that has no slot."""
        self._drop(copy)
        self._hidden.add(copy)

    def _drop(self, copy: Copy) -> None:
        """Take a copy and its slots out of everything but its children's links."""
        if self.watched and copy.visible():
            self.changed.append((copy, False))
        self._last_rooted = None
        self._leave(copy)
        for slot in copy.slots():
            if slot.state is SlotState.RESERVED:
                self._cancel(slot, Drop.PARENT_LOST if copy.space.alive else Drop.CLEARED)
            elif slot.state is SlotState.READY:
                slot.doom()
                if slot.free_if_dead():
                    self.slabs.give_back(slot)
        parent = copy.parent
        copy.unlink()
        if parent is not None and parent.live:
            self.offer(parent)

    # ------------------------------------------------------------ room

    def _allocate(self, slot_bytes: int, guard: Copy) -> Slot | None:
        """A FREE slot: a free one, one freed by sweeping, a reclaimed slab's, or an evicted
        copy's."""
        slot = self.slabs.take(slot_bytes)
        if slot is None and self.sweep(_SWEEP_ENTRIES):
            slot = self.slabs.take(slot_bytes)
        if slot is not None:
            return slot
        self._candidates.guard = guard
        try:
            slab = self.slabs.coldest_foreign(slot_bytes)
            if slab is not None:
                self._reclaim(slab)
                slot = self.slabs.take(slot_bytes)
            while slot is None and self._evict_for(slot_bytes):
                slot = self.slabs.take(slot_bytes)
            return slot
        finally:
            self._candidates.guard = None
            self.offer(guard)

    def _reclaim(self, slab: Slab) -> None:
        """Doom every copy with a slot in the slab, so that it can be cut for another size."""
        for slot in list(slab):
            if slot.owner is not None and slot.state is not SlotState.FREE:
                self.evictions += slot.owner.live
                self.doom(slot.owner)

    def _evict_for(self, slot_bytes: int) -> bool:
        """Evict what leaves first among what frees a slot of this size."""
        found = self._candidates.take(slot_bytes)
        if found is None:
            return False
        self._evict(*found)
        return True

    def _evict(self, copy: Copy, parts: list[Part]) -> None:
        if self.watched and Part.FULL in parts and copy.visible():
            self.changed.append((copy, False))
        for part in parts:
            for shard, slot in enumerate(copy.part(part)):
                if slot is not None:
                    slot.evict()
                    self.slabs.give_back(slot)
                    copy.put(part, shard, None)
                    copy.count_ready(part, -1)
        self.evictions += 1
        if Part.FULL not in parts:
            return
        parent = copy.parent
        self._leave(copy)
        copy.unlink()
        if parent is not None:
            parent.last_use = max(parent.last_use, copy.last_use)
            self.offer(parent)
