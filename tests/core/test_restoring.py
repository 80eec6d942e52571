"""Restart: the NVMe tree from the slots that a scan finds, in any order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.core.layout import Shard
from kvstore.core.messages import (
    ChunkHeader,
    MoveKind,
    Place,
    ScanDone,
    ScannedSlot,
    SpaceRecord,
    TierName,
)
from tests.core.driver import BLOCK_BYTES, Driver, Engine, layout, limits

NVME = TierName.NVME
TWO_RANKS = (Shard(0, 2), Shard(1, 2))


class Disk:
    """What a daemon left on NVMe: slots by place, and the manifest."""

    def __init__(self) -> None:
        self.slots: dict[Place, ChunkHeader] = {}
        self.spaces: tuple[SpaceRecord, ...] = ()

    def take(self, driver: Driver) -> None:
        """Keep what a daemon wrote: all its WRITEs have ended well."""
        for move in driver.handed_out:
            if move.kind is MoveKind.WRITE and move.target is not None:
                self.slots[move.target] = move.header
        self.spaces = driver.persists[-1].spaces

    def found(self, seed: int = 0) -> list[ScannedSlot]:
        """Its slots in some order."""
        slots = [ScannedSlot(place, header) for place, header in self.slots.items()]
        random.Random(seed).shuffle(slots)
        return slots

    def put(self, index: int, header: ChunkHeader) -> None:
        """Write a slot by hand."""
        self.slots[Place(NVME, 0, index, 4096 + BLOCK_BYTES)] = header

    def header(self, key: bytes, shard: int = 0) -> ChunkHeader:
        """What a chunk's slot holds."""
        return next(h for h in self.slots.values() if (h.key, h.shard) == (key, shard))


def first_life(
    chunks: int = 4, shards: tuple[Shard, ...] = (Shard(),), nvme_slots: int = 16
) -> tuple[Disk, Engine]:
    """A daemon that stored one prompt and stopped; its disk, and the engine for its keys."""
    driver = Driver(limits(host_slots=16, nvme_slots=nvme_slots))
    driver.scanned()
    engine = driver.engine(shards=shards)
    assert engine.put(engine.chain(chunks)) == bytes([1] * chunks)
    disk = Disk()
    disk.take(driver)
    return disk, engine


def second_life(
    disk: Disk, shards: tuple[Shard, ...] = (Shard(),), nvme_slots: int = 16
) -> tuple[Driver, Engine]:
    """A daemon that starts on the disk; its scan hasn't begun."""
    driver = Driver(limits(host_slots=16, nvme_slots=nvme_slots), disk.spaces)
    return driver, driver.engine(shards=shards)


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_comes_back_whole_whatever_the_order_of_the_scan(seed: int) -> None:
    """Field case 60, the core's part: four chunks in shuffled batches of one to three: four hits,
    all of them retrieved, and not one byte written again."""
    disk, _ = first_life()
    driver, engine = second_life(disk)
    found = disk.found(seed)
    cut = 1 + seed % 3
    driver.scanned(*[found[start : start + cut] for start in range(0, 4, cut)])
    keys = engine.chain(4)
    assert engine.lookup(keys) == 4
    assert engine.get(keys) == b"\1\1\1\1"
    engine.put(keys)
    assert driver.count(MoveKind.WRITE) == 0
    assert driver.tier(NVME).chunks == 4
    assert driver.stats().drops == {}


def test_hits_grow_while_the_scan_goes_on() -> None:
    """The head first, then the tail's last chunk, then what lies between: never more than what
    hangs together, and the tier says that it is scanning."""
    disk, _ = first_life()
    driver, engine = second_life(disk)
    keys = engine.chain(4)
    by_depth = sorted(disk.found(), key=lambda slot: slot.header.depth if slot.header else 0)
    assert engine.peek(keys) == 0
    seen = []
    for place in (0, 3, 2, 1):
        driver.scan_batch([by_depth[place]])
        seen.append(engine.peek(keys))
    assert seen == [1, 1, 1, 4]
    assert driver.tier(NVME).scanning
    driver.event(ScanDone(NVME))
    assert not driver.tier(NVME).scanning
    assert engine.peek(keys) == 4


def test_a_chunk_found_by_the_scan_is_retrieved_while_it_goes_on() -> None:
    """The engine needn't wait for the end of the scan."""
    disk, _ = first_life()
    driver, engine = second_life(disk)
    driver.scan_batch(disk.found())
    assert engine.get(engine.chain(4)) == b"\1\1\1\1"
    driver.event(ScanDone(NVME))
    assert engine.peek(engine.chain(4)) == 4


