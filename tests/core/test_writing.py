"""Writing to NVMe: order, backlog, budget, admission, and what happens to what isn't written."""

from __future__ import annotations

from typing import Any

from kvstore.core.layout import Shard
from kvstore.core.messages import Move, MoveKind, MoveStatus, Persisted, TierName
from tests.core.driver import BLOCK_BYTES, Driver, Engine, limits

NVME = TierName.NVME
TWO_RANKS = (Shard(tp_rank=0, tp_size=2), Shard(tp_rank=1, tp_size=2))
REPLICAS = (Shard(tp_rank=0, tp_size=2, replicas=2), Shard(tp_rank=1, tp_size=2, replicas=2))


def ready(host_slots: int = 8, nvme_slots: int = 8, **settings: Any) -> tuple[Driver, Engine]:
    """A driver with NVMe whose scan has ended, and an engine."""
    driver = Driver(limits(host_slots=host_slots, nvme_slots=nvme_slots, **settings))
    driver.scanned()
    return driver, driver.engine()


def writes(driver: Driver) -> list[Move]:
    """All WRITEs so far, in the order in which they went out."""
    return [move for move in driver.handed_out if move.kind is MoveKind.WRITE]


# ---------------------------------------------------------------- order


def test_chunks_are_written_from_head_to_tail_with_rising_sequences() -> None:
    """Stores that end backwards are written forwards, each from the host slot it lies in, and each
    with a sequence above the one before."""
    driver, engine = ready()
    keys = engine.chain(4)
    engine.store(keys)
    for move in reversed(driver.waiting(MoveKind.STORE)):
        driver.end(move)
    driver.run()
    out = writes(driver)
    assert [move.header.key for move in out] == list(keys)
    sequences = [move.header.sequence for move in out]
    assert sequences == sorted(set(sequences))
    assert min(sequences) > 0
    assert driver.tier(NVME).chunks == 4
    assert driver.stats().drops == {}


def test_a_write_says_what_it_writes() -> None:
    """Key, parent, depth, epoch, shard and payload of the chunk; the source is its host slot."""
    driver, engine = ready()
    keys = engine.chain(2)
    engine.store(keys)
    stores = {move.header.key: move for move in driver.moves}
    driver.run()
    for move in writes(driver):
        store = stores[move.header.key]
        assert move.source == store.target
        assert move.session is None
        expected = (store.header.parent, store.header.depth, 0, 0, 1, BLOCK_BYTES)
        header = move.header
        found = (header.parent, header.depth, header.epoch, header.shard, header.shards)
        assert (*found, header.payload_bytes) == expected
        assert move.target is not None
        assert move.target.slot_bytes == 4096 + BLOCK_BYTES


def test_a_child_written_before_its_parent_has_ended_is_visible_after_it() -> None:
    """Both WRITEs run, the child's ends first: on NVMe nothing is visible until the parent's has
    ended too."""
    driver, engine = ready(host_slots=2)
    keys = engine.chain(2)
    engine.store(keys)
    driver.run(MoveKind.STORE)
    parent, child = driver.waiting(MoveKind.WRITE)
    driver.end(child)
    assert visible_on_nvme(driver, engine) == 0
    driver.end(parent)
    assert visible_on_nvme(driver, engine) == 2


def visible_on_nvme(driver: Driver, engine: Engine) -> int:
    """How many chunks of prompt 0 NVMe has by itself."""
    nvme = driver.service._state.directory.nvme
    assert nvme is not None
    return nvme.visible_run(driver.service._state.spaces.all()[0], engine.chain(2).data)


def test_a_failed_write_takes_its_children_on_nvme_and_nothing_in_the_host() -> None:
    """The head's WRITE fails after the tail's has ended: NVMe keeps neither, the host both; the
    next store of them writes both."""
    driver, engine = ready()
    keys = engine.chain(2)
    engine.store(keys)
    driver.run(MoveKind.STORE)
    parent, child = driver.waiting(MoveKind.WRITE)
    driver.end(child)
    driver.end(parent, MoveStatus.FAILED)
    assert driver.tier(NVME).chunks == 0
    assert driver.drops("nvme_write_failed") >= 1
    assert engine.peek(keys) == 2
    engine.put(keys)
    assert driver.tier(NVME).chunks == 2


