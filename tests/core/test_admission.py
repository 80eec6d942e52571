"""Admission: the byte budget, and what it and the count of stores let into NVMe."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.admission import ByteBudget
from kvstore.core.layout import Shard
from kvstore.core.messages import Move, MoveKind, TierName
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


# ---------------------------------------------------------------- the bucket


def admit(budget: ByteBudget, nbytes: int, now: float) -> bool:
    """Let bytes in if there is room for them."""
    if not budget.has_room(nbytes, now):
        return False
    budget.spend(nbytes)
    return True


def test_no_limit_admits_everything() -> None:
    """A rate of 0 is no limit."""
    budget = ByteBudget(0, 1.0)
    assert all(admit(budget, 1 << 40, 0.0) for _ in range(3))


def test_the_bucket_starts_full_and_empties() -> None:
    """100 bytes a second over 2 s: 200 bytes at once, then none."""
    budget = ByteBudget(100, 2.0)
    assert admit(budget, 150, 0.0)
    assert admit(budget, 50, 0.0)
    assert not admit(budget, 1, 0.0)


def test_the_bucket_fills_at_its_rate_up_to_the_burst() -> None:
    """After 0.5 s 50 bytes are there; after an hour no more than the burst."""
    budget = ByteBudget(100, 2.0)
    assert admit(budget, 200, 0.0)
    assert not admit(budget, 51, 0.5)
    assert admit(budget, 50, 0.5)
    assert admit(budget, 200, 3600.0)
    assert not admit(budget, 1, 3600.0)


def test_asking_takes_nothing() -> None:
    """A chunk that is too large now leaves the room for a smaller one, asked however often."""
    budget = ByteBudget(100, 1.0)
    assert admit(budget, 60, 0.0)
    assert not budget.has_room(60, 0.0)
    assert budget.has_room(40, 0.0)
    assert budget.has_room(40, 0.0)


def test_a_chunk_larger_than_the_bucket_passes_when_it_is_full_and_is_paid_for() -> None:
    """No size starves, but over time no more bytes pass than the rate allows."""
    budget = ByteBudget(100, 1.0)
    assert admit(budget, 250, 0.0)
    assert not admit(budget, 250, 1.0)
    assert not admit(budget, 1, 1.0)
    assert admit(budget, 250, 2.5)


@pytest.mark.parametrize("nbytes", [30, 100, 170])
def test_over_time_the_rate_holds(nbytes: int) -> None:
    """Asked every 10 ms for 100 s, the bucket admits its rate, and the burst once."""
    budget = ByteBudget(100, 1.0)
    admitted = sum(nbytes for step in range(10_000) if admit(budget, nbytes, step / 100))
    assert 100 * 100 - nbytes <= admitted <= 100 * 101 + nbytes


# ---------------------------------------------------------------- what enters NVMe


def test_the_byte_budget_bounds_what_is_written() -> None:
    """One chunk's bytes a second, two in the bucket: of four chunks two are written; a second
    later there is room for one more."""
    driver, engine = ready(write_budget_bytes_s=BLOCK_BYTES, write_burst_s=2.0)
    for seed in range(4):
        engine.put(engine.chain(1, seed))
    assert driver.tier(NVME).chunks == 2
    assert driver.drops("nvme_budget") == 2
    driver.tick(1.0)
    engine.put(engine.chain(1, 2))
    engine.put(engine.chain(1, 3))
    assert driver.tier(NVME).chunks == 3


def test_a_write_that_finds_no_place_costs_no_budget() -> None:
    """NVMe's only slot is leased, so a write is refused there; released, the next one has the
    budget for it."""
    driver, engine = ready(
        host_slots=1, nvme_slots=1, write_budget_bytes_s=1, write_burst_s=float(2 * BLOCK_BYTES)
    )
    keys = engine.chain(1)
    engine.put(keys)
    host = driver.service._state.directory.host
    copy = host.find(driver.service._state.spaces.all()[0], keys[0])
    assert copy is not None
    host.doom(copy)
    assert engine.lookup(keys) == 1
    engine.put(engine.chain(1, 1))
    assert driver.drops("nvme_full") == 1
    engine.release()
    engine.put(engine.chain(1, 2))
    assert driver.drops("nvme_budget") == 0
    assert len(writes(driver)) == 2


def test_a_chunk_enters_nvme_at_its_second_store() -> None:
    """Field case 85, admit_after=2: the first store stays in the host, the second one goes to
    disk, the third changes nothing."""
    driver, engine = ready(admit_after=2)
    keys = engine.chain(2)
    engine.put(keys)
    assert driver.tier(NVME).chunks == 0
    assert driver.drops("nvme_admission") == 2
    engine.put(keys)
    assert driver.tier(NVME).chunks == 2
    engine.put(keys)
    assert len(writes(driver)) == 2


@pytest.mark.parametrize("shards", [TWO_RANKS, REPLICAS], ids=["two ranks", "two replicas"])
def test_the_ranks_of_one_engine_store_a_chunk_once_between_them(shards: tuple[Shard, ...]) -> None:
    """Field case 85 with two processes: each rank stores its part of the same step. That is one
    store of the chunk, not two; the second step's is the second."""
    driver = Driver(limits(host_slots=8, nvme_slots=8, admit_after=2))
    driver.scanned()
    engine = driver.engine(shards=shards)
    keys = engine.chain(1)
    engine.put(keys)
    assert writes(driver) == []
    engine.put(keys)
    assert len(writes(driver)) == shards[0].count()
    assert driver.tier(NVME).chunks == 1


@pytest.mark.parametrize("shards", [TWO_RANKS, REPLICAS], ids=["two ranks", "two replicas"])
def test_ranks_that_store_one_after_another_store_a_chunk_once(shards: tuple[Shard, ...]) -> None:
    """The same where the first rank's store has committed before the second one asks."""
    driver = Driver(limits(host_slots=8, nvme_slots=8, admit_after=2))
    driver.scanned()
    engine = driver.engine(shards=shards)
    keys = engine.chain(1)
    for rank in (0, 1):
        engine.store(keys, rank)
        driver.run()
    assert writes(driver) == []
    for rank in (0, 1):
        engine.store(keys, rank)
        driver.run()
    assert driver.tier(NVME).chunks == 1
    assert len(writes(driver)) == shards[0].count()


def test_ranks_may_store_in_another_order_each_time() -> None:
    """Rank 0 is first at the first step, rank 1 at the second: both parts go to disk then, as a
    family without a part is no hit."""
    driver = Driver(limits(host_slots=8, nvme_slots=8, admit_after=2))
    driver.scanned()
    engine = driver.engine(shards=TWO_RANKS)
    keys = engine.chain(1)
    for rank in (0, 1, 1, 0):
        engine.store(keys, rank)
        driver.run()
    assert sorted(move.header.shard for move in writes(driver)) == [0, 1]
