"""Directory: the hit over both tiers, one bisection a tier, and the staging ring."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.core.directory import Directory
from kvstore.core.errors import InvariantError
from kvstore.core.eviction import LeastRecentlyUsed
from kvstore.core.keys import KEY_BYTES, NO_PARENT, ChunkKey
from kvstore.core.layout import Part
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import ChunkHeader, MoveID, SpaceRecord, TierName
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy, Index

SLOTS = 512


class Shelf:
    """A directory of two tiers and one chain of chunks, named by their place in it."""

    def __init__(self, chunks: int, staging_slots: int = 2) -> None:
        nvme = TierLimits(1, SLOTS * 8192)
        self.limits = Limits(TierLimits(1, SLOTS * 4096), nvme, staging_slots=staging_slots)
        self.directory = Directory(self.limits, LeastRecentlyUsed)
        self.space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
        self.keys = b"".join(place.to_bytes(KEY_BYTES, "little") for place in range(1, chunks + 1))

    def key(self, place: int) -> ChunkKey:
        """The key of a chunk."""
        return ChunkKey(self.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES])

    def put(self, tree: Tree | None, *places: int, part: Part = Part.FULL) -> None:
        """Chunks are READY in a tier."""
        assert tree is not None
        for place in places:
            header = ChunkHeader(
                key=self.key(place),
                parent=self.key(place - 1) if place else NO_PARENT,
                depth=place,
                tenant="t",
                namespace=b"n",
                epoch=0,
                dtype="float32",
                tokens=16,
                shard=0,
                shards=1,
                part=part,
                payload_bytes=4096,
                sequence=0,
            )
            slot = tree.reserve(self.space, header)
            assert isinstance(slot, Slot)
            tree.landed(slot)

    def hit(self, window_chunks: int = 0) -> tuple[int, set[tuple[TierName, int]]]:
        """The hit, and which chunk is pinned in which tier."""
        seen = self.directory.see(self.space, self.keys, window_chunks)
        self.directory.count(len(self.keys) // KEY_BYTES, seen)
        held = self.keys[: seen.chunks * KEY_BYTES]
        pins = self.directory.pin(self.space, held, seen, window_chunks)
        return seen.chunks, {(tree.tier, copy.depth) for tree, copy in pins}


class CountingKeys(bytes):
    """Keys that count how many of them are looked at."""

    asked = 0

    def __getitem__(self, place: object) -> Any:
        """A byte, or the bytes of a key."""
        self.asked += isinstance(place, slice)
        return super().__getitem__(place)  # type: ignore[index]


def test_a_hit_is_the_longer_run_and_pins_the_deepest_chunk_of_each_tier() -> None:
    """Host has 3, NVMe 5 of six: the hit is 5, chunk 2 is pinned in the host, chunk 4 on NVMe."""
    shelf = Shelf(6)
    shelf.put(shelf.directory.host, 0, 1, 2)
    shelf.put(shelf.directory.nvme, 0, 1, 2, 3, 4)
    assert shelf.hit() == (5, {(TierName.HOST, 2), (TierName.NVME, 4)})


def test_a_hit_that_the_host_has_whole_pins_nothing_on_nvme() -> None:
    """What NVMe has beside it may leave."""
    shelf = Shelf(4)
    shelf.put(shelf.directory.host, 0, 1, 2)
    shelf.put(shelf.directory.nvme, 0, 1, 2)
    assert shelf.hit() == (3, {(TierName.HOST, 2)})


def test_no_hit_pins_nothing() -> None:
    """Neither tier has the head."""
    assert Shelf(4).hit() == (0, set())


def test_window_parts_may_come_from_either_tier_and_are_pinned_where_they_are() -> None:
    """The last two window parts are needed: 2 is in the host, 3 on NVMe."""
    shelf = Shelf(4)
    host, nvme = shelf.directory.host, shelf.directory.nvme
    shelf.put(host, 0, 1, 2, 3)
    shelf.put(nvme, 0, 1, 2, 3)
    shelf.put(host, 2, part=Part.WINDOW)
    shelf.put(nvme, 3, part=Part.WINDOW)
    assert shelf.hit(2) == (4, {(TierName.HOST, 3), (TierName.HOST, 2), (TierName.NVME, 3)})


def test_a_hit_that_steps_down_below_the_host_pins_no_deeper_chunk() -> None:
    """Only chunk 1 has its window part: the hit is 2 of 4, and chunk 3 may leave."""
    shelf = Shelf(4)
    shelf.put(shelf.directory.host, 0, 1, 2, 3)
    shelf.put(shelf.directory.host, 1, part=Part.WINDOW)
    assert shelf.hit(1) == (2, {(TierName.HOST, 1)})


def test_hits_and_misses_are_counted_by_tier() -> None:
    """Six asked: three from the host, two more from NVMe, one nowhere."""
    shelf = Shelf(6)
    shelf.put(shelf.directory.host, 0, 1, 2)
    shelf.put(shelf.directory.nvme, 0, 1, 2, 3, 4)
    shelf.hit()
    host, nvme = shelf.directory.stats()
    assert (host.name, host.hits, host.misses) == ("host", 3, 3)
    assert (nvme.name, nvme.hits, nvme.misses) == ("nvme", 2, 1)


@pytest.mark.parametrize("there", [0, 1, 255, 511, 512])
def test_a_lookup_of_512_chunks_asks_an_index_ten_times(there: int) -> None:
    """Field case 78, the core's part: one bisection a tier, or one look where all of it hits."""
    shelf = Shelf(512)
    shelf.put(shelf.directory.host, *range(there))
    keys = CountingKeys(shelf.keys)
    assert shelf.directory.host.visible_run(shelf.space, keys) == there
    assert keys.asked == 1 if there == 512 else 9 <= keys.asked <= 10