def test_a_chunk_is_written_once_however_often_it_is_stored() -> None:
    """Field case 85: ten stores, while it is queued, while it is being written, and afterwards."""
    driver, engine = ready(write_depth=1)
    other = driver.engine("e2")
    keys = engine.chain(2)
    engine.put(keys[:1])
    for who in (engine, other) * 3:
        who.store(keys)
        driver.run(MoveKind.STORE)
    driver.run()
    for who in (engine, other):
        who.put(keys)
    assert [move.header.key for move in writes(driver)] == list(keys)


def test_what_left_nvme_is_written_again_with_the_next_store() -> None:
    """A chunk is in the host, its NVMe copy was evicted; a store of its child writes both, head
    first."""
    driver, engine = ready(nvme_slots=2)
    keys = engine.chain(2)
    engine.put(keys[:1])
    for seed in range(2):
        engine.put(engine.chain(1, 10 + seed))
    assert driver.tier(NVME).evictions == 1
    engine.put(keys)
    assert [move.header.key for move in writes(driver)][-2:] == list(keys)


def test_a_promoted_chunk_whose_nvme_copy_left_is_written_before_its_child() -> None:
    """A retrieve promoted the head, then NVMe evicted it. The engine stores the next chunk, and
    won't store the head again, as it has it from here: both must come to NVMe."""
    driver, engine = ready(host_slots=4, nvme_slots=3)
    keys = engine.chain(2)
    engine.put(keys[:1])
    host = driver.service._state.directory.host
    in_host = host.find(driver.service._state.spaces.all()[0], keys[0])
    assert in_host is not None
    host.doom(in_host)
    assert engine.get(keys[:1]) == b"\1"
    for seed in range(3):
        engine.put(engine.chain(1, 10 + seed))
    assert driver.tier(NVME).evictions == 1
    engine.put(keys[1:])
    assert [move.header.key for move in writes(driver)][-2:] == list(keys)
    assert driver.drops("nvme_admission") == 0


# ---------------------------------------------------------------- what isn't written


def test_what_was_evicted_before_its_write_is_counted() -> None:
    """The write lane is busy: the backlog holds no pin, so the host evicts what waits there."""
    driver, engine = ready(host_slots=2, write_depth=1)
    for seed in range(4):
        engine.store(engine.chain(1, seed))
        driver.run(MoveKind.STORE)
    driver.run()
    assert driver.drops("evicted_before_write") == 2
    assert driver.tier(NVME).chunks == 2
    assert driver.service.idle()


def test_the_backlog_is_bounded() -> None:
    """Two may wait beside the one that runs: the rest is dropped and counted, the stores are
    acknowledged all the same (field case 68, the core's part)."""
    driver, engine = ready(write_depth=1, write_backlog_max=2)
    for seed in range(6):
        engine.store(engine.chain(1, seed))
    driver.run(MoveKind.STORE)
    assert driver.stats().write_backlog == 2
    assert driver.drops("nvme_backlog") == 3
    assert driver.stats().stored_chunks == 6
    driver.run()
    assert driver.tier(NVME).chunks == 3


def test_a_chunk_whose_parent_was_dropped_from_the_backlog_is_not_written() -> None:
    """A tier is prefix-closed: the tail of a chunk that found no place in the backlog is dropped
    too, and nothing of it is on NVMe."""
    driver, engine = ready(write_depth=1, write_backlog_max=1)
    engine.store(engine.chain(1, 7))
    engine.store(engine.chain(3))
    driver.run(MoveKind.STORE)
    driver.run()
    nvme = driver.service._state.directory.nvme
    assert nvme is not None
    space = driver.service._state.spaces.all()[0]
    assert nvme.visible_run(space, engine.chain(3).data) == driver.tier(NVME).chunks - 1
    assert driver.service.idle()


