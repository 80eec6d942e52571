"""Clear: epochs rise at once, stores in flight never commit, the answer waits for the disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.core import batches
from kvstore.core.messages import (
    ADMIN,
    Clear,
    Cleared,
    MoveKind,
    MoveStatus,
    Refused,
    TierName,
)
from tests.core.driver import MODEL, Driver, Engine, limits

NVME = TierName.NVME


def ready(**settings: Any) -> tuple[Driver, Engine]:
    """A driver with four host slots and eight on NVMe, and an engine."""
    driver = Driver(limits(nvme_slots=8, **settings))
    driver.scanned()
    return driver, driver.engine()


def test_a_clear_forgets_everything_at_once_in_every_local_tier() -> None:
    """Field case 12: lookups miss with the very event, before any sweep; slots come back in steps;
    what is stored next is a hit."""
    driver, engine = ready(sweep_entries=3)
    keys = engine.chain(4)
    engine.put(keys)
    number = driver.clear()
    assert engine.peek(keys) == 0
    assert engine.get(keys) == b"\0\0\0\0"
    assert driver.answer(ADMIN, number) == Cleared(namespaces=1, chunks=4)
    assert (driver.tier().chunks, driver.tier(NVME).chunks) == (0, 0)
    assert driver.tier().slots_used == 4
    driver.tick()
    assert (driver.tier().slots_used, driver.tier(NVME).slots_used) == (1, 1)
    assert driver.service.next_tick_s(driver.now) < 0.1
    driver.tick()
    assert (driver.tier().slots_used, driver.tier(NVME).slots_used) == (0, 0)
    assert driver.service.next_tick_s(driver.now) > 0.1
    assert engine.put(keys) == b"\1\1\1\1"
    assert engine.peek(keys) == 4


def test_a_store_right_after_a_clear_finds_room_among_what_was_cleared() -> None:
    """The host is full of cleared chunks that no sweep has reached: a store sweeps what it
    needs."""
    driver, engine = ready(sweep_entries=1)
    engine.put(engine.chain(4))
    driver.clear()
    assert engine.put(engine.chain(4, 1)) == b"\1\1\1\1"
    assert driver.tier().evictions == 0


@pytest.mark.parametrize("sweep_first", [True, False], ids=["swept first", "landed first"])
def test_a_store_in_flight_never_commits(sweep_first: bool) -> None:
    """Field case 12: two chunks are on their way when the clear comes: nothing of them is ever a
    hit; the store is told so, after its Moves; the slots are free."""
    driver, engine = ready()
    keys = engine.chain(2)
    number = engine.store(keys)
    driver.clear()
    if sweep_first:
        driver.tick()
    assert engine.peek(keys) == 0
    assert driver.is_open(engine.workers[0], number)
    for move in list(driver.moves):
        driver.end(move)
        driver.tick()
    assert driver.completed(engine.workers[0], number).done == b"\0\0"
    assert engine.peek(keys) == 0
    assert driver.tier().slots_used == 0
    driver.run()
    assert driver.count(MoveKind.WRITE) == 0


def test_a_landed_chunk_that_waits_for_its_parent_never_commits() -> None:
    """Chunk 1 has landed, chunk 0 runs when the clear comes: the store ends with nothing done."""
    driver, engine = ready()
    keys = engine.chain(2)
    number = engine.store(keys)
    driver.end(driver.moves[1])
    driver.clear()
    driver.run()
    driver.tick()
    assert driver.completed(engine.workers[0], number).done == b"\0\0"
    assert engine.peek(keys) == 0
    assert driver.tier().slots_used == 0


def test_the_same_chunk_is_stored_anew_while_the_old_store_still_runs() -> None:
    """The old Move writes to its old slot; the new store has one of its own and is a hit; the late
    Moved doesn't bring the old one back."""
    driver, engine = ready()
    keys = engine.chain(1)
    engine.store(keys)
    driver.clear()
    assert engine.store(keys)
    old, new = driver.waiting(MoveKind.STORE)
    assert old.target != new.target
    assert (old.header.epoch, new.header.epoch) == (0, 1)
    driver.end(new)
    assert engine.peek(keys) == 1
    driver.end(old)
    assert engine.peek(keys) == 1
    driver.run()
    driver.tick()
    assert driver.tier().slots_used == 1


