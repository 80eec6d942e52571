"""Retrieve: from host, from NVMe with promotion, through staging; shared and failed reads."""

from __future__ import annotations

from typing import Any

from kvstore.core.keys import ChunkKeys
from kvstore.core.layout import NULL_BLOCK, Shard
from kvstore.core.messages import Completed, MoveKind, MoveStatus, TierName
from tests.core.driver import Driver, Engine, block_ids, limits

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


def fill_host(driver: Driver, engine: Engine, slots: int = 4) -> None:
    """Every host slot holds a chunk that a STORE is writing, so none can be had."""
    for seed in range(slots):
        engine.store(engine.chain(1, 200 + seed), request=f"fill{seed}")
    driver.handed_out.clear()


# ---------------------------------------------------------------- from the host


def test_retrieve_from_host_is_one_load_a_chunk() -> None:
    """Each LOAD names its chunk, its source and the engine's own blocks; the mask comes with the
    last Moved."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(2)
    engine.put(keys)
    number = engine.retrieve(keys, full=block_ids(2, start=50))
    first, second = driver.moves
    assert {move.kind for move in driver.moves} == {MoveKind.LOAD}
    assert (first.header.key, second.header.key) == (keys[0], keys[1])
    assert second.blocks == ((0, block_ids(1, start=51)),)
    assert second.target is None
    driver.end(second)
    assert driver.is_open(engine.workers[0], number)
    driver.end(first)
    assert driver.completed(engine.workers[0], number) == Completed(b"\1\1")


def test_retrieve_stops_at_the_first_chunk_that_is_not_there() -> None:
    """Two of four are there: the mask says so, without a reason, as a miss is no fault."""
    driver = Driver(limits())
    engine = driver.engine()
    engine.put(engine.chain(2))
    number = engine.retrieve(engine.chain(4))
    driver.run()
    assert driver.completed(engine.workers[0], number) == Completed(b"\1\1\0\0")


def test_retrieve_of_a_chunk_that_is_being_stored_is_a_miss() -> None:
    """Field case 20: at half of its bytes a chunk is a plain miss; a moment later it is whole."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(1)
    engine.store(keys)
    number = engine.retrieve(keys)
    assert driver.completed(engine.workers[0], number).done == b"\0"
    driver.run()
    assert engine.get(keys) == b"\1"


def test_a_failed_load_is_told_and_the_chunk_stays() -> None:
    """Field case 22: the leg host -> engine fails: that chunk isn't done; the bytes at rest are
    good, so a second try works."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(3)
    engine.put(keys)
    number = engine.retrieve(keys)
    driver.end(driver.moves[1], MoveStatus.FAILED)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\0\1"
    assert driver.drops("load_failed") == 1
    assert engine.get(keys) == b"\1\1\1"


def test_blocks_that_the_engine_gave_up_are_not_loaded() -> None:
    """A chunk whose blocks are all null is skipped; one that is half null is loaded, and the hands
    skip the null block."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(2)
    engine.put(keys)
    null = NULL_BLOCK.to_bytes(4, "little")
    number = engine.retrieve(keys, full=null + block_ids(1))
    assert [move.header.key for move in driver.moves] == [keys[1]]
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1"


# ---------------------------------------------------------------- from NVMe


def test_a_chunk_on_nvme_is_read_promoted_and_loaded() -> None:
    """Field case 87: READ into a host slot, LOAD from that slot, and the second retrieve reads
    nothing from the disk."""
    driver, engine, keys = cold(2)
    assert engine.lookup(keys) == 2
    number = engine.retrieve(keys)
    assert [move.kind for move in driver.moves] == [MoveKind.READ] * 2
    read = driver.moves[0]
    driver.end(read)
    load = driver.waiting(MoveKind.LOAD)[0]
    assert load.source == read.target
    assert load.header == read.header
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1"
    assert driver.count(MoveKind.READ) == 2
    assert engine.get(keys) == b"\1\1"
    assert driver.count(MoveKind.READ) == 2
    assert driver.tier(NVME).chunks == 6


