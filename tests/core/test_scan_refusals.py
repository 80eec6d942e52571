"""Restart: what a scan finds and the core doesn't take over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.messages import (
    Place,
    ScannedSlot,
)
from tests.core.disk import NVME, TWO_RANKS, first_life, second_life
from tests.core.driver import BLOCK_BYTES

# ---------------------------------------------------------------- what doesn't


@pytest.mark.parametrize("seed", range(6))
def test_an_orphan_is_no_hit_and_its_slot_is_free(seed: int) -> None:
    """Chunk 1 of 4 is torn: 0 comes back, 2 and 3 hang on nothing: no orphan is ever matched, and
    their slots are used again (field case 65, the core's part)."""
    disk, first = first_life(nvme_slots=4)
    keys = first.chain(4)
    gone = next(place for place, header in disk.slots.items() if header.key == keys[1])
    del disk.slots[gone]
    driver, engine = second_life(disk, nvme_slots=4)
    driver.scanned([*disk.found(seed), ScannedSlot(gone, None)])
    assert engine.peek(keys) == 1
    assert driver.drops("scan_orphan") == 2
    driver.tick()
    assert driver.tier(NVME).slots_used == 1
    engine.put(keys)
    assert driver.tier(NVME).chunks == 4
    assert driver.tier(NVME).evictions == 0


@pytest.mark.parametrize("seed", range(6))
def test_of_two_slots_of_one_chunk_the_later_written_stays(seed: int) -> None:
    """The same chunk lies in two places: the newer is kept, the older one's slot is free."""
    disk, first = first_life(chunks=2)
    key = first.chain(2)[1]
    old = disk.header(key)
    disk.put(9, replace(old, sequence=old.sequence + 100))
    driver, engine = second_life(disk)
    driver.scanned(disk.found(seed))
    assert engine.peek(engine.chain(2)) == 2
    assert driver.drops("scan_duplicate") == 1
    assert driver.tier(NVME).slots_used == 2
    engine.retrieve(engine.chain(2))
    read = next(move for move in driver.moves if move.header.key == key)
    assert read.source is not None
    assert read.source.index == 9


def test_chunks_of_an_old_epoch_are_gone() -> None:
    """Field case 12: the manifest says epoch 1, the slots 0: they were cleared before the crash."""
    disk, _ = first_life()
    disk.spaces = tuple(replace(record, epoch=1) for record in disk.spaces)
    driver, engine = second_life(disk)
    driver.scanned(disk.found())
    assert engine.peek(engine.chain(4)) == 0
    assert driver.drops("scan_old_epoch") == 4
    assert driver.tier(NVME).slots_used == 0


def test_a_clear_during_the_scan_holds_for_what_it_finds_afterwards() -> None:
    """Field case 12: half of the slots were found, then the model is cleared: neither half is a
    hit, now or later."""
    disk, _ = first_life()
    driver, engine = second_life(disk)
    found = disk.found(2)
    driver.scan_batch(found[:2])
    driver.clear(model="org/model")
    driver.scanned(found[2:])
    driver.tick()
    assert engine.peek(engine.chain(4)) == 0
    assert driver.tier(NVME).slots_used == 0
    engine.put(engine.chain(4))
    assert engine.peek(engine.chain(4)) == 4


def test_chunks_of_an_unknown_namespace_are_gone() -> None:
    """The manifest doesn't know it: nothing tells whether it was cleared."""
    disk, _ = first_life()
    disk.spaces = ()
    driver, engine = second_life(disk)
    other = [replace(header, namespace=b"x" * 32) for header in disk.slots.values()]
    driver.scanned([ScannedSlot(place, h) for place, h in zip(disk.slots, other, strict=True)])
    assert driver.drops("scan_orphan") == 4
    assert driver.tier(NVME).slots_used == 0
    assert engine.peek(engine.chain(4)) == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_family_without_one_rank_is_gone_with_what_hangs_on_it(seed: int) -> None:
    """Field case 30: rank 1's part of chunk 2 of 4 is torn: 0 and 1 come back for both ranks."""
    disk, first = first_life(shards=TWO_RANKS)
    keys = first.chain(4)
    disk.slots = {
        place: header
        for place, header in disk.slots.items()
        if (header.key, header.shard) != (keys[2], 1)
    }
    driver, engine = second_life(disk, TWO_RANKS)
    driver.scanned(disk.found(seed))
    assert engine.peek(keys) == 2
    for _ in range(3):
        driver.tick()
    assert driver.tier(NVME).slots_used == 4
    assert engine.get(keys[:2], 1) == b"\1\1"


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"tokens": 32}, {"shards": 2}, {"shard": 1}, {"depth": 3}],
    ids=["dtype", "tokens", "shards", "shard", "depth"],
)
def test_a_header_that_does_not_fit_its_namespace_is_gone(change: dict[str, int]) -> None:
    """Field case 11: a flipped field that slipped through its checksum: no hit, and no slot is
    lost."""
    disk, first = first_life(chunks=2)
    key = first.chain(2)[1]
    for place, header in list(disk.slots.items()):
        if header.key == key:
            disk.slots[place] = replace(header, **change)  # type: ignore[arg-type]
    driver, engine = second_life(disk)
    driver.scanned(disk.found())
    driver.tick()
    assert engine.peek(engine.chain(2)) == 1
    assert driver.drops("scan_orphan") == 1
    assert driver.tier(NVME).slots_used == 1


@pytest.mark.parametrize(
    "place",
    [
        Place(NVME, 1, 0, 4096 + BLOCK_BYTES),
        Place(NVME, 0, 16, 4096 + BLOCK_BYTES),
        Place(NVME, 0, 5, 4096 + 2 * BLOCK_BYTES),
    ],
    ids=["slab", "index", "size"],
)
def test_a_slot_outside_the_limits_is_ignored(place: Place) -> None:
    """Field case 62: the tier was made smaller, or a file is of another make: what lies outside
    isn't used, and the total stays the limit."""
    disk, _ = first_life(chunks=2)
    driver, engine = second_life(disk)
    header = next(iter(disk.slots.values()))
    driver.scan_batch(disk.found())
    driver.scanned([ScannedSlot(place, header)])
    assert engine.peek(engine.chain(2)) == 2
    assert driver.tier(NVME).slots_used == 2
    assert driver.drops("scan_orphan") == 1


def test_a_slot_that_is_reported_twice_is_taken_once() -> None:
    """The second report of one place changes nothing."""
    disk, _ = first_life(chunks=2)
    driver, engine = second_life(disk)
    driver.scanned(disk.found(), disk.found(1))
    assert engine.peek(engine.chain(2)) == 2
    assert driver.tier(NVME).slots_used == 2


def test_a_part_that_names_another_depth_than_its_family_is_gone() -> None:
    """Rank 1's header of chunk 1 says depth 2: the family isn't whole, chunk 0 is a hit."""
    disk, first = first_life(chunks=2, shards=TWO_RANKS)
    key = first.chain(2)[1]
    for place, header in list(disk.slots.items()):
        if (header.key, header.shard) == (key, 1):
            disk.slots[place] = replace(header, depth=2)
    driver, engine = second_life(disk, TWO_RANKS)
    driver.scanned(disk.found())
    driver.tick()
    assert engine.peek(engine.chain(2)) == 1
    assert driver.tier(NVME).slots_used == 2