def test_a_write_in_flight_leaves_nothing_on_nvme() -> None:
    """The WRITE ends after the clear: its slot is free, and its header says the old epoch."""
    driver, engine = ready()
    keys = engine.chain(1)
    engine.store(keys)
    driver.run(MoveKind.STORE)
    (write,) = driver.waiting(MoveKind.WRITE)
    driver.clear()
    driver.end(write)
    driver.tick()
    assert write.header.epoch == 0
    assert driver.tier(NVME).slots_used == 0
    assert engine.peek(keys) == 0
    assert driver.service.idle()


def test_the_backlog_of_a_cleared_namespace_is_not_written() -> None:
    """Three prompts wait for their write when the clear comes: no WRITE of them goes out."""
    driver, engine = ready(write_depth=1)
    for seed in range(4):
        engine.store(engine.chain(1, seed))
    driver.run(MoveKind.STORE)
    driver.clear()
    driver.run()
    assert driver.count(MoveKind.WRITE) == 1
    assert driver.stats().write_backlog == 0
    assert driver.service.idle()


def test_a_retrieve_in_flight_ends_and_is_not_promoted() -> None:
    """A READ runs while the model is cleared: it ends, the engine's blocks come back, and nothing
    of it is a hit again."""
    driver, engine = ready()
    keys = engine.chain(1)
    engine.put(keys)
    for seed in range(4):
        engine.put(engine.chain(1, 1 + seed))
    number = engine.retrieve(keys)
    driver.clear()
    driver.run()
    for _ in range(3):
        driver.tick()
    assert not driver.is_open(engine.workers[0], number)
    assert engine.peek(keys) == 0
    assert (driver.tier().slots_used, driver.tier(NVME).slots_used) == (0, 0)


def test_a_queued_read_of_what_was_cleared_is_not_promoted_into_the_next_epoch() -> None:
    """Field case 12: the second READ is still queued when the clear comes: its bytes must not
    reappear under the new epoch."""
    driver, engine = ready(read_depth=1)
    keys = engine.chain(2)
    engine.put(keys)
    for seed in range(4):
        engine.put(engine.chain(1, 1 + seed))
    engine.retrieve(keys)
    engine.retrieve(engine.chain(1, 1), request="b")
    assert len(driver.moves) == 1
    driver.clear()
    driver.run()
    for _ in range(3):
        driver.tick()
    assert engine.peek(keys) == engine.peek(engine.chain(1, 1)) == 0
    assert driver.tier().chunks == driver.tier(NVME).chunks == 0


def test_a_retrieve_after_the_clear_gets_nothing_though_nothing_is_swept() -> None:
    """The old chunks still lie in their slots: no key finds them."""
    driver, engine = ready()
    keys = engine.chain(2)
    engine.put(keys)
    driver.durable = False
    driver.clear()
    assert engine.get(keys) == b"\0\0"
    assert driver.count(MoveKind.LOAD) == 0


def test_a_long_store_begins_nothing_more_after_the_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of four chunks are begun at a time; the clear comes after the first two: the others are
    not gathered, the store ends with nothing done, and every slot is free."""
    monkeypatch.setattr(batches, "STEP_CHUNKS", 2)
    driver, engine = ready()
    number = engine.store(engine.chain(4))
    driver.clear()
    driver.tick()
    driver.run()
    for _ in range(5):
        driver.tick()
        driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\0\0\0\0"
    assert driver.count(MoveKind.STORE) == 2
    assert driver.tier().slots_used == 0


def test_a_long_retrieve_begins_nothing_more_after_the_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same for a retrieve, whose chunks no sweep has reached yet: what was cleared is not
    handed out any more."""
    monkeypatch.setattr(batches, "STEP_CHUNKS", 2)
    driver, engine = ready(sweep_entries=0)
    engine.put(engine.chain(4)[:2])
    driver.tick()
    engine.put(engine.chain(4)[2:])
    number = engine.retrieve(engine.chain(4))
    driver.clear()
    for _ in range(5):
        driver.run()
        driver.tick()
    assert driver.completed(engine.workers[0], number).done == b"\1\1\0\0"
    assert driver.count(MoveKind.LOAD) == 2


