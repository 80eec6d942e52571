"""Restoring: a tier's tree from the slots that a scan finds at start.

Slots come in any order. A copy whose parent isn't there yet stays *loose*, outside the index; it is
hung up as soon as the parent is. When the scan is done, what is still loose is an orphan, and
copies that lack a shard are doomed with what hangs below them. Of two slots for one part the one
written later is kept. Until then lookups walk, as a link may be missing.
"""

from __future__ import annotations

from kvstore.core.keys import ChunkKey
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, ScannedSlot
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.stats import Drop
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy, Index


class Restoring:
    """The scan of the NVMe tier, as it goes on."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._loose: dict[Space, Index] = {}
        self._waiting: dict[tuple[Space, ChunkKey], list[Copy]] = {}
        self._incomplete: dict[int, Copy] = {}
        self._sequences: dict[Slot, int] = {}

    def scanned(self, slots: tuple[ScannedSlot, ...]) -> None:
        """Take over a batch of slots."""
        nvme = self._state.directory.nvme
        if nvme is None:
            return
        for found in slots:
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

    def done(self) -> None:
        """The scan has ended: orphans and incomplete families go."""
        nvme = self._state.directory.nvme
        if nvme is None:
            return
        for index in self._loose.values():
            self._state.drop(Drop.SCAN_ORPHAN, len(index))
            nvme.drop_index(index)
        for copy in self._incomplete.values():
            if copy.live and copy.space.index[nvme.tier].get(copy.key) is copy:
                self._state.drop(Drop.SCAN_ORPHAN)
                nvme.doom(copy)
        self._loose = {}
        self._waiting = {}
        self._incomplete = {}
        self._sequences = {}
        nvme.slabs.open_unseen()
        nvme.linear = False

    # ------------------------------------------------------------ private

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
        slot.landed = True
        slot.commit()
        copy.parts[header.part][header.shard] = slot
        copy.ready[header.part] += 1
        copy.last_use = max(copy.last_use, header.sequence)
        nvme.slabs.touch(slot, header.sequence)
        self._sequences[slot] = header.sequence
        if copy.ready[Part.FULL] == space.shards:
            self._incomplete.pop(id(copy), None)
        nvme.offer(copy)
        return None

    def _copy(self, nvme: Tree, space: Space, header: ChunkHeader) -> Copy | None:
        """The copy that the slot belongs to, made and hung up if it is new."""
        loose = self._loose.get(space)
        if loose is None:
            loose = self._loose[space] = Index()
        copy = space.index[nvme.tier].get(header.key) or loose.get(header.key)
        if copy is not None:
            return copy if copy.depth == header.depth else None
        parent = space.index[nvme.tier].get(header.parent) if header.depth else None
        if parent is not None and parent.depth + 1 != header.depth:
            return None
        copy = Copy(space, header.key, header.depth, None)
        self._incomplete[id(copy)] = copy
        if header.depth and parent is None:
            loose.put(copy)
            self._waiting.setdefault((space, header.parent), []).append(copy)
        else:
            self._hang_up(nvme, copy, parent)
        return copy

    def _hang_up(self, nvme: Tree, copy: Copy, parent: Copy | None) -> None:
        """Enter a copy into the index, and all that waited for it."""
        stack = [(copy, parent)]
        while stack:
            top, above = stack.pop()
            if above is not None and above.depth + 1 != top.depth:
                continue
            self._loose[top.space].remove(top)
            top.parent = above
            top.link()
            top.space.index[nvme.tier].put(top)
            nvme.offer(top)
            for child in self._waiting.pop((top.space, top.key), []):
                stack.append((child, top))

    def _replaces(self, nvme: Tree, former: Slot, sequence: int) -> bool:
        """Whether a slot written at ``sequence`` replaces the former one, which then is free."""
        copy = former.owner
        older = self._sequences.get(former, sequence) < sequence
        if not older or copy is None or former.holders or former.state is not SlotState.READY:
            return False
        self._state.drop(Drop.SCAN_DUPLICATE)
        copy.parts[former.part][former.shard] = None
        copy.ready[former.part] -= 1
        self._sequences.pop(former)
        former.evict()
        nvme.slabs.give_back(former)
        return True
