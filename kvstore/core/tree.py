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

from kvstore.core.candidates import Candidates
from kvstore.core.cascades import Spread
from kvstore.core.errors import InvariantError
from kvstore.core.eviction import MakePolicy
from kvstore.core.hidden import Hidden
from kvstore.core.keys import KEY_BYTES
from kvstore.core.layout import Part
from kvstore.core.limits import TierLimits, slot_bytes
from kvstore.core.messages import ChunkHeader, MoveID, TierName
from kvstore.core.quotas import NO_QUOTAS, Accounts, Quotas
from kvstore.core.room import Room
from kvstore.core.slabs import SlabSpace
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.stats import Drop
from kvstore.core.tickets import Wait
from kvstore.core.tree_nodes import Copy, Index, gap_above, lands, may_commit

STEP_COPIES = 256
"""Copies that one event looks at because another one was committed, or failed."""


class Tree:
    """The copies of one tier. Mutated by the core's thread only."""

    def __init__(
        self, tier: TierName, limits: TierLimits, policy: MakePolicy, quotas: Quotas = NO_QUOTAS
    ) -> None:
        self.tier = tier
        self.slabs = SlabSpace(tier, limits)
        self.settled: list[tuple[Wait, bool]] = []
        self.committed: list[Slot] = []
        self.lost: Counter[Drop] = Counter()
        self.evictions = 0
        self.watched = False
        self.changed: list[tuple[Copy, Part, bool]] = []  # what came or left, while it is watched
        self.chunks = 0  # in the indices of spaces that are alive
        self.scanning = False  # a scan restores the tree: more may be found
        self.accounts = Accounts(quotas, limits.slabs * limits.slab_bytes)
        self.candidates = Candidates(policy, quotas)
        self.room = Room(self)
        self._hidden = Hidden()
        self._failed = Spread()
        self._committed = Spread()
        self._steps_left = STEP_COPIES
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

    def reserve(self, space: Space, header: ChunkHeader) -> Slot | Drop | None:
        """A RESERVED slot for one part of one chunk shard, which must have none yet.

        The FULL part needs the parent's slot of that shard (RESERVED or READY); the WINDOW part
        needs the chunk's own FULL slot. May evict. A refusal leaves everything as it was, apart
        from what eviction or reclaiming freed on the way. None: room is still being made, which
        goes on in the next event.
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
        slot: Slot | Drop | None = Drop.PARENT_MISSING
        if self._may_hold(copy, header):
            account = self.accounts.of(space.tenant)
            slot = self.room.take(slot_bytes(self.tier, header.payload_bytes), copy, account)
            if isinstance(slot, Slot) and not self._may_hold(copy, header):
                self.slabs.give_back(slot)
                slot = Drop.PARENT_MISSING
        if not isinstance(slot, Slot):
            if fresh:
                self._orphan(copy)
            return slot
        slot.reserve(copy, header.shard, header.part, header.payload_bytes)
        slot.charge(account)
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
        self._commit_what_may(copy, slot.shard)
        self.step()

    def fail(self, slot: Slot, reason: Drop | None = None) -> None:
        """A RESERVED slot will not be filled: cancel it, counted under ``reason``, and what of the
        same shard hangs below it, counted as PARENT_LOST."""
        self._fail_one(slot, reason)
        self.step()

    def begin(self) -> None:
        """A new event begins, with its own share of work that may be left to later ones."""
        self._steps_left = STEP_COPIES
        self.room.begin()

    def stepping(self) -> bool:
        """Whether commits or failures are left to go on, at the next Tick."""
        return bool(self._committed or self._failed)

    def step(self) -> None:
        """Go on with what follows from commits and failures, as far as this event may."""
        while self._steps_left > 0 and self.stepping():
            self._steps_left -= 1
            failed = self._failed.next()
            if failed is not None:
                slot = failed[0].slot(Part.FULL, failed[1])
                if slot is not None:
                    self._fail_one(slot, Drop.PARENT_LOST)
                continue
            committed = self._committed.next()
            if committed is not None:
                self._commit_what_may(*committed)

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
        if copy.leases == 1:
            for slot in copy.slots():
                slot.mark_leased(True)

    def unlease(self, copy: Copy) -> None:
        """End one lease's protection."""
        if copy.leases < 1:
            raise InvariantError(f"{copy!r}: a lease ended twice")
        copy.leases -= 1
        if not copy.leases:
            for slot in copy.slots():
                if slot.owner is copy:
                    slot.mark_leased(False)
        self.offer(copy)

    def doom(self, copy: Copy) -> None:
        """Take a copy out at once, whatever hangs on it; its subtree is hidden and swept later."""
        if not copy.live:
            return
        self._drop(copy)
        self._hidden.add(copy)

    def enter(self, copy: Copy) -> None:
        """Enter a copy into its space's index."""
        self.chunks += copy.space.index[self.tier].put(copy)

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
            self.candidates.trim()
            freed += 1
        return freed

    def sweeping(self) -> bool:
        """Whether hidden copies are left."""
        return bool(self._hidden)

    def offer(self, copy: Copy) -> None:
        """Tell the policies that a copy may be evictable."""
        self.candidates.offer(copy)

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

    def _fail_one(self, slot: Slot, reason: Drop | None) -> None:
        copy = slot.owner
        if slot.state is not SlotState.RESERVED or copy is None:
            return
        self._cancel(slot, reason)
        if slot.part is Part.FULL:
            self._failed.add(copy, slot.shard)
            window = copy.slot(Part.WINDOW, slot.shard)
            if window is not None:
                self._fail_one(window, Drop.PARENT_LOST)
        self._leave_if_empty(copy)

    def _commit_what_may(self, copy: Copy, shard: int) -> None:
        """Commit what of one shard of a copy has landed, as far as the order allows."""
        full, window = copy.slot(Part.FULL, shard), copy.slot(Part.WINDOW, shard)
        if full is not None and may_commit(full, copy.parent):
            self._commit(full)
            self._committed.add(copy, shard)
        above = full is not None and full.state is SlotState.READY
        if window is not None and above and lands(window):
            self._commit(window)
        self.offer(copy)

    def _commit(self, slot: Slot) -> None:
        slot.commit()
        copy = slot.owner
        if copy is None:
            raise InvariantError(f"{slot!r}: commits without a copy")
        copy.count_ready(slot.part, 1)
        if self.watched and slot.part in copy.visible_parts():
            self.changed.append((copy, slot.part, True))
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
        if self.watched:
            self.changed += [(copy, part, False) for part in copy.visible_parts()]
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

    def evict(self, copy: Copy, parts: list[Part]) -> None:
        """Take parts of a copy out; the whole copy leaves with its FULL part."""
        if self.watched:
            self.changed += [(copy, part, False) for part in copy.visible_parts() if part in parts]
        for slot in copy.slots():
            if slot.part in parts:
                copy.put(slot.part, slot.shard, None)
                copy.count_ready(slot.part, -1)
                slot.evict()
                self.slabs.give_back(slot)
        self.evictions += 1
        if Part.FULL not in parts:
            return
        parent = copy.parent
        self._leave(copy)
        copy.unlink()
        if parent is not None:
            parent.last_use = max(parent.last_use, copy.last_use)
            self.offer(parent)
