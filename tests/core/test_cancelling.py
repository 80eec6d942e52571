"""Cancel and the loss of a session: one Completed, one Detach, and both after the running Moves."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.messages import Done, MoveKind, MoveStatus
from tests.core.driver import Driver, Engine, limits

STATUSES = [MoveStatus.OK, MoveStatus.FAILED]


def ready(**settings: Any) -> tuple[Driver, Engine]:
    """A driver with four host slots and an engine."""
    driver = Driver(limits(**settings))
    return driver, driver.engine()


def cold(**settings: Any) -> tuple[Driver, Engine]:
    """A driver whose prompts of seed 0 (two chunks) are on NVMe only."""
    driver = Driver(limits(nvme_slots=16, **settings))
    driver.scanned()
    engine = driver.engine()
    engine.put(engine.chain(2))
    for seed in range(4):
        engine.put(engine.chain(1, 100 + seed))
    driver.handed_out.clear()
    return driver, engine


def assert_clean(driver: Driver) -> None:
    """Nothing is pinned, queued or open any more, and a fill takes every host slot."""
    assert driver.service.idle()
    stats = driver.stats()
    assert (stats.moves_in_flight, stats.moves_queued, stats.write_backlog) == (0, 0, 0)
    assert all(tier.pinned == 0 for tier in stats.tiers)
    fresh = driver.engine("fresh", tenant="fresh")
    assert fresh.put(fresh.chain(4)) == b"\1\1\1\1"


# ---------------------------------------------------------------- cancel a store


def test_cancel_of_a_queued_store_completes_at_once() -> None:
    """Its Moves were never handed out: they are dropped, the blocks are the engine's again."""
    driver, engine = ready(copy_depth=1)
    other = driver.engine("e2")
    other.store(other.chain(1, 1))
    keys = engine.chain(2)
    number = engine.store(keys)
    engine.cancel(number)
    completed = driver.completed(engine.workers[0], number)
    assert (completed.done, completed.cancelled) == (b"\0\0", True)
    driver.run()
    assert driver.count(MoveKind.STORE) == 1
    assert engine.peek(keys) == 0
    assert driver.drops("cancelled") == 2
    assert_clean(driver)


@pytest.mark.parametrize("status", STATUSES)
def test_cancel_of_a_running_store_is_acknowledged_after_its_moves(status: MoveStatus) -> None:
    """Field case 16: one Move runs, one is queued. The cancel is acknowledged when the running one
    has ended, whatever way, and nothing commits."""
    driver, engine = ready(copy_depth=1)
    keys = engine.chain(2)
    number = engine.store(keys)
    engine.cancel(number)
    assert driver.is_open(engine.workers[0], number)
    (running,) = driver.moves
    driver.end(running, status)
    completed = driver.completed(engine.workers[0], number)
    assert (completed.done, completed.cancelled) == (b"\0\0", True)
    assert not driver.moves
    assert engine.peek(keys) == 0
    assert_clean(driver)


def test_cancel_keeps_what_has_committed() -> None:
    """Field case 16: chunk 0 of 3 was committed, 1 is running, 2 queued: the mask tells it."""
    driver, engine = ready(copy_depth=1)
    keys = engine.chain(3)
    number = engine.store(keys)
    driver.end(driver.moves[0])
    engine.cancel(number)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\0\0"
    assert engine.peek(keys) == 1
    assert_clean(driver)


def test_cancel_drops_what_has_landed_and_waits_for_its_parent() -> None:
    """Chunk 1 has landed, chunk 0 is running: a cancelled store never commits, so chunk 1's slot is
    free at once and chunk 0's after its Moved."""
    driver, engine = ready()
    keys = engine.chain(2)
    number = engine.store(keys)
    driver.end(driver.moves[1])
    engine.cancel(number)
    assert driver.tier().slots_used == 1
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\0\0"
    assert engine.peek(keys) == 0
    assert_clean(driver)


def test_cancel_of_a_store_that_joined_another_is_acknowledged_at_once() -> None:
    """The second session waits for the first one's Move, which doesn't touch its memory: it needn't
    wait for it, and the first one's store goes on."""
    driver, engine = ready()
    other = driver.engine("e2")
    keys = engine.chain(1)
    first, second = engine.store(keys), other.store(keys)
    other.cancel(second)
    assert driver.completed(other.workers[0], second).cancelled
    driver.run()
    assert driver.completed(engine.workers[0], first).done == b"\1"
    assert engine.peek(keys) == 1


def test_cancel_of_the_writer_fails_those_who_joined_it() -> None:
    """The first session cancels: the second one is told that the chunk isn't kept, when the
    running Move allows it or before, and can store it itself."""
    driver, engine = ready()
    other = driver.engine("e2")
    keys = engine.chain(1)
    first, second = engine.store(keys), other.store(keys)
    engine.cancel(first)
    driver.run()
    assert driver.completed(engine.workers[0], first).cancelled
    assert driver.completed(other.workers[0], second).done == b"\0"
    assert other.put(keys) == b"\1"


def test_a_key_whose_store_was_cancelled_can_be_stored_while_its_move_still_runs() -> None:
    """The cancelled slot is held by the old Move; the new store gets another slot, and the old
    Moved takes nothing from it."""
    driver, engine = ready()
    other = driver.engine("e2")
    keys = engine.chain(1)
    engine.cancel(engine.store(keys))
    number = other.store(keys)
    old, new = driver.moves
    assert old.target != new.target
    driver.end(new)
    driver.end(old)
    assert driver.completed(other.workers[0], number).done == b"\1"
    assert engine.peek(keys) == 1
    assert_clean(driver)


