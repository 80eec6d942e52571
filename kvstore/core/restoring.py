"""Restoring: a tier's tree from the slots that a scan finds at start.

Slots come in any order. A copy that isn't whole yet (each shard's FULL part), or whose parent isn't
in the index, is *loose*: it stays outside the index, linked below its parent all the same, for
which a copy without slots stands in until the parent is found. So the index is prefix-closed at any
time, and lookups are what they always are. A copy that enters the index may bring a million others
along: they follow in steps. When the scan is done, what is still loose is an orphan. Of two slots
for one part the one written later is kept.
"""

from __future__ import annotations

from kvstore.core.cascades import Spread
from kvstore.core.keys import ChunkKey
from kvstore.core.messages import ChunkHeader, ScanDone, Scanned
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.stats import Drop
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy, Index

STEP_COPIES = 256
"""Loose copies that one event looks at, to bring them into the index."""


class Restoring:
    """The scan of the NVMe tier, as it goes on."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._loose: dict[Space, Index] = {}
        self._loose_slots = 0
        self._entered = Spread()
        self._ended = False

    def scanned(self, event: Scanned) -> None:
        """Take over a batch of slots."""
        nvme = self._state.directory.nvme
        if nvme is None:
            return
        for found in event.slots:
            self._state.drop(Drop.SCAN_TORN, found.damaged)
            slot = nvme.slabs.adopt(found.place)
            if slot is None:
                self._state.drop(Drop.SCAN_ORPHAN, found.header is not None)
            elif found.header is None:
                nvme.slabs.give_back(slot)
            else:
                reason = self._enter(nvme, slot, found.header)
                if reason is not None:
                    self._state.drop(reason)
                    nvme.slabs.give_back(slot)
        self.step()

    def done(self, _: ScanDone) -> None:
        """The scan has ended: once all that can follow has, the rest are orphans."""
        self._ended = True
        self.step()

    def running(self) -> bool:
        """Whether it goes on at the next Tick."""
        return self._ended or bool(self._entered)

    def step(self) -> None:
        """Bring some of what hangs below new copies into the index; at the end drop the rest."""
        nvme = self._state.directory.nvme
        if nvme is None:
            self._ended = False
            return
        for _ in range(STEP_COPIES):
            found = self._entered.next()
            if found is None:
                break
            if not self._is_in(nvme, found[0]):
                self._hang_up(nvme, found[0])
        if self._ended and not self._entered:
            self._end(nvme)

    # ------------------------------------------------------------ private

    def _end(self, nvme: Tree) -> None:
        self._state.drop(Drop.SCAN_ORPHAN, self._loose_slots)
        for index in self._loose.values():
            nvme.drop_index(index)
        self._loose = {}
        self._loose_slots = 0
        self._ended = False
        nvme.slabs.open_unseen()
        nvme.scanning = False

    def _enter(self, nvme: Tree, slot: Slot, header: ChunkHeader) -> Drop | None:
        """Take over one valid slot; tells why it can't be, if so."""
        state = self._state
        state.sequence = max(state.sequence, header.sequence)
        nvme.start_uses_at(header.sequence)
        space = state.spaces.find(header.tenant, header.namespace)
        if space is None:
            return Drop.SCAN_ORPHAN
        if header.epoch != space.epoch:
            return Drop.SCAN_OLD_EPOCH
        if not space.shards:
            space.shards, space.dtype, space.tokens = header.shards, header.dtype, header.tokens
        shape = (header.shards, header.dtype, header.tokens)
        if shape != (space.shards, space.dtype, space.tokens) or header.shard >= header.shards:
            return Drop.SCAN_ORPHAN
        copy = self._copy(nvme, space, header)
        if copy is None:
            return Drop.SCAN_ORPHAN
        former = copy.slot(header.part, header.shard)
        if former is not None and not self._replaces(nvme, former, header.sequence):
            return Drop.SCAN_DUPLICATE
        slot.reserve(copy, header.shard, header.part, header.payload_bytes)
        slot.charge(nvme.accounts.of(space.tenant))
        slot.landed = True
        slot.sequence = header.sequence
        slot.commit()
        copy.put(header.part, header.shard, slot)
        copy.count_ready(header.part, 1)
        copy.last_use = max(copy.last_use, header.sequence)
        slot.slab.last_use = max(slot.slab.last_use, header.sequence)
        if self._is_in(nvme, copy):
            nvme.offer(copy)
        else:
            self._loose_slots += 1
            self._hang_up(nvme, copy)
        return None

    def _copy(self, nvme: Tree, space: Space, header: ChunkHeader) -> Copy | None:
        """The copy that the slot belongs to, made and hung below its parent if it is new; None
        where it isn't at its depth."""
        copy = self._find(nvme, space, header.key)
        if copy is not None and copy.slots():
            return copy if copy.depth == header.depth else None
        parent = self._find(nvme, space, header.parent) if header.depth else None
        if parent is not None and parent.slots() and parent.depth + 1 != header.depth:
            return None
        if copy is None:
            copy = self._make(space, header.key, header.depth)
        else:
            copy.depth = header.depth
        if header.depth:
            if parent is None:
                parent = self._make(space, header.parent, header.depth - 1)
            copy.parent = parent
            copy.link()
        return copy

    def _find(self, nvme: Tree, space: Space, key: bytes) -> Copy | None:
        """A key's copy, in the index or loose; one that was swept meanwhile is forgotten."""
        copy = nvme.find(space, key)
        loose = self._loose.get(space)
        if copy is None and loose is not None:
            copy = loose.get(key)
            if copy is not None and not copy.live:
                loose.remove(copy)
                copy = None
        return copy

    def _make(self, space: Space, key: bytes, depth: int) -> Copy:
        loose = self._loose.get(space)
        if loose is None:
            loose = self._loose[space] = Index()
        copy = Copy(space, ChunkKey(key), depth, None)
        loose.put(copy)
        return copy

    def _hang_up(self, nvme: Tree, copy: Copy) -> None:
        """Enter a loose copy into the index, if it is whole and its parent is there."""
        parent = copy.parent
        if not copy.visible() or copy.depth != (0 if parent is None else parent.depth + 1):
            return
        if parent is not None and not self._is_in(nvme, parent):
            return
        self._loose[copy.space].remove(copy)
        self._loose_slots -= len(copy.slots())
        copy.find_anchor()
        nvme.enter(copy)
        nvme.offer(copy)
        self._entered.add(copy)

    def _is_in(self, nvme: Tree, copy: Copy) -> bool:
        return nvme.find(copy.space, copy.key) is copy

    def _replaces(self, nvme: Tree, former: Slot, sequence: int) -> bool:
        """Whether a slot written at ``sequence`` replaces the former one, which then is free."""
        copy = former.owner
        older = former.sequence < sequence
        if not older or copy is None or former.holders or former.state is not SlotState.READY:
            return False
        self._state.drop(Drop.SCAN_DUPLICATE)
        self._loose_slots -= not self._is_in(nvme, copy)
        copy.put(former.part, former.shard, None)
        copy.count_ready(former.part, -1)
        former.evict()
        nvme.slabs.give_back(former)
        return True