def test_leases_of_what_was_cleared_promise_nothing() -> None:
    """The lookup is repeated after the clear: a miss; ending the lease harms nothing."""
    driver, engine = ready()
    keys = engine.chain(2)
    engine.put(keys)
    assert engine.lookup(keys) == 2
    driver.clear()
    assert engine.lookup(keys) == 0
    driver.tick()
    engine.release()
    assert driver.stats().leases == 0
    engine.lookup(keys, "other")
    driver.tick(3600.0)


def test_a_failed_store_after_the_clear_harms_nothing() -> None:
    """The old Move fails late."""
    driver, engine = ready()
    number = engine.store(engine.chain(2))
    driver.clear()
    driver.tick()
    for move in list(driver.moves):
        driver.end(move, MoveStatus.FAILED)
    assert driver.completed(engine.workers[0], number).done == b"\0\0"
    assert driver.tier().slots_used == 0


def test_what_a_clear_aborts_is_counted() -> None:
    """Two parts of a store in flight are dropped because of the clear: nothing is lost silently."""
    driver, engine = ready()
    engine.store(engine.chain(2))
    driver.clear()
    driver.run()
    driver.tick()
    assert sum(driver.stats().drops.values()) >= 2
    assert driver.drops("cleared") >= 1


# ---------------------------------------------------------------- which namespaces


def test_a_clear_means_what_matches_tenant_and_model_or_alias() -> None:
    """Field case 110, the core's part: three engines of two tenants and two models; each filter
    clears what it names and nothing else."""
    filters: list[tuple[str | None, str | None, list[int]]] = [
        (None, "org/other", [2, 0, 2]),
        ("t2", None, [2, 2, 0]),
        ("t1", "org/model", [0, 2, 2]),
        (None, "short", [2, 0, 2]),
        ("t2", "org/other", [2, 2, 2]),
        (None, "never seen", [2, 2, 2]),
        (None, None, [0, 0, 0]),
    ]
    for tenant, model, left in filters:
        driver = Driver(limits(host_slots=8))
        other = replace(MODEL, model="org/other", alias="short")
        engines = [
            driver.engine("e1"),
            driver.engine("e2", namespace=other),
            driver.engine("e3", tenant="t2"),
        ]
        for engine in engines:
            engine.put(engine.chain(2))
        number = driver.clear(tenant, model)
        assert [engine.peek(engine.chain(2)) for engine in engines] == left
        cleared = driver.answer(ADMIN, number)
        gone = left.count(0)
        assert cleared == Cleared(namespaces=gone, chunks=2 * gone)


def test_a_clear_of_nothing_is_answered_at_once() -> None:
    """No namespace matches: there is nothing to make durable."""
    driver = Driver(limits())
    assert driver.answer(ADMIN, driver.clear(model="no such model")) == Cleared(0, 0)
    assert driver.persists == []


def test_only_the_administrator_clears() -> None:
    """An engine's session is refused."""
    driver, engine = ready()
    engine.put(engine.chain(1))
    assert isinstance(driver.ask(engine.workers[0], Clear(None, None)), Refused)
    assert engine.peek(engine.chain(1)) == 1


def test_an_engine_goes_on_under_the_same_namespace() -> None:
    """Its keys stay the same; only the epoch in its headers rises, once a clear."""
    driver, engine = ready()
    for epoch in range(3):
        engine.store(engine.chain(1))
        assert driver.moves[-1].header.epoch == epoch
        driver.run()
        driver.clear()
        driver.tick()
    (space,) = driver.stats().spaces
    assert space.epoch == 3
    assert driver.engine("e2").digest == engine.digest