def test_reads_that_end_backwards_are_loaded_at_once_and_promoted_in_order() -> None:
    """The child's READ ends first: its LOAD doesn't wait for the parent; the child is a host hit
    only once the parent is."""
    driver, engine, keys = cold(2)
    number = engine.retrieve(keys)
    parent, child = driver.moves
    driver.end(child)
    assert [move.header.key for move in driver.waiting(MoveKind.LOAD)] == [keys[1]]
    driver.end(driver.waiting(MoveKind.LOAD)[0])
    driver.end(parent)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1"
    engine.get(keys)
    assert driver.count(MoveKind.READ) == 2


def test_a_hit_that_lies_in_both_tiers_takes_each_part_from_the_faster_one() -> None:
    """[0, 2) is in the host, [2, 4) has left it for NVMe: the lookup says 4, two LOADs go out at
    once beside two READs, and all is done."""
    driver = Driver(limits(nvme_slots=16, copy_depth=8))
    driver.scanned()
    engine = driver.engine()
    keys = engine.chain(4)
    engine.put(keys)
    engine.put(engine.chain(2, 1))
    assert engine.lookup(keys) == 4
    number = engine.retrieve(keys)
    assert {move.header.key for move in driver.waiting(MoveKind.LOAD)} == {keys[0], keys[1]}
    assert {move.header.key for move in driver.waiting(MoveKind.READ)} == {keys[2], keys[3]}
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1\1\1"


def test_a_full_host_reads_through_staging() -> None:
    """Every host slot is pinned by a STORE: the READ lands in the staging ring, is loaded from
    there, and nothing is promoted."""
    driver, engine, keys = cold(1, staging_slots=1, copy_depth=8)
    fill_host(driver, engine)
    number = engine.retrieve(keys)
    (read,) = driver.waiting(MoveKind.READ)
    assert read.target is not None
    assert (read.target.slab, read.target.index) == (1, 0)
    driver.run(MoveKind.READ, MoveKind.LOAD)
    assert driver.completed(engine.workers[0], number).done == b"\1"
    driver.run()
    assert engine.get(keys) == b"\1"
    assert driver.count(MoveKind.READ) == 2


def test_a_read_waits_for_a_staging_slot_and_gets_it() -> None:
    """Three READs, one staging slot, a full host: they go one after another, each place free again
    only after its LOAD."""
    driver, engine, keys = cold(3, staging_slots=1, copy_depth=8)
    fill_host(driver, engine)
    number = engine.retrieve(keys)
    for _ in range(3):
        (read,) = driver.waiting(MoveKind.READ)
        driver.end(read)
        (load,) = driver.waiting(MoveKind.LOAD)
        assert not driver.waiting(MoveKind.READ)
        driver.end(load)
    assert driver.completed(engine.workers[0], number).done == b"\1\1\1"


def test_a_chunk_whose_parent_left_the_host_is_read_through_staging() -> None:
    """Promotion keeps the host prefix-closed: the tail alone is retrieved, and not promoted."""
    driver, engine, keys = cold(2)
    number = engine.retrieve(keys[1:])
    (read,) = driver.waiting(MoveKind.READ)
    assert read.target is not None
    assert read.target.slab == 1
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1"
    assert engine.peek(keys) == 2


def test_many_requests_for_one_prefix_read_each_chunk_once() -> None:
    """Field case 80: 50 retrieves of one prefix from three engines: one READ a chunk, a LOAD each,
    all of them done."""
    driver, engine, keys = cold(3, copy_depth=8)
    engines = [engine, driver.engine("e2"), driver.engine("e3")]
    asked = [(engines[turn % 3], engines[turn % 3].retrieve(keys)) for turn in range(50)]
    driver.run()
    assert driver.count(MoveKind.READ) == 3
    assert driver.count(MoveKind.LOAD) == 150
    for who, number in asked:
        assert driver.completed(who.workers[0], number).done == b"\1\1\1"