# ---------------------------------------------------------------- cancel a retrieve


@pytest.mark.parametrize("status", STATUSES)
def test_cancel_of_a_running_load_is_acknowledged_after_it(status: MoveStatus) -> None:
    """One LOAD runs, one is queued: the blocks come back after the running one; its source is
    pinned until then."""
    driver, engine = ready(copy_depth=1)
    keys = engine.chain(2)
    engine.put(keys)
    number = engine.retrieve(keys)
    engine.cancel(number)
    assert driver.is_open(engine.workers[0], number)
    assert driver.tier().pinned == 1
    driver.end(driver.moves[0], status)
    completed = driver.completed(engine.workers[0], number)
    assert completed.cancelled
    assert completed.done[1] == 0
    assert driver.count(MoveKind.LOAD) == 1
    assert_clean(driver)


def test_cancel_of_a_queued_read_drops_it() -> None:
    """The read lane is full: the READ that nobody waits for any more never goes out."""
    driver, engine = cold(read_depth=1)
    keys = engine.chain(2)
    number = engine.retrieve(keys)
    engine.cancel(number)
    assert driver.completed(engine.workers[0], number).cancelled
    driver.run()
    assert driver.count(MoveKind.READ) == 1
    assert driver.count(MoveKind.LOAD) == 0
    assert_clean(driver)


@pytest.mark.parametrize("status", [*STATUSES, MoveStatus.CORRUPT])
def test_cancel_of_a_running_read_is_acknowledged_at_once(status: MoveStatus) -> None:
    """A READ touches no engine memory: the cancel needn't wait; the bytes are promoted, or the bad
    chunk is given up, all the same."""
    driver, engine = cold()
    keys = engine.chain(1)
    number = engine.retrieve(keys)
    engine.cancel(number)
    assert driver.completed(engine.workers[0], number).done == b"\0"
    driver.end(driver.moves[0], status)
    driver.run()
    driver.tick()
    assert driver.count(MoveKind.LOAD) == 0
    assert engine.peek(keys) == (1 if status is MoveStatus.OK else 0)
    assert_clean(driver)


def test_cancel_of_one_reader_leaves_the_others() -> None:
    """Two requests wait for one READ; one is cancelled, the other one is served."""
    driver, engine = cold()
    keys = engine.chain(1)
    first, second = engine.retrieve(keys), engine.retrieve(keys, request="r2")
    engine.cancel(first)
    assert driver.completed(engine.workers[0], first).done == b"\0"
    driver.run()
    assert driver.completed(engine.workers[0], second).done == b"\1"
    assert driver.count(MoveKind.LOAD) == 1


def test_cancel_between_read_and_load_drops_the_load() -> None:
    """The READ has ended, the LOAD is queued behind another one: it is dropped, and the promoted
    chunk stays."""
    driver, engine = cold(copy_depth=1)
    keys = engine.chain(1)
    blocker = engine.retrieve(engine.chain(1, 103), request="b")
    number = engine.retrieve(keys)
    driver.run(MoveKind.READ)
    engine.cancel(number)
    assert driver.completed(engine.workers[0], number).cancelled
    driver.run()
    assert driver.completed(engine.workers[0], blocker).done == b"\1"
    driver.handed_out.clear()
    engine.get(keys)
    assert driver.count(MoveKind.READ) == 0
    assert_clean(driver)


# ---------------------------------------------------------------- cancel what isn't there


def test_cancel_twice_completes_once() -> None:
    """Each cancel is answered; the transfer completes one time."""
    driver, engine = ready()
    number = engine.store(engine.chain(1))
    engine.cancel(number)
    engine.cancel(number)
    driver.run()
    assert driver.completed(engine.workers[0], number).cancelled
    done = [r for r in driver.replies if r.body == Done()]
    assert len(done) == 2


def test_cancel_of_what_has_completed_does_nothing() -> None:
    """It is answered, and there is no second Completed; the chunk stays."""
    driver, engine = ready()
    keys = engine.chain(1)
    number = engine.store(keys)
    driver.run()
    engine.cancel(number)
    engine.cancel(12345)
    assert not driver.completed(engine.workers[0], number).cancelled
    assert engine.peek(keys) == 1


def test_a_session_cannot_cancel_anothers_transfer() -> None:
    """Numbers are the session's own."""
    driver, engine = ready()
    other = driver.engine("e2")
    number = engine.store(engine.chain(1))
    other.cancel(number)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1"


def test_cancel_of_a_store_that_joined_and_runs_waits_for_its_own_move_only() -> None:
    """Chunk 0 is another session's, chunk 1 its own and running. Cancelled; the other session's
    chunk commits; still the blocks aren't the engine's until its own Move has ended."""
    driver, engine = ready()
    other = driver.engine("e2")
    keys = engine.chain(2)
    other.store(keys[:1])
    number = engine.store(keys)
    theirs, own = driver.moves
    engine.cancel(number)
    driver.end(theirs)
    assert driver.is_open(engine.workers[0], number)
    driver.end(own)
    assert driver.completed(engine.workers[0], number).done == b"\0\0"
    assert engine.peek(keys) == 1