def test_a_doomed_chunk_cuts_the_hit_of_its_tier_only() -> None:
    """Chunk 1 of the host is doomed: the hit comes from NVMe from there on."""
    shelf = Shelf(4)
    shelf.put(shelf.directory.host, 0, 1, 2, 3)
    shelf.put(shelf.directory.nvme, 0, 1, 2)
    copy = shelf.directory.host.find(shelf.space, shelf.key(1))
    assert copy is not None
    shelf.directory.host.doom(copy)
    assert shelf.hit() == (3, {(TierName.HOST, 0), (TierName.NVME, 2)})


# ---------------------------------------------------------------- staging


def test_the_staging_ring_is_behind_the_host_arena_and_bounded() -> None:
    """Two slots, each a whole slab, at slab numbers from the host's on; the third isn't there."""
    shelf = Shelf(1)
    first = shelf.directory.stage(Part.FULL, 0, 4096)
    second = shelf.directory.stage(Part.FULL, 0, 4096)
    assert first is not None
    assert second is not None
    assert {first.place.slab, second.place.slab} == {1, 2}
    assert first.place.slot_bytes == shelf.limits.host.slab_bytes
    assert shelf.directory.stage(Part.FULL, 0, 4096) is None
    assert shelf.directory.is_staging(first)


def test_a_staging_slot_is_free_after_its_last_move() -> None:
    """READ and LOAD hold it in turn; after the last one it is given out again."""
    shelf = Shelf(1, staging_slots=1)
    directory = shelf.directory
    slot = directory.stage(Part.FULL, 0, 4096)
    assert slot is not None
    slot.hold(MoveID(1))
    slot.hold(MoveID(2))
    slot.cancel()
    directory.let_go(slot, MoveID(1))
    assert directory.stage(Part.FULL, 0, 4096) is None
    directory.let_go(slot, MoveID(2))
    assert slot.state is SlotState.FREE
    assert directory.stage(Part.WINDOW, 3, 4096) is slot
    assert (slot.part, slot.shard) == (Part.WINDOW, 3)
    with pytest.raises(InvariantError):
        directory.let_go(slot, MoveID(2))


# ---------------------------------------------------------------- the index


def test_an_index_finds_each_copy_and_forgets_it() -> None:
    """Two thousand copies, removed in another order; ``pop_any`` empties the rest."""
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
    rng = random.Random(1)
    copies = [Copy(space, ChunkKey(rng.randbytes(KEY_BYTES)), 0, None) for _ in range(2000)]
    index = Index()
    for copy in copies:
        index.put(copy)
    assert len(index) == len(set(index)) == 2000
    assert all(index.get(copy.key) is copy for copy in copies)
    for copy in rng.sample(copies, 1000):
        index.remove(copy)
        assert index.get(copy.key) is None
    left = 0
    while index.pop_any() is not None:
        left += 1
    assert left == 1000
    assert len(index) == 0


def test_an_index_does_not_remove_the_successor_of_a_copy() -> None:
    """The chunk was stored anew under the same key: the old copy's leaving doesn't touch it."""
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
    key = ChunkKey(bytes(KEY_BYTES))
    old, new = Copy(space, key, 0, None), Copy(space, key, 0, None)
    index = Index()
    index.put(old)
    index.put(new)
    index.remove(old)
    assert index.get(key) is new
