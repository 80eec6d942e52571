"""Forest: a Tree under test, driven verb by verb, with chunks named by short strings.

A chunk's name is its path: "a" is a root, "ab" its child, "abc" the child of that. Slots are held
by a pretended Move from ``reserve`` on, as the core does it, until ``land`` or ``fail``.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import count

from kvstore.core.eviction import LeastRecentlyUsed
from kvstore.core.keys import KEY_BYTES, NO_PARENT, ChunkKey
from kvstore.core.layout import Part
from kvstore.core.limits import TierLimits
from kvstore.core.messages import ChunkHeader, MoveID, SessionID, SpaceRecord, TierName
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.stats import Drop
from kvstore.core.tickets import Ticket
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy

SLOT_BYTES = 4096


def state_of(slot: Slot) -> SlotState:
    """A slot's state, asked anew."""
    return slot.state


def key(name: str) -> ChunkKey:
    """A chunk's key: its name, padded; of a long name a digest."""
    name_bytes = name.encode()
    if len(name_bytes) > KEY_BYTES:
        return ChunkKey(sha256(name_bytes).digest())
    return ChunkKey(name_bytes.ljust(KEY_BYTES, b"."))


class Forest:
    """A host Tree of ``slots`` slots in slabs of ``slab_slots``, and one space of ``shards``."""

    def __init__(self, slots: int = 4, shards: int = 1, slab_slots: int | None = None) -> None:
        slab_slots = slab_slots or slots
        limits = TierLimits(slots // slab_slots, slab_slots * SLOT_BYTES)
        self.tree = Tree(TierName.HOST, limits, LeastRecentlyUsed)
        self.space = Space(SpaceRecord("t", b"n", "m", "", 0), shards, persisted=True)
        self._ids = count(1)
        self._moves: dict[Slot, MoveID] = {}

    def header(
        self, name: str, shard: int = 0, part: Part = Part.FULL, nbytes: int = SLOT_BYTES
    ) -> ChunkHeader:
        """The header of one part of one chunk shard."""
        return ChunkHeader(
            key=key(name),
            parent=key(name[:-1]) if name[1:] else NO_PARENT,
            depth=len(name) - 1,
            tenant="t",
            namespace=b"n",
            epoch=0,
            dtype="float32",
            tokens=16,
            shard=shard,
            shards=self.space.shards,
            part=part,
            payload_bytes=nbytes,
            sequence=0,
        )

    def try_reserve(
        self, name: str, shard: int = 0, part: Part = Part.FULL, nbytes: int = SLOT_BYTES
    ) -> Slot | Drop:
        """Reserve, or tell why not; a slot is held by its Move."""
        self.tree.begin()
        slot = self.tree.reserve(self.space, self.header(name, shard, part, nbytes))
        assert slot is not None, "room is made in one event here"
        if isinstance(slot, Slot):
            self._moves[slot] = MoveID(next(self._ids))
            slot.hold(self._moves[slot])
        self.tree.slabs.check()
        return slot

    def reserve(
        self, name: str, shard: int = 0, part: Part = Part.FULL, nbytes: int = SLOT_BYTES
    ) -> Slot:
        """Reserve what must be had."""
        slot = self.try_reserve(name, shard, part, nbytes)
        assert isinstance(slot, Slot), slot
        return slot

    def land(self, slot: Slot) -> None:
        """The bytes have landed, and the Move has ended."""
        self.tree.begin()
        self.tree.landed(slot)
        self.let_go(slot)

    def fail(self, slot: Slot) -> None:
        """The Move has failed."""
        self.tree.fail(slot)
        self.let_go(slot)

    def let_go(self, slot: Slot) -> None:
        """The slot's Move has ended."""
        self.tree.let_go(slot, self._moves.pop(slot))
        self.tree.slabs.check()

    def put(self, *names: str) -> None:
        """Store chunks to their end, all shards."""
        for name in names:
            for shard in range(self.space.shards):
                self.land(self.reserve(name, shard))

    def run(self, name: str) -> int:
        """How many chunks of a path a lookup sees."""
        path = b"".join(key(name[: length + 1]) for length in range(len(name)))
        return self.tree.visible_run(self.space, path)

    def copy(self, name: str) -> Copy:
        """The copy of a chunk that is in the index."""
        found = self.tree.find(self.space, key(name))
        assert found is not None, name
        return found

    def has(self, name: str) -> bool:
        """Whether a chunk is in the index."""
        return self.tree.find(self.space, key(name)) is not None

    def names(self) -> set[str]:
        """All chunks in the index."""
        return {c.key.decode().rstrip(".") for c in self.space.index[TierName.HOST]}

    def used(self) -> int:
        """Slots that aren't FREE."""
        return sum(slab.used() for slab in self.tree.slabs.cuts())

    def wait_on(self, slot: Slot) -> Ticket:
        """A ticket of one chunk that waits for the slot."""
        ticket = Ticket(_SESSION, 0, "store", "r")
        ticket.begin(b"", 1, 0.0)
        slot.add_wait(ticket.wait(0))
        return ticket

    def settle(self) -> None:
        """Tell the tickets what was settled, as the service does after each event."""
        for wait, ok in self.tree.settled:
            wait.ticket.settle(wait.chunk, ok)
        self.tree.settled.clear()

    def sweep_all(self) -> int:
        """Sweep one entry at a time until nothing is left; returns how many were freed."""
        freed = 0
        while self.tree.sweeping():
            freed += self.tree.sweep(1)
            self.tree.slabs.check()
        return freed


_SESSION = SessionID(1)
