"""The loss of a session at any step: one Detach, after its last Move."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.messages import MoveKind, MoveStatus, SessionClosed, TierName
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


# ---------------------------------------------------------------- the session is lost


def test_loss_of_an_idle_session_detaches_it_at_once() -> None:
    """No Move uses its memory."""
    driver, engine = ready()
    driver.close(engine.workers[0])
    assert driver.detached == [engine.workers[0]]


def test_loss_of_a_session_that_never_registered_detaches_it() -> None:
    """Its socket has to be closed all the same."""
    driver, _ = ready()
    stranger = driver.session()
    driver.close(stranger)
    assert driver.detached == [stranger]


@pytest.mark.parametrize("status", STATUSES)
def test_loss_while_storing_detaches_after_the_last_move_and_commits_nothing(
    status: MoveStatus,
) -> None:
    """Field case 47: two Moves run, one is queued. The mapping is dropped with the second Moved,
    once, nobody is answered, and the slots are free."""
    driver, engine = ready(copy_depth=2)
    keys = engine.chain(3)
    number = engine.store(keys)
    driver.close(engine.workers[0])
    first, second = driver.moves
    driver.end(first, status)
    assert not driver.detached
    driver.end(second, status)
    assert driver.detached == [engine.workers[0]]
    assert driver.is_open(engine.workers[0], number)
    assert driver.drops("session_lost") == 3
    assert driver.tier().slots_used == 0
    assert_clean(driver)


@pytest.mark.parametrize("status", STATUSES)
def test_loss_while_loading_detaches_after_the_last_move(status: MoveStatus) -> None:
    """Field case 47: the source stays pinned, and the memory mapped, until the LOAD has ended."""
    driver, engine = ready(copy_depth=1)
    keys = engine.chain(2)
    engine.put(keys)
    engine.retrieve(keys)
    driver.close(engine.workers[0])
    assert not driver.detached
    assert driver.tier().pinned == 1
    driver.end(driver.moves[0], status)
    assert driver.detached == [engine.workers[0]]
    assert_clean(driver)


def test_loss_while_everything_is_queued_detaches_at_once() -> None:
    """Field case 47: another session's Move fills the lane: the lost one's Moves are dropped, and
    it is detached once."""
    driver, engine = ready(copy_depth=1)
    other = driver.engine("e2")
    other.store(other.chain(1, 1))
    engine.store(engine.chain(2))
    driver.close(engine.workers[0])
    assert driver.detached == [engine.workers[0]]
    driver.run()
    assert_clean(driver)


def test_loss_while_reading_detaches_at_once() -> None:
    """A READ doesn't use the session's memory; it goes on for the cache's sake."""
    driver, engine = cold()
    engine.retrieve(engine.chain(2))
    driver.close(engine.workers[0])
    assert driver.detached == [engine.workers[0]]
    driver.run()
    assert driver.count(MoveKind.LOAD) == 0
    assert_clean(driver)


def test_loss_of_the_one_who_writes_fails_those_who_joined() -> None:
    """The joined session is told, and its own store works then."""
    driver, engine = ready()
    other = driver.engine("e2")
    keys = engine.chain(1)
    engine.store(keys)
    number = other.store(keys)
    driver.close(engine.workers[0])
    assert driver.completed(other.workers[0], number).done == b"\0"
    assert other.put(keys) == b"\1"
    assert driver.detached == [engine.workers[0]]


def test_loss_of_one_who_joined_leaves_the_writer() -> None:
    """It is detached at once, as the Move isn't its own."""
    driver, engine = ready()
    other = driver.engine("e2")
    keys = engine.chain(1)
    number = engine.store(keys)
    other.store(keys)
    driver.close(other.workers[0])
    assert driver.detached == [other.workers[0]]
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1"


def test_requests_of_a_lost_session_are_ignored() -> None:
    """A request that was on the way when the socket broke changes nothing while Moves end."""
    driver, engine = ready()
    engine.store(engine.chain(1))
    driver.close(engine.workers[0])
    number = engine.store(engine.chain(1, 1))
    assert driver.is_open(engine.workers[0], number)
    assert len(driver.moves) == 1
    driver.run()
    assert driver.detached == [engine.workers[0]]


@pytest.mark.parametrize("copy_depth", [1, 2, 8])
@pytest.mark.parametrize("ended", range(9))
def test_a_session_may_be_lost_at_any_step(ended: int, copy_depth: int) -> None:
    """Field case 47: store, retrieve and a retrieve from NVMe of one engine, and the same store of
    another one. After ``ended`` of the Moves the first is lost: one Detach, nothing leaks, the
    other one is answered, and what is visible afterwards can be retrieved."""
    driver, engine = cold(copy_depth=copy_depth)
    other = driver.engine("e2")
    engine.lookup(engine.chain(2))
    engine.retrieve(engine.chain(1, 103), request="b")
    engine.retrieve(engine.chain(2))
    shared = engine.chain(2, 7)
    engine.store(shared)
    number = other.store(shared)
    for _ in range(ended):
        if driver.moves:
            driver.end(driver.moves[-1])
    driver.event(SessionClosed(engine.workers[0]))
    driver.run()
    driver.close(engine.scheduler)
    assert driver.detached == [engine.workers[0], engine.scheduler]
    assert driver.stats().leases == 0
    done = driver.completed(other.workers[0], number).done
    assert other.peek(shared) >= done.count(1)
    assert other.get(shared)[: other.peek(shared)] == b"\1" * other.peek(shared)
    assert driver.tier(TierName.NVME).pinned == 0
    assert_clean(driver)
