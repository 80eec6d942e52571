"""Long requests are begun in steps; chains that can't be written aren't brought up for ever."""

from __future__ import annotations

from kvstore.core.batches import STEP_CHUNKS
from kvstore.core.messages import MoveKind, Refused, TierName
from tests.core.driver import Driver, limits

LONG = 3 * STEP_CHUNKS + 10


def finish(driver: Driver) -> None:
    """Carry everything out, and all that goes on at Ticks."""
    driver.run()
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        driver.run()


def test_a_long_store_is_begun_in_steps_and_ends_whole() -> None:
    """No event begins more than a step; a Tick is wanted at once until all is begun."""
    driver = Driver(limits(host_slots=LONG))
    engine = driver.engine()
    number = engine.store(engine.chain(LONG))
    begun = [driver.tier(TierName.HOST).slots_used]
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        begun.append(driver.tier(TierName.HOST).slots_used)
    assert begun == [STEP_CHUNKS, 2 * STEP_CHUNKS, 3 * STEP_CHUNKS, LONG]
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1" * LONG
    assert driver.service.idle()


def test_another_session_is_served_between_the_steps() -> None:
    """Its store begins and ends while the long one is under way."""
    driver = Driver(limits(host_slots=2 * LONG))
    long, short = driver.engine("e1"), driver.engine("e2")
    number = long.store(long.chain(LONG))
    other = short.store(short.chain(2, 7))
    driver.run()
    assert driver.completed(short.workers[0], other).done == b"\1\1"
    assert driver.is_open(long.workers[0], number)
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        driver.run()
    assert driver.completed(long.workers[0], number).done == b"\1" * LONG


def test_a_sessions_requests_begin_in_order() -> None:
    """The next store's first chunk hangs on the long one's last: it waits for its turn."""
    driver = Driver(limits(host_slots=LONG + 2))
    engine = driver.engine()
    chain = engine.chain(LONG + 2)
    first, second = engine.store(chain[:LONG]), engine.store(chain[LONG:])
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
    driver.run()
    assert driver.completed(engine.workers[0], first).done == b"\1" * LONG
    assert driver.completed(engine.workers[0], second).done == b"\1\1"


def test_a_long_store_that_is_cancelled_begins_nothing_more() -> None:
    """What was begun ends as ever, the rest isn't done, and the acknowledgement comes once."""
    driver = Driver(limits(host_slots=LONG))
    engine = driver.engine()
    number = engine.store(engine.chain(LONG))
    engine.cancel(number)
    finish(driver)
    assert driver.completed(engine.workers[0], number).cancelled
    assert driver.completed(engine.workers[0], number).done == b"\0" * LONG
    assert driver.service.idle()


def test_a_session_that_is_lost_during_a_long_retrieve_is_detached() -> None:
    """Nothing of it is begun any more."""
    driver = Driver(limits(host_slots=LONG))
    engine = driver.engine()
    chain = engine.chain(LONG)
    engine.store(chain)
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
    driver.run()
    engine.retrieve(chain)
    driver.close(engine.workers[0])
    finish(driver)
    assert driver.detached == [engine.workers[0]]
    assert driver.service.idle()


def test_a_chain_that_does_not_fit_nvme_is_refused_once_a_chunk() -> None:
    """NVMe has four places, the chain has forty chunks: each chunk is counted once, and doesn't
    bring up all those above it again."""
    driver = Driver(limits(host_slots=40, nvme_slots=4))
    driver.scanned()
    engine = driver.engine()
    engine.store(engine.chain(40))
    while driver.moves:
        for move in driver.waiting(MoveKind.STORE)[:1]:
            driver.end(move)
        driver.run(MoveKind.WRITE)
    assert driver.tier(TierName.NVME).chunks == 4
    assert driver.drops("nvme_full") + driver.drops("nvme_parent_missing") <= 40


def test_a_session_may_have_so_many_transfers_in_flight() -> None:
    """Beyond the limit a transfer is refused at once; one that ends makes room."""
    driver = Driver(limits(host_slots=4, transfers_max=2))
    engine = driver.engine()
    for seed in (1, 2):
        engine.store(engine.chain(1, seed))
    third = engine.store(engine.chain(1, 3))
    refused = driver.answer(engine.workers[0], third)
    assert refused == Refused("2 transfers of this session are in flight, which is the limit")
    driver.run()
    assert engine.put(engine.chain(1, 3)) == b"\1"
