"""Whose turn it is: long requests of several sessions, refused writes, and the same run twice."""

from __future__ import annotations

import random

import pytest

from kvstore.core import batches
from kvstore.core.messages import MoveKind, MoveStatus, Reply, TierName
from tests.core.driver import BLOCK_BYTES, Driver, limits


def test_a_retrieve_does_not_wait_for_its_sessions_long_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two chunks are begun at a time; a store of eight is under way when its engine retrieves one:
    the LOAD goes out before any Tick, as an engine waits for it."""
    monkeypatch.setattr(batches, "STEP_CHUNKS", 2)
    driver = Driver(limits(host_slots=16, copy_depth=16))
    engine = driver.engine()
    engine.put(engine.chain(1, 5))
    engine.store(engine.chain(8))
    number = engine.retrieve(engine.chain(1, 5))
    driver.run(MoveKind.LOAD)
    assert driver.completed(engine.workers[0], number).done == b"\1"
    assert driver.count(MoveKind.STORE) == 3


def test_long_requests_of_two_sessions_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Tick begins two chunks, of one session and then of the other; neither is through before
    the other one has begun."""
    monkeypatch.setattr(batches, "STEP_CHUNKS", 2)
    driver = Driver(limits(host_slots=32, copy_depth=32))
    one, two = driver.engine("e1"), driver.engine("e2")
    one.store(one.chain(10))
    two.store(two.chain(10, 1))
    for _ in range(4):
        driver.tick()
    begun = [move.session for move in driver.handed_out]
    assert begun.count(one.workers[0]) == begun.count(two.workers[0]) == 6
    for _ in range(4):
        driver.tick()
    driver.run()
    assert driver.tier().chunks == 20


def test_a_refused_write_is_not_tried_again_at_once_but_later() -> None:
    """The byte budget refuses a chunk. Stores of it and of its child within the next second bring
    neither up again (a long chain would, chunk by chunk); a second later both are written."""
    driver = Driver(
        limits(host_slots=8, nvme_slots=8, write_budget_bytes_s=8 * BLOCK_BYTES, write_burst_s=0.25)
    )
    driver.scanned()
    engine = driver.engine()
    for seed in range(2):
        engine.put(engine.chain(1, 10 + seed))
    keys = engine.chain(2)
    engine.put(keys[:1])
    assert driver.drops("nvme_budget") == 1
    driver.tick(0.5)
    engine.put(keys[:1])
    assert driver.count(MoveKind.WRITE) == 2
    engine.put(keys)
    assert driver.count(MoveKind.WRITE) == 2
    driver.tick(1.5)
    engine.put(keys)
    assert driver.tier(TierName.NVME).chunks == 4


def one_run(seed: int) -> tuple[list[object], list[Reply]]:
    """A run of random events over two engines: all Moves and all replies, in order."""
    rng = random.Random(seed)
    driver = Driver(limits(host_slots=4, nvme_slots=8, read_depth=1, copy_depth=2))
    driver.scanned()
    engines = [driver.engine("e1"), driver.engine("e2")]
    open_transfers = []
    for _ in range(150):
        rank = rng.randrange(2)
        engine = engines[rank]
        keys = engine.chain(rng.randint(1, 3), rng.randint(0, 4), shared=rng.randint(0, 1))
        draw = rng.random()
        if draw < 0.2:
            open_transfers.append((engine, engine.store(keys)))
        elif draw < 0.45:
            open_transfers.append((engine, engine.retrieve(keys)))
        elif draw < 0.55:
            engine.lookup(keys)
        elif draw < 0.6 and open_transfers:
            who, number = rng.choice(open_transfers)
            who.cancel(number)
        elif draw < 0.63:
            driver.tick(1.0)
        elif driver.moves:
            status = MoveStatus.FAILED if rng.random() < 0.1 else MoveStatus.OK
            driver.end(rng.choice(driver.moves), status)
    driver.run()
    return list(driver.handed_out), driver.replies


@pytest.mark.parametrize("seed", range(5))
def test_the_same_events_give_the_same_effects(seed: int) -> None:
    """The core is a function of its events: no address, hash or order of a set shows in what it
    decides, so a failure of the simulator replays from its seed."""
    assert one_run(seed) == one_run(seed)
