"""A full disk: NVMe stops growing, goes on within its slabs, and tries again."""

from __future__ import annotations

from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import Move, MoveKind, MoveStatus, TierName
from tests.core.driver import BLOCK_BYTES, Driver, Engine, layout

SMALL, LARGE = BLOCK_BYTES, 2 * BLOCK_BYTES


def full_disk() -> tuple[Driver, Engine]:
    """NVMe of two slabs of two small slots; the host is roomy. Nothing is written yet."""
    nvme = TierLimits(2, 2 * (SMALL + 4096))
    driver = Driver(Limits(host=TierLimits(4, 4 * SMALL), nvme=nvme, nvme_retry_s=30.0))
    driver.scanned()
    return driver, driver.engine()


def write_all(driver: Driver, status: MoveStatus) -> int:
    """End all WRITEs with a status; returns how many there were."""
    count = 0
    while writes := driver.waiting(MoveKind.WRITE):
        driver.end(writes[0], status)
        count += 1
    return count


def test_on_a_full_disk_the_tier_stops_growing_and_goes_on_within_its_slabs() -> None:
    """Field case 63, the core's part: the first slab was had, the second can't be: its chunks are
    dropped and counted, the tier says that it is full, and later chunks evict within slab one."""
    driver, engine = full_disk()
    engine.put(engine.chain(2))
    assert driver.tier(TierName.NVME).chunks == 2
    engine.store(engine.chain(1, 1))
    driver.run(MoveKind.STORE)
    assert write_all(driver, MoveStatus.NO_SPACE) == 1
    assert driver.drops("nvme_full") == 1
    assert driver.tier(TierName.NVME).full
    assert driver.tier(TierName.NVME).slots_used == 2
    engine.put(engine.chain(2, 2))
    assert driver.tier(TierName.NVME).chunks == 2
    assert driver.tier(TierName.NVME).evictions == 2


def test_a_full_tier_tries_to_grow_again_after_a_while() -> None:
    """After nvme_retry_s the next chunk takes the second slab."""
    driver, engine = full_disk()
    engine.put(engine.chain(2))
    engine.store(engine.chain(1, 1))
    driver.run(MoveKind.STORE)
    write_all(driver, MoveStatus.NO_SPACE)
    driver.tick(29.0)
    assert driver.tier(TierName.NVME).full
    driver.tick(2.0)
    assert not driver.tier(TierName.NVME).full
    engine.put(engine.chain(2, 2))
    assert driver.tier(TierName.NVME).chunks == 4
    assert driver.tier(TierName.NVME).evictions == 0


def test_a_disk_that_never_had_room_drops_everything_and_the_host_goes_on() -> None:
    """Not even the first slab could be had: nothing is on NVMe, the host's chunks stay hits."""
    driver, engine = full_disk()
    keys = engine.chain(3)
    engine.store(keys)
    driver.run(MoveKind.STORE)
    write_all(driver, MoveStatus.NO_SPACE)
    assert driver.tier(TierName.NVME).slots_used == 0
    assert driver.tier(TierName.NVME).full
    assert engine.peek(keys) == 3
    assert driver.service.idle()


def test_writes_in_flight_to_a_slab_that_was_retired_still_count_if_they_worked() -> None:
    """Two writes to the new slab run at once: one is told NO_SPACE, the other one has landed; its
    chunk is a hit, and the slab is used no further."""
    driver, engine = full_disk()
    engine.put(engine.chain(2))
    for seed in (1, 2):
        engine.store(engine.chain(1, seed), request=str(seed))
    driver.run(MoveKind.STORE)
    first, second = driver.waiting(MoveKind.WRITE)
    driver.end(first, MoveStatus.NO_SPACE)
    driver.end(second)
    nvme = driver.tier(TierName.NVME)
    assert (nvme.chunks, nvme.slots_used) == (3, 3)
    engine.put(engine.chain(1, 3))
    assert driver.tier(TierName.NVME).chunks == 3


def test_a_slab_that_keeps_chunks_is_not_given_up_when_a_write_to_it_finds_no_space() -> None:
    """The disk is full in the middle of a slab: what it keeps stays, and its places are used
    again."""
    driver, engine = full_disk()
    engine.put(engine.chain(1))
    engine.store(engine.chain(1, 1))
    driver.run(MoveKind.STORE)
    write_all(driver, MoveStatus.NO_SPACE)
    assert driver.tier(TierName.NVME).chunks == 1
    engine.put(engine.chain(1, 2))
    nvme = driver.tier(TierName.NVME)
    assert (nvme.chunks, nvme.evictions) == (2, 0)


def test_a_full_disk_does_not_give_up_slabs_for_a_size_it_cannot_cut() -> None:
    """Two slabs hold small chunks, the third can't be had. A write of the large model must not
    destroy small chunks unless it gets their slab, whose place on the disk is there."""
    nvme = TierLimits(3, 2 * (SMALL + 4096))
    driver = Driver(Limits(host=TierLimits(4, 4 * SMALL), nvme=nvme))
    driver.scanned()
    small, large = driver.engine(), driver.engine("large", shape=layout(2))
    small.put(small.chain(4))
    small.store(small.chain(1, 1))
    driver.run(MoveKind.STORE)
    write_all(driver, MoveStatus.NO_SPACE)
    assert driver.tier(TierName.NVME).slots_used == 4
    large.put(large.chain(1))
    written = any(move.header.payload_bytes == LARGE for move in writes(driver))
    assert driver.tier(TierName.NVME).slots_used == (3 if written else 4)


def test_a_full_disks_slabs_are_shared_as_if_they_were_all() -> None:
    """Ten slabs are allowed, the disk has room for two, both hold small chunks. The fair share of
    the large model is one of these two, not five of ten that will never be."""
    nvme = TierLimits(10, 2 * (SMALL + 4096))
    driver = Driver(Limits(host=TierLimits(4, 4 * SMALL), nvme=nvme))
    driver.scanned()
    small, large = driver.engine(), driver.engine("large", shape=layout(2))
    small.put(small.chain(4))
    small.store(small.chain(1, 1))
    driver.run(MoveKind.STORE)
    write_all(driver, MoveStatus.NO_SPACE)
    large.put(large.chain(1))
    assert [move for move in writes(driver) if move.header.payload_bytes == LARGE]


def writes(driver: Driver) -> list[Move]:
    """All WRITEs that were handed out."""
    return [move for move in driver.handed_out if move.kind is MoveKind.WRITE]


def test_a_new_slab_in_which_one_write_failed_and_another_worked_is_used_on() -> None:
    """The first WRITE to a new slab meets a passing error, the second one works: so the slab does,
    and its free place takes the next chunk without an eviction."""
    driver, engine = full_disk()
    for seed in (1, 2):
        engine.store(engine.chain(1, seed), request=str(seed))
    driver.run(MoveKind.STORE)
    first, second = driver.waiting(MoveKind.WRITE)
    driver.end(first, MoveStatus.FAILED)
    driver.end(second)
    driver.run()
    for seed in (3, 4, 5):
        engine.put(engine.chain(1, seed))
    nvme = driver.tier(TierName.NVME)
    assert (nvme.chunks, nvme.evictions) == (4, 0)