def test_a_retrieve_that_comes_while_a_read_runs_joins_it() -> None:
    """The second one asks when the READ is in the hands already."""
    driver, engine, keys = cold(1)
    first = engine.retrieve(keys)
    second = engine.retrieve(keys, request="r2")
    assert len(driver.moves) == 1
    driver.run()
    assert driver.count(MoveKind.READ) == 1
    assert driver.completed(engine.workers[0], first).done == b"\1"
    assert driver.completed(engine.workers[0], second).done == b"\1"


def test_a_retrieve_that_comes_between_a_reads_end_and_its_commit_reads_nothing() -> None:
    """Field case 80: the child's READ has ended, its parent's runs, so the child isn't a host hit
    yet when another request asks for both. Its bytes are there: they are loaded, not read
    again."""
    driver, engine, keys = cold(2)
    first = engine.retrieve(keys)
    parent, child = driver.moves
    driver.end(child)
    second = engine.retrieve(keys, request="r2")
    assert not [move for move in driver.waiting(MoveKind.READ) if move is not parent]
    driver.run()
    assert driver.count(MoveKind.READ) == 2
    assert driver.completed(engine.workers[0], first).done == b"\1\1"
    assert driver.completed(engine.workers[0], second).done == b"\1\1"


def test_a_landed_promotion_that_cannot_commit_still_serves_who_asked() -> None:
    """As above, but the parent's READ fails: the child's bytes arrive all the same, the parent's
    don't, and no place is lost."""
    driver, engine, keys = cold(2)
    engine.retrieve(keys)
    parent, child = driver.moves
    driver.end(child)
    second = engine.retrieve(keys, request="r2")
    driver.end(parent, MoveStatus.FAILED)
    driver.run()
    assert driver.completed(engine.workers[0], second).done == b"\0\1"
    assert engine.put(engine.chain(4, 9)) == b"\1" * 4


def test_a_store_of_a_chunk_that_is_being_promoted_waits_for_the_read() -> None:
    """Nothing is gathered twice: the store is acknowledged with the promotion's commit."""
    driver, engine, keys = cold(1)
    other = driver.engine("e2")
    engine.retrieve(keys)
    number = other.store(keys)
    assert driver.count(MoveKind.STORE) == 0
    driver.run(MoveKind.READ)
    assert driver.completed(other.workers[0], number).done == b"\1"


def test_replicas_load_each_their_own_copy_of_one_read() -> None:
    """Two ranks that hold the same KV (MLA) retrieve: one READ, a LOAD for each."""
    driver = Driver(limits(nvme_slots=16))
    driver.scanned()
    shards = [Shard(tp_rank=rank, tp_size=2, replicas=2) for rank in range(2)]
    engine = driver.engine(shards=shards)
    keys = engine.chain(1)
    engine.put(keys)
    for seed in range(4):
        engine.put(engine.chain(1, 9 + seed))
    driver.handed_out.clear()
    numbers = [engine.retrieve(keys, rank) for rank in range(2)]
    driver.run()
    assert driver.count(MoveKind.READ) == 1
    loads = [move.session for move in driver.handed_out if move.kind is MoveKind.LOAD]
    assert len(loads) == 2
    assert set(loads) == set(engine.workers)
    for session, number in zip(engine.workers, numbers, strict=True):
        assert driver.completed(session, number).done == b"\1"


def test_disk_holds_all_when_the_host_holds_fewer() -> None:
    """Field case 87: the host has room for 8 chunks, the disk holds 3 so far; prompts of 10 chunks
    are put: the disk ends with 13, each of them is a hit, and nothing is refused."""
    driver = Driver(limits(host_slots=8, nvme_slots=16))
    driver.scanned()
    engine = driver.engine()
    engine.put(engine.chain(3))
    assert driver.tier(NVME).chunks == 3
    for seed in range(5):
        engine.put(engine.chain(2, 1 + seed))
    assert driver.tier(NVME).chunks == 13
    assert [engine.peek(engine.chain(2, 1 + seed)) for seed in range(5)] == [2] * 5
    assert driver.stats().drops == {}
