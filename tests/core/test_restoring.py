"""Restart: the NVMe tree from the slots that a scan finds, in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.keys import NO_PARENT
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import (
    MoveKind,
    MoveStatus,
    Place,
    ScanDone,
    ScannedSlot,
)
from tests.core.disk import NVME, TWO_RANKS, Disk, first_life, second_life
from tests.core.driver import BLOCK_BYTES, Driver, layout, limits

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


def test_a_request_that_asks_again_during_the_scan_gets_what_was_found_since() -> None:
    """Its lease doesn't hold it to the shorter answer; once a retrieve has failed, the cut one
    stands."""
    disk, _ = first_life()
    driver, engine = second_life(disk)
    keys = engine.chain(4)
    by_depth = sorted(disk.found(), key=lambda slot: slot.header.depth if slot.header else 0)
    driver.scan_batch(by_depth[:2])
    assert engine.lookup(keys) == 2
    driver.scan_batch(by_depth[2:3])
    assert engine.lookup(keys) == 3
    driver.scanned(by_depth[3:])
    assert engine.lookup(keys) == 4
    engine.retrieve(keys)
    driver.end(driver.waiting(MoveKind.READ)[1], MoveStatus.FAILED)
    driver.run()
    assert engine.lookup(keys) == 1


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


@pytest.mark.parametrize("seed", range(6))
def test_a_family_that_is_not_whole_yet_hides_what_hangs_on_it_during_the_scan(seed: int) -> None:
    """Rank 1's part of chunk 1 of 4 comes last: until then a lookup says 1, though 2 and 3 are
    whole; the retrieve of either rank would fail."""
    disk, first = first_life(shards=TWO_RANKS)
    keys = first.chain(4)
    driver, engine = second_life(disk, TWO_RANKS)
    last = [s for s in disk.found() if s.header and (s.header.key, s.header.shard) == (keys[1], 1)]
    driver.scan_batch([slot for slot in disk.found(seed) if slot not in last])
    assert engine.peek(keys) == 1
    driver.scanned(last)
    assert engine.peek(keys) == 4


def test_what_is_written_after_the_start_is_newer_than_what_was_found() -> None:
    """Sequences on disk are high, uses in memory start anew: all the same the oldest leave first,
    not what was written just now."""
    disk, first = first_life(chunks=1, nvme_slots=2)
    (place,) = disk.slots
    disk.slots[place] = replace(disk.slots[place], sequence=100_000)
    driver, engine = second_life(disk, nvme_slots=2)
    driver.scanned(disk.found())
    engine.put(engine.chain(1, 5))
    engine.put(engine.chain(1, 6))
    nvme = driver.service._state.directory.nvme
    assert nvme is not None
    space = driver.service._state.spaces.all()[0]
    assert nvme.visible_run(space, first.chain(1).data) == 0
    assert nvme.visible_run(space, engine.chain(1, 5).data) == 1


def test_what_is_stored_again_before_its_slot_was_found_is_not_written_twice() -> None:
    """The engine is faster than the scan: its store waits for the end of the scan, which finds the
    chunks; nothing is written, and nothing counts as dropped."""
    disk, _ = first_life()
    driver, engine = second_life(disk)
    engine.put(engine.chain(4))
    assert driver.stats().write_backlog == 4
    driver.scanned(disk.found(1))
    driver.run()
    assert driver.count(MoveKind.WRITE) == 0
    assert driver.tier(NVME).slots_used == 4
    assert driver.stats().drops == {}


def test_a_newer_slot_is_found_while_the_older_one_is_read() -> None:
    """The older one is being read for an engine: it stays, as a Move holds it, the newer one is
    dropped, and the engine gets its bytes."""
    disk, first = first_life(chunks=1)
    key = first.chain(1)[0]
    driver, engine = second_life(disk)
    driver.scan_batch(disk.found())
    number = engine.retrieve(engine.chain(1))
    newer = replace(disk.header(key), sequence=1000)
    driver.scan_batch([ScannedSlot(Place(NVME, 0, 9, 4096 + BLOCK_BYTES), newer)])
    driver.event(ScanDone(NVME))
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1"
    assert driver.drops("scan_duplicate") == 1
    assert driver.tier(NVME).slots_used == 1


def test_the_slab_that_was_written_longest_ago_is_reclaimed_first() -> None:
    """Two slabs of two chunks come back, slab 1 with the older sequences: a model of another size
    takes slab 1."""
    disk, first = first_life(chunks=2)
    size = 4096 + BLOCK_BYTES
    old, new = (disk.header(key) for key in first.chain(2))
    roots = [
        (Place(NVME, 1, 0, size), replace(old, sequence=1)),
        (Place(NVME, 0, 0, size), replace(new, depth=0, parent=NO_PARENT, sequence=50)),
    ]
    nvme = TierLimits(2, 2 * size)
    driver = Driver(Limits(host=TierLimits(4, 4 * BLOCK_BYTES), nvme=nvme), disk.spaces)
    driver.engine()
    large = driver.engine("large", shape=layout(2))
    driver.scanned([ScannedSlot(place, header) for place, header in roots])
    large.put(large.chain(1))
    (write,) = [move for move in driver.handed_out if move.kind is MoveKind.WRITE]
    assert write.target is not None
    assert write.target.slab == 1
