"""Copy and Index: the nodes of a tier's prefix tree, and the map from keys to them.

A Copy is one chunk's presence in one tier: a slot for each shard and part. Copies of one namespace
form a tree in each tier, a child being the chunk that follows. Children hang on an intrusive list,
so a node costs no container. Links are cut when a copy leaves, as the daemon runs without cyclic
collection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.core.keys import KEY_BYTES, ChunkKey
from kvstore.core.layout import Part
from kvstore.core.slots import Slot, SlotState

if TYPE_CHECKING:
    from kvstore.core.spaces import Space


SPLIT_ENTRIES = 4096
_ANCHOR_STEP = 64


class Copy:
    """One chunk in one tier. ``slot(part, shard)`` is its slot, RESERVED or READY, or None.

    ``full_ready`` and ``window_ready`` count the READY slots of each part; a copy is visible once
    every shard's FULL part is READY.
    ``live`` is False from the moment that it has left the index; ``leases`` and ``stores`` count.
    Stores are those by the rank that stored it first, so that an engine's ranks count as one.

    ``anchor`` is the nearest copy above whose depth is a multiple of 64; ``broken`` tells of such a
    one that a copy between it and the next was doomed, so that a walk up from far below takes few
    steps wherever nothing is amiss.
    """

    __slots__ = (
        "_slots",
        "anchor",
        "broken",
        "depth",
        "first_child",
        "full_ready",
        "key",
        "last_use",
        "leases",
        "live",
        "next_sibling",
        "parent",
        "previous_sibling",
        "space",
        "stored_by",
        "stores",
        "window_ready",
    )

    def __init__(self, space: Space, key: ChunkKey, depth: int, parent: Copy | None) -> None:
        self.space = space
        self.key = key
        self.depth = depth
        self.parent = parent
        self.anchor: Copy | None = None
        self.broken = False
        self.first_child: Copy | None = None
        self.next_sibling: Copy | None = None
        self.previous_sibling: Copy | None = None
        self._slots: list[Slot | None] = [None] * (2 * space.shards)
        self.full_ready = 0
        self.window_ready = 0
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
        space = self.space
        return self.full_ready == space.shards and self.live and space.alive

    def window_visible(self) -> bool:
        """Whether every shard's WINDOW part is READY too."""
        return self.visible() and self.window_ready == self.space.shards

    def visible_parts(self) -> list[Part]:
        """The parts of which readers may see every shard's."""
        if not self.visible():
            return []
        return [Part.FULL, Part.WINDOW] if self.window_visible() else [Part.FULL]

    def slot(self, part: Part, shard: int) -> Slot | None:
        """The slot of one part of one shard."""
        return self._slots[shard + shard + part]

    def put(self, part: Part, shard: int, slot: Slot | None) -> None:
        """Set or take away the slot of one part of one shard."""
        self._slots[shard + shard + part] = slot

    def part(self, part: Part) -> list[Slot | None]:
        """The slots of a part, by shard."""
        return self._slots[part::2]

    def slots(self) -> list[Slot]:
        """All slots that it has."""
        return list(filter(None, self._slots))

    def idle(self, part: Part | None = None) -> bool:
        """Whether it has slots, of that part or any, and all are READY and held by no Move."""
        some = False
        for slot in self._slots if part is None else self._slots[part::2]:
            if slot is not None:
                if slot.state is not SlotState.READY or slot.holders:
                    return False
                some = True
        return some

    def slot_sizes(self, part: Part) -> tuple[int, ...]:
        """The sizes of a part's slots, each once, rising."""
        found = [slot.slab.slot_bytes for slot in self._slots[part::2] if slot is not None]
        return tuple(found) if len(found) == 1 else tuple(sorted(set(found)))

    def count_ready(self, part: Part, change: int) -> None:
        """So many more of a part's slots are READY."""
        if part is Part.FULL:
            self.full_ready += change
        else:
            self.window_ready += change

    def use(self) -> int:
        """Its rank for eviction: the last use; an incomplete family leaves first."""
        return self.last_use if self.full_ready == self.space.shards else 0

    def link(self) -> None:
        """Hang it below its parent."""
        parent = self.parent
        if parent is None:
            return
        self.find_anchor()
        head = parent.first_child
        self.next_sibling = head
        if head is not None:
            head.previous_sibling = self
        parent.first_child = self

    def find_anchor(self) -> None:
        """Take the anchor from its parent, whose place in the tree is known."""
        parent = self.parent
        if parent is not None:
            self.anchor = parent.anchor if parent.depth % _ANCHOR_STEP else parent

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

    def break_off(self) -> None:
        """It leaves while others hang below it: walks up must look at each copy around here."""
        anchor = self.anchor if self.depth % _ANCHOR_STEP else self
        if anchor is not None:
            anchor.broken = True

    def children(self) -> Iterator[Copy]:
        """Its children; the tree must not change meanwhile."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling


class Index:
    """Keys to copies, of one namespace in one tier.

    One dict while it is small, then 256 by the key's first byte: a dict that grows stalls its
    caller for as long as it copies itself, which for one of a million entries is tens of
    milliseconds. There may be many thousands of namespaces, hence the one dict.
    """

    __slots__ = ("_count", "_maps", "_mask")

    def __init__(self) -> None:
        self._maps: tuple[dict[bytes, Copy], ...] = ({},)
        self._mask = 0
        self._count = 0

    def get(self, key: bytes) -> Copy | None:
        """The copy of this key."""
        return self._maps[key[0] & self._mask].get(key)

    def put(self, copy: Copy) -> int:
        """Enter a copy; tells how many more there are now."""
        found = self._maps[copy.key[0] & self._mask]
        before = len(found)
        found[copy.key] = copy
        more = len(found) - before
        self._count += more
        if self._count > SPLIT_ENTRIES and not self._mask:
            self._split()
        return more

    def remove(self, copy: Copy) -> bool:
        """Take a copy out; tells whether it was there. Nothing happens where the key stands for
        another one by now."""
        found = self._maps[copy.key[0] & self._mask]
        if found.get(copy.key) is not copy:
            return False
        del found[copy.key]
        self._count -= 1
        return True

    def visible_run(self, keys: bytes, count: int) -> int:
        """How many of the first ``count`` keys of a chain are visible: the last key is looked at
        first, as most prompts that hit do so in whole, then a bisection follows. Right where the
        copies are prefix-closed; elsewhere the last of them is visible all the same, and the one
        behind it isn't."""
        maps, mask = self._maps, self._mask
        low, middle = 0, count - 1
        while low < count:
            place = middle * KEY_BYTES
            copy = maps[keys[place] & mask].get(keys[place : place + KEY_BYTES])
            if copy is not None and copy.visible():
                low = middle + 1
            else:
                count = middle
            middle = (low + count) // 2
        return low

    def pop_any(self) -> Copy | None:
        """Take out some copy; None when it is empty."""
        for found in self._maps if self._count else ():
            if found:
                self._count -= 1
                return found.popitem()[1]
        return None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Copy]:
        for found in self._maps:
            yield from found.values()

    def _split(self) -> None:
        whole = self._maps[0]
        self._maps = tuple({} for _ in range(256))
        self._mask = 255
        for key, copy in whole.items():
            self._maps[key[0]][key] = copy


def gap_above(copy: Copy, rooted: Copy | None) -> Copy | None:
    """The nearest copy at or above this one that has left its tree; None where none has. The walk
    ends well at ``rooted``."""
    above: Copy | None = copy
    while above is not None and above is not rooted:
        if not above.live:
            return above
        anchor = above.anchor
        above = above.parent if anchor is None or anchor.broken else anchor
    return None


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
