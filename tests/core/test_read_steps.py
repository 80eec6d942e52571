"""A read that many wait for is handed on, or told to have failed, in steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvstore.core import reads
from kvstore.core.messages import MoveKind, MoveStatus
from tests.core.disk import first_life
from tests.core.driver import Driver, Engine, limits


def waiting(
    monkeypatch: pytest.MonkeyPatch, count: int, **settings: int
) -> tuple[Driver, Engine, list[int]]:
    """A restarted daemon, and so many retrieves that wait for the read of one chunk; three an event
    may be told."""
    monkeypatch.setattr(reads, "STEP_READERS", 3)
    disk, _ = first_life(chunks=1)
    driver = Driver(limits(nvme_slots=16, **settings), disk.spaces)
    driver.scanned(disk.found())
    engine = driver.engine()
    numbers = [engine.retrieve(engine.chain(1), request=f"r{n}") for n in range(count)]
    assert driver.count(MoveKind.READ) == 1
    return driver, engine, numbers


def done(driver: Driver, engine: Engine, numbers: list[int]) -> list[int]:
    """Which of the retrieves have ended."""
    return [n for n in numbers if not driver.is_open(engine.workers[0], n)]


def test_a_read_is_handed_on_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten wait: three LOADs come of the read's end, three of each Tick; one that is cancelled in
    between gets none. The slots are held until the last is told."""
    driver, engine, numbers = waiting(monkeypatch, 10, host_slots=4, copy_depth=100)
    (read,) = driver.waiting(MoveKind.READ)
    driver.end(read)
    assert driver.count(MoveKind.LOAD) == 3
    assert driver.tier().pinned == 1
    engine.cancel(numbers[9])
    assert driver.completed(engine.workers[0], numbers[9]).cancelled
    loads = [3]
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        loads.append(driver.count(MoveKind.LOAD))
    assert loads[-1] == 9
    assert all(after - before <= 3 for before, after in pairwise(loads))
    driver.run()
    completed = [driver.completed(engine.workers[0], number) for number in numbers[:9]]
    assert [answer.done for answer in completed] == [b"\1"] * 9
    assert driver.tier().pinned == 0


def test_what_is_handed_on_stays_though_all_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear comes between two steps: the slot isn't given to another before the last LOAD."""
    driver, engine, numbers = waiting(monkeypatch, 7, host_slots=1, copy_depth=100)
    driver.end(driver.waiting(MoveKind.READ)[0])
    driver.clear()
    driver.tick()
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
    assert engine.store(engine.chain(1, 5))
    assert driver.count(MoveKind.STORE) == 0, "the only slot is being read"
    driver.run()
    assert len(done(driver, engine, numbers)) == 7


def test_a_failed_read_is_told_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven wait for bytes that are bad: three are told at once, the others at Ticks; none gets
    them, and a lookup misses at once."""
    driver, engine, numbers = waiting(monkeypatch, 7, host_slots=4)
    driver.end(driver.waiting(MoveKind.READ)[0], MoveStatus.CORRUPT)
    assert engine.peek(engine.chain(1)) == 0
    ended = [len(done(driver, engine, numbers))]
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        ended.append(len(done(driver, engine, numbers)))
    assert ended[0] == 3
    assert ended[-1] == 7
    assert all(driver.completed(engine.workers[0], n).done == b"\0" for n in numbers)
    driver.run()
    assert driver.tier().pinned == 0


def test_a_session_that_is_lost_meanwhile_is_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its retrieves wait to be told when it is lost: nothing is copied into its memory after it is
    detached."""
    driver, engine, _ = waiting(monkeypatch, 10, host_slots=4, copy_depth=100)
    driver.end(driver.waiting(MoveKind.READ)[0])
    driver.close(engine.workers[0])
    while driver.moves or driver.service.next_tick_s(driver.now) == 0.0:
        driver.run()
        driver.tick()
    assert driver.detached == [engine.workers[0]]
    assert driver.tier().pinned == 0