def test_no_write_goes_out_while_an_engine_waits_for_a_retrieve() -> None:
    """A LOAD is in the hands: the backlog waits for its end."""
    driver, engine = ready(copy_depth=1)
    engine.put(engine.chain(1))
    engine.store(engine.chain(1, 1))
    engine.retrieve(engine.chain(1))
    driver.end(driver.waiting(MoveKind.STORE)[0])
    assert driver.waiting(MoveKind.LOAD)
    assert driver.stats().write_backlog == 1
    assert not driver.waiting(MoveKind.WRITE)
    driver.run(MoveKind.LOAD)
    assert driver.waiting(MoveKind.WRITE)
    driver.run()


def test_nothing_is_written_before_the_scan_has_ended() -> None:
    """A slot that the scan hasn't seen yet may hold a live chunk."""
    driver = Driver(limits(nvme_slots=8))
    engine = driver.engine()
    engine.put(engine.chain(2))
    assert not writes(driver)
    assert driver.stats().write_backlog == 2
    assert not driver.service.idle()
    driver.scanned()
    driver.run()
    assert driver.tier(NVME).chunks == 2


def test_nothing_is_written_before_its_namespace_is_durable() -> None:
    """A chunk on disk whose namespace the manifest doesn't know would be lost at the next start."""
    driver = Driver(limits(nvme_slots=8))
    driver.scanned()
    driver.durable = False
    engine = driver.engine()
    engine.put(engine.chain(2))
    assert not writes(driver)
    assert driver.stats().write_backlog == 2
    driver.event(Persisted(driver.persists[0].number))
    driver.run()
    assert driver.tier(NVME).chunks == 2


def test_a_namespace_that_cannot_be_made_durable_drops_its_writes_and_is_tried_again() -> None:
    """The manifest can't be written: the backlog is dropped and counted, so that a stop isn't held
    up; a later Tick tries again, and from then on chunks are written."""
    driver = Driver(limits(nvme_slots=8))
    driver.scanned()
    driver.durable = False
    engine = driver.engine()
    engine.put(engine.chain(2))
    driver.event(Persisted(driver.persists[0].number, "read-only file system"))
    assert driver.service.idle()
    assert driver.drops("nvme_write_failed") == 2
    driver.tick(1.0)
    assert len(driver.persists) == 1
    driver.tick(10.0)
    assert len(driver.persists) == 2
    driver.event(Persisted(driver.persists[1].number))
    engine.put(engine.chain(2))
    assert driver.tier(NVME).chunks == 2


def test_a_persist_makes_only_the_namespaces_durable_that_it_carries() -> None:
    """Namespace 2 came after the first Persist was made: the first one's end doesn't let its chunks
    out, the second one's does."""
    driver = Driver(limits(nvme_slots=8))
    driver.scanned()
    driver.durable = False
    driver.engine()
    second = driver.engine("e2", tenant="t2")
    one, two = driver.persists
    assert len(one.spaces) == 1
    driver.event(Persisted(one.number))
    second.put(second.chain(1))
    assert not writes(driver)
    driver.event(Persisted(two.number))
    assert len(writes(driver)) == 1
    driver.run()


def test_without_nvme_nothing_is_written() -> None:
    """No tier, no backlog, no drops."""
    driver = Driver(limits())
    engine = driver.engine()
    engine.put(engine.chain(4))
    assert driver.stats().write_backlog == 0
    assert driver.stats().drops == {}
    assert driver.tier(TierName.HOST).chunks == 4


def test_what_is_hidden_on_nvme_is_written_anew() -> None:
    """The head's NVMe copy was given up, its children there are hidden and not swept yet. The next
    store of the prompt writes all three: a hidden copy isn't a copy."""
    driver, engine = ready()
    keys = engine.chain(3)
    engine.put(keys)
    nvme = driver.service._state.directory.nvme
    space = driver.service._state.spaces.all()[0]
    assert nvme is not None
    head = nvme.find(space, keys[0])
    assert head is not None
    nvme.doom(head)
    engine.put(keys)
    assert [move.header.key for move in writes(driver)[3:]] == list(keys)
    driver.tick()
    assert nvme.visible_run(space, keys.data) == 3
