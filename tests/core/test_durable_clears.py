"""Clear and the manifest: when it is answered, what is written before, what if it fails."""

from __future__ import annotations

from typing import Any

from kvstore.core.messages import (
    ADMIN,
    Cleared,
    MoveKind,
    Persisted,
    Refused,
    TierName,
)
from tests.core.driver import Driver, Engine, limits

NVME = TierName.NVME


def ready(**settings: Any) -> tuple[Driver, Engine]:
    """A driver with four host slots and eight on NVMe, and an engine."""
    driver = Driver(limits(nvme_slots=8, **settings))
    driver.scanned()
    return driver, driver.engine()


# ---------------------------------------------------------------- durable


def test_the_answer_waits_until_the_epochs_are_durable() -> None:
    """Persist carries the raised epoch; Cleared comes with its Persisted and not before, and
    nothing of the new epoch is written to disk before either."""
    driver, engine = ready()
    engine.put(engine.chain(2))
    driver.durable = False
    number = driver.clear()
    assert driver.is_open(ADMIN, number)
    (record,) = driver.persists[-1].spaces
    assert record.epoch == 1
    engine.put(engine.chain(1, 1))
    assert driver.count(MoveKind.WRITE) == 2
    driver.event(Persisted(driver.persists[-1].number))
    assert driver.answer(ADMIN, number) == Cleared(1, 2)
    driver.run()
    assert driver.count(MoveKind.WRITE) == 3


def test_two_clears_are_answered_by_the_persist_that_covers_them() -> None:
    """The second one's Persisted comes first: as each replaces the whole, both are durable."""
    driver, _ = ready()
    driver.durable = False
    first, second = driver.clear(), driver.clear()
    one, two = driver.persists[-2:]
    assert [record.epoch for record in two.spaces] == [2]
    driver.event(Persisted(two.number))
    assert isinstance(driver.answer(ADMIN, first), Cleared)
    assert isinstance(driver.answer(ADMIN, second), Cleared)
    driver.event(Persisted(one.number))
    assert len(driver.answers(ADMIN, first)) == 1


def test_an_earlier_persist_does_not_answer_a_later_clear() -> None:
    """The first one's Persisted says nothing of the second one's epoch."""
    driver, _ = ready()
    driver.durable = False
    first, second = driver.clear(), driver.clear()
    driver.event(Persisted(driver.persists[-2].number))
    assert isinstance(driver.answer(ADMIN, first), Cleared)
    assert driver.is_open(ADMIN, second)


def test_a_clear_that_cannot_be_made_durable_says_so_and_is_tried_again() -> None:
    """The manifest can't be written: the answer says that the chunks are gone from memory but may
    come back with a restart; a later Tick tries again with the same epochs."""
    driver, engine = ready()
    engine.put(engine.chain(2))
    driver.durable = False
    number = driver.clear()
    tried = driver.persists[-1]
    driver.event(Persisted(tried.number, "no space left on device"))
    body = driver.answer(ADMIN, number)
    assert isinstance(body, Refused)
    assert "no space left on device" in body.reason
    assert "\n" not in body.reason
    assert engine.peek(engine.chain(2)) == 0
    driver.tick(60.0)
    again = driver.persists[-1]
    assert again.number > tried.number
    assert again.spaces == tried.spaces
    driver.event(Persisted(again.number))
    engine.put(engine.chain(1))
    assert driver.tier(NVME).chunks == 1


def test_a_failed_persist_does_not_fail_a_later_one() -> None:
    """Two clears: the first one's Persist fails, the second one's works and covers both."""
    driver, _ = ready()
    driver.durable = False
    first, second = driver.clear(), driver.clear()
    one, two = driver.persists[-2:]
    driver.event(Persisted(one.number, "busy"))
    driver.event(Persisted(two.number))
    assert isinstance(driver.answer(ADMIN, first), Refused)
    assert isinstance(driver.answer(ADMIN, second), Cleared)


def test_a_failed_persist_fails_all_clears_that_it_would_have_covered() -> None:
    """The hands skip a Persist that a newer one replaces; the newer one fails: both clears are
    answered, none waits for ever."""
    driver, _ = ready()
    driver.durable = False
    first, second = driver.clear(), driver.clear()
    driver.event(Persisted(driver.persists[-1].number, "busy"))
    assert isinstance(driver.answer(ADMIN, first), Refused)
    assert isinstance(driver.answer(ADMIN, second), Refused)
