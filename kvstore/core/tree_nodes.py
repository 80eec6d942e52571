"""Copy and Index: the nodes of a tier's prefix tree, and the map from keys to them.

A Copy is one chunk's presence in one tier: a slot for each shard and part. Copies of one namespace
form a tree in each tier, a child being the chunk that follows. Children hang on an intrusive list,
so a node costs no container. Links are cut when a copy leaves, as the daemon runs without cyclic
collection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.core.keys import ChunkKey
from kvstore.core.layout import Part
from kvstore.core.slots import Slot, SlotState

if TYPE_CHECKING:
    from kvstore.core.spaces import Space


class Copy:
    """One chunk in one tier. ``parts[part][shard]`` is its slot, RESERVED or READY, or None.

    ``ready[part]`` counts READY slots; a copy is visible once every shard's FULL part is READY.
    ``live`` is False from the moment that it has left the index; ``leases`` and ``stores`` count.
    Stores are those by the rank that stored it first, so that an engine's ranks count as one.
    """

    __slots__ = (
        "depth",
        "first_child",
        "key",
        "last_use",
        "leases",
        "live",
        "next_sibling",
        "parent",
        "parts",
        "previous_sibling",
        "ready",
        "space",
        "stored_by",
        "stores",
    )

    def __init__(self, space: Space, key: ChunkKey, depth: int, parent: Copy | None) -> None:
        self.space = space
        self.key = key
        self.depth = depth
        self.parent = parent
        self.first_child: Copy | None = None
        self.next_sibling: Copy | None = None
        self.previous_sibling: Copy | None = None
        self.parts: tuple[list[Slot | None], list[Slot | None]] = (
            [None] * space.shards,
            [None] * space.shards,
        )
        self.ready = [0, 0]
        self.live = True
        self.leases = 0
        self.stores = 0
        self.stored_by: int | None = None
        self.last_use = 0

    def __repr__(self) -> str:
        return f"Copy({self.key.hex()[:8]} depth {self.depth})"

    def count_store(self, rank: int) -> None:
        """A rank of some engine has stored it, once more or for the first time."""
        if self.stored_by is None:
            self.stored_by = rank
        if self.stored_by == rank:
            self.stores += 1

    def visible(self) -> bool:
        """Whether readers may see it: every shard's FULL part is READY and its epoch is current."""
        return self.ready[Part.FULL] == self.space.shards and self.live and self.space.alive

    def window_visible(self) -> bool:
        """Whether every shard's WINDOW part is READY too."""
        return self.visible() and self.ready[Part.WINDOW] == self.space.shards

    def slot(self, part: Part, shard: int) -> Slot | None:
        """The slot of one part of one shard."""
        return self.parts[part][shard]

    def slots(self) -> Iterator[Slot]:
        """All slots that it has."""
        for part in self.parts:
            for slot in part:
                if slot is not None:
                    yield slot

    def use(self) -> int:
        """Its rank for eviction: the last use; an incomplete family leaves first."""
        return self.last_use if self.ready[Part.FULL] == self.space.shards else 0

    def link(self) -> None:
        """Hang it below its parent."""
        parent = self.parent
        if parent is None:
            return
        head = parent.first_child
        self.next_sibling = head
        if head is not None:
            head.previous_sibling = self
        parent.first_child = self

    def unlink(self) -> None:
        """Take it from its parent."""
        parent = self.parent
        if self.previous_sibling is not None:
            self.previous_sibling.next_sibling = self.next_sibling
        elif parent is not None and parent.first_child is self:
            parent.first_child = self.next_sibling
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self.previous_sibling
        self.next_sibling = self.previous_sibling = self.parent = None

    def children(self) -> Iterator[Copy]:
        """Its children; the tree must not change meanwhile."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling


class Index:
    """Keys to copies, of one namespace in one tier.

    64 dicts by the key's first byte: one that grows stalls its caller for as long as it copies
    itself, which for a single dict of a million entries is tens of milliseconds.
    """

    __slots__ = ("_maps",)

    def __init__(self) -> None:
        self._maps: tuple[dict[bytes, Copy], ...] = tuple({} for _ in range(64))

    def get(self, key: bytes) -> Copy | None:
        """The copy of this key."""
        return self._maps[key[0] & 63].get(key)

    def put(self, copy: Copy) -> None:
        """Enter a copy."""
        self._maps[copy.key[0] & 63][copy.key] = copy

    def remove(self, copy: Copy) -> None:
        """Take a copy out; nothing happens where the key stands for another one by now."""
        found = self._maps[copy.key[0] & 63]
        if found.get(copy.key) is copy:
            del found[copy.key]

    def pop_any(self) -> Copy | None:
        """Take out some copy; None when it is empty."""
        for found in self._maps:
            if found:
                return found.popitem()[1]
        return None

    def __len__(self) -> int:
        return sum(map(len, self._maps))

    def __iter__(self) -> Iterator[Copy]:
        for found in self._maps:
            yield from found.values()


def lands(slot: Slot) -> bool:
    """Whether a slot's bytes are whole and it isn't committed yet."""
    return slot.state is SlotState.RESERVED and slot.landed


def may_commit(slot: Slot, parent: Copy | None) -> bool:
    """Whether a slot may become READY: its bytes have landed, and its parent's slot is READY."""
    if not lands(slot):
        return False
    if parent is None:
        return True
    above = parent.slot(Part.FULL, slot.shard)
    return parent.live and above is not None and above.state is SlotState.READY