@pytest.mark.parametrize("before", [True, False], ids=["engine first", "scan first"])
def test_the_engine_may_register_before_or_after_the_scan(before: bool) -> None:
    """The namespace's shape is told by whichever comes first."""
    disk, engine = first_life(shards=TWO_RANKS)
    driver = Driver(limits(host_slots=16, nvme_slots=16), disk.spaces)
    if before:
        engine = driver.engine(shards=TWO_RANKS)
    driver.scanned(disk.found(3))
    if not before:
        engine = driver.engine(shards=TWO_RANKS)
    assert engine.peek(engine.chain(4)) == 4
    assert engine.get(engine.chain(4), 1) == b"\1\1\1\1"


def test_new_writes_get_sequences_above_those_on_disk() -> None:
    """Else an older slot of the same chunk would win at the next start."""
    disk, _ = first_life()
    newest = max(header.sequence for header in disk.slots.values())
    driver, engine = second_life(disk)
    driver.scanned(disk.found())
    engine.put(engine.chain(1, 5))
    (write,) = [move for move in driver.handed_out if move.kind is MoveKind.WRITE]
    assert write.header.sequence > newest


def test_the_order_of_eviction_is_that_of_the_writes() -> None:
    """Two prompts on a full tier of four: the one written first leaves first."""
    driver = Driver(limits(host_slots=16, nvme_slots=4))
    driver.scanned()
    engine = driver.engine()
    for seed in (7, 8):
        engine.put(engine.chain(2, seed))
    disk = Disk()
    disk.take(driver)
    driver, engine = second_life(disk, nvme_slots=4)
    driver.scanned(disk.found(1))
    engine.put(engine.chain(2, 9))
    assert [engine.peek(engine.chain(2, seed)) for seed in (7, 8, 9)] == [0, 2, 2]


def test_free_slots_of_scanned_slabs_are_used_and_live_ones_are_not() -> None:
    """Four of eight places hold chunks, three are torn, one was never named: four new chunks fit
    without an eviction."""
    disk, _ = first_life(nvme_slots=8)
    driver, engine = second_life(disk, nvme_slots=8)
    taken = {place.index for place in disk.slots}
    torn = [index for index in range(8) if index not in taken][:3]
    empty = [ScannedSlot(Place(NVME, 0, index, 4096 + BLOCK_BYTES), None) for index in torn]
    driver.scanned([*disk.found(), *empty])
    engine.put(engine.chain(4, 5))
    nvme = driver.tier(NVME)
    assert (nvme.chunks, nvme.evictions, nvme.slots_used) == (8, 0, 8)
    assert engine.peek(engine.chain(4)) == 4


def test_a_damaged_slot_is_free_and_counted() -> None:
    """The scan saw a slot that held something once and isn't whole: nothing is lost silently."""
    driver = Driver(limits(nvme_slots=4))
    place = Place(NVME, 0, 0, 4096 + BLOCK_BYTES)
    empty = Place(NVME, 0, 1, 4096 + BLOCK_BYTES)
    driver.scanned([ScannedSlot(place, None, damaged=True), ScannedSlot(empty, None)])
    assert driver.drops("scan_torn") == 1
    assert driver.tier(NVME).slots_used == 0


def test_an_empty_disk_is_an_empty_tier() -> None:
    """No slot at all: the scan ends, writes begin."""
    driver = Driver(limits(nvme_slots=4))
    driver.scanned()
    engine = driver.engine()
    engine.put(engine.chain(1))
    assert driver.tier(NVME).chunks == 1


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
        Place(NVME, 0, 0, 4096 + 2 * BLOCK_BYTES),
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


def test_window_parts_come_back_with_their_chunks() -> None:
    """A hybrid model: full and window parts in any order; one window part whose full part is torn
    is gone."""
    driver = Driver(limits(host_slots=16, nvme_slots=16))
    driver.scanned()
    shape = layout(window=16)
    engine = driver.engine(shape=shape)
    engine.put(engine.chain(3))
    disk = Disk()
    disk.take(driver)
    assert len(disk.slots) == 6
    for seed in range(4):
        driver = Driver(limits(host_slots=16, nvme_slots=16), disk.spaces)
        engine = driver.engine(shape=shape)
        driver.scanned(disk.found(seed))
        assert engine.lookup(engine.chain(3)) == 3
        assert engine.get(engine.chain(3)) == b"\1\1\1"
        last = engine.chain(3)[2]
        found = [
            s for s in disk.found(seed) if s.header and (s.header.key, s.header.part) != (last, 0)
        ]
        driver = Driver(limits(host_slots=16, nvme_slots=16), disk.spaces)
        engine = driver.engine(shape=shape)
        driver.scanned(found)
        driver.tick()
        assert engine.peek(engine.chain(3)) == 2
        assert driver.tier(NVME).slots_used == 4
