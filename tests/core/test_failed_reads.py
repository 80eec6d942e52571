"""Failed reads: who is told, what is given up, and what goes on."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.keys import ChunkKeys
from kvstore.core.layout import Shard
from kvstore.core.messages import MoveKind, MoveStatus, TierName
from tests.core.driver import Driver, Engine, limits

NVME = TierName.NVME


def cold(chunks: int, **settings: Any) -> tuple[Driver, Engine, ChunkKeys]:
    """A prompt of up to four chunks that is on NVMe only: the four host slots hold others, all
    evictable."""
    driver = Driver(limits(nvme_slots=16, **settings))
    driver.scanned()
    engine = driver.engine()
    keys = engine.chain(chunks)
    engine.put(keys)
    for seed in range(4):
        engine.put(engine.chain(1, 100 + seed))
    driver.handed_out.clear()
    return driver, engine, keys


# ---------------------------------------------------------------- failed reads


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (MoveStatus.CORRUPT, "corrupt"),
        (MoveStatus.FOREIGN, "key_collision"),
        (MoveStatus.FAILED, "read_failed"),
    ],
)
def test_a_failed_read_tells_all_who_waited_and_gives_the_chunk_up(
    status: MoveStatus, reason: str
) -> None:
    """Field cases 10 and 22: two requests share chunk 1 of 3, its READ fails: both are told,
    counted once, and the next lookup ends before it. The header is overwritten where what it says
    is bad; an error of the device may pass."""
    driver, engine, keys = cold(3)
    other = driver.engine("e2")
    assert (engine.lookup(keys), other.lookup(keys)) == (3, 3)
    numbers = [(who, who.retrieve(keys)) for who in (engine, other)]
    bad = driver.moves[1]
    driver.end(driver.moves[0])
    driver.end(bad, status)
    driver.run(MoveKind.READ, MoveKind.LOAD)
    for who, number in numbers:
        assert driver.completed(who.workers[0], number).done == b"\1\0\1"
    assert driver.drops(reason) == 1
    erases = driver.waiting(MoveKind.ERASE)
    assert len(erases) == (status is not MoveStatus.FAILED)
    for erase in erases:
        assert erase.target == bad.source
        assert erase.header.key == keys[1]
    assert (engine.lookup(keys), other.lookup(keys)) == (1, 1)
    driver.run()
    driver.tick()
    assert engine.peek(keys) == 1
    assert engine.get(keys) == b"\1\0\0"


def test_the_slot_of_a_bad_chunk_is_not_reused_before_its_erase_has_ended() -> None:
    """Else the ERASE would kill the header of the chunk that comes next."""
    driver, engine, keys = cold(1)
    engine.retrieve(keys)
    driver.end(driver.moves[0], MoveStatus.CORRUPT)
    used = driver.tier(NVME).slots_used
    (erase,) = driver.waiting(MoveKind.ERASE)
    assert driver.tier(NVME).pinned == 1
    driver.end(erase, MoveStatus.FAILED)
    assert driver.drops("erase_failed") == 1
    assert driver.tier(NVME).slots_used == used - 1


def test_a_chunk_whose_disk_copy_is_bad_is_served_from_the_host_after_a_new_store() -> None:
    """Recomputed and stored again, it is a hit, and is written to NVMe again."""
    driver, engine, keys = cold(2)
    engine.retrieve(keys)
    driver.end(driver.moves[0], MoveStatus.CORRUPT)
    driver.run()
    driver.tick()
    assert engine.put(keys) == b"\1\1"
    assert engine.peek(keys) == 2
    assert engine.get(keys) == b"\1\1"
    on_disk = [move.header.key for move in driver.handed_out if move.kind is MoveKind.WRITE]
    assert set(on_disk) == {keys[0], keys[1]}


def test_a_failed_promotion_takes_nothing_from_the_readers_of_its_children() -> None:
    """The parent's READ fails after the child's has started: the child's place in the host is
    given up, but its reader gets its bytes."""
    driver, engine, keys = cold(2)
    number = engine.retrieve(keys)
    parent, child = driver.moves
    driver.end(parent, MoveStatus.FAILED)
    driver.end(child)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\0\1"
    assert driver.service.idle()


def test_a_bad_copy_below_a_lease_cuts_its_answer() -> None:
    """The lease says 3; the retrieve of chunk 2 fails; the same lookup says 2 from then on, and
    nothing of the lease leaks."""
    driver, engine, keys = cold(3)
    assert engine.lookup(keys) == 3
    engine.retrieve(keys)
    driver.end(driver.moves[2], MoveStatus.CORRUPT)
    driver.run()
    assert engine.lookup(keys) == 2
    engine.release()
    assert driver.stats().leases == 0
    assert driver.tier().pinned == driver.tier(NVME).pinned == 0


def test_a_bad_part_of_one_rank_takes_nothing_from_the_other_rank() -> None:
    """Rank 0's READ fails while rank 1's is queued: rank 1 still gets its bytes, rank 0's header
    alone is overwritten, and the chunk is a miss for both from then on (field case 30)."""
    driver = Driver(limits(host_slots=4, nvme_slots=16, read_depth=1))
    driver.scanned()
    engine = driver.engine(shards=(Shard(0, 2), Shard(1, 2)))
    keys = engine.chain(1)
    for seed in range(3):
        engine.put(engine.chain(1, seed))
    assert engine.lookup(keys) == 1
    driver.handed_out.clear()
    numbers = [engine.retrieve(keys, rank) for rank in (0, 1)]
    driver.end(driver.moves[0], MoveStatus.CORRUPT)
    driver.run()
    assert [
        driver.completed(session, number).done
        for session, number in zip(engine.workers, numbers, strict=True)
    ] == [b"\0", b"\1"]
    assert driver.count(MoveKind.ERASE) == 1
    assert driver.drops("corrupt") == 1
    assert engine.lookup(keys) == 0
    assert engine.put(keys) == b"\1"
    assert engine.peek(keys) == 1


def test_bad_parts_of_both_ranks_are_told_to_both() -> None:
    """The second READ to fail finds the chunk given up already."""
    driver = Driver(limits(host_slots=4, nvme_slots=16))
    driver.scanned()
    engine = driver.engine(shards=(Shard(0, 2), Shard(1, 2)))
    for seed in range(3):
        engine.put(engine.chain(1, seed))
    numbers = [engine.retrieve(engine.chain(1), rank) for rank in (0, 1)]
    for move in driver.waiting(MoveKind.READ):
        driver.end(move, MoveStatus.CORRUPT)
    driver.run()
    for session, number in zip(engine.workers, numbers, strict=True):
        assert driver.completed(session, number).done == b"\0"
    assert driver.drops("corrupt") == 2
    assert driver.service.idle()
