"""Works that one event only begins: commits, failures, cancels, room and lost leases in steps.

Each constant that bounds an event is made tiny, so that what takes a million chunks otherwise shows
with a dozen: nothing is lost, nothing hangs, and no event does more than its share.
"""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest

from kvstore.core import cancelling, leases, room, tree, writing
from kvstore.core.candidates import Candidates
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import MoveKind, MoveStatus, TierName
from kvstore.core.service import Service
from kvstore.core.tree_nodes import Copy
from tests.core.driver import BLOCK_BYTES, Driver, Engine, layout, limits


def finish(driver: Driver) -> int:
    """Ticks until nothing goes on any more; returns how many."""
    ticks = 0
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        ticks += 1
    return ticks


def ready_chunks(driver: Driver, engine: Engine, chunks: int) -> int:
    """How many of a chain a lookup sees."""
    return engine.peek(engine.chain(chunks))


def test_what_waited_for_its_parent_commits_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve chunks have landed before their root: it commits, and three an event follow."""
    monkeypatch.setattr(tree, "STEP_COPIES", 3)
    driver = Driver(limits(host_slots=16, copy_depth=16))
    engine = driver.engine()
    number = engine.store(engine.chain(13))
    root, *others = driver.waiting(MoveKind.STORE)
    for move in others:
        driver.end(move)
    driver.end(root)
    seen = [ready_chunks(driver, engine, 13)]
    assert seen[0] < 13
    assert driver.is_open(engine.workers[0], number)
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        seen.append(ready_chunks(driver, engine, 13))
    assert seen[-1] == 13
    assert max(after - before for before, after in pairwise(seen)) <= 9
    assert driver.completed(engine.workers[0], number).done == b"\1" * 13


def test_what_hangs_on_a_failed_store_fails_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's STORE fails: the twelve below it follow three an event, each counted once; the
    same prompt can be stored again meanwhile, and hits."""
    monkeypatch.setattr(tree, "STEP_COPIES", 3)
    driver = Driver(limits(host_slots=32, copy_depth=1))
    engine = driver.engine()
    number = engine.store(engine.chain(13))
    driver.end(driver.moves[0], MoveStatus.FAILED)
    assert driver.service.next_tick_s(driver.now) == 0.0
    again = engine.store(engine.chain(2))
    assert finish(driver) >= 2
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\0" * 13
    assert driver.drops("store_failed") == 1
    assert driver.drops("parent_lost") >= 11
    assert len(driver.completed(engine.workers[0], again).done) == 2
    assert engine.put(engine.chain(13)) == b"\1" * 13


@pytest.mark.parametrize("parts", [1, 3])
def test_a_lost_session_is_let_go_in_steps(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and stores are queued, some run: so many an event are stopped, then, once the running
    Moves have ended, the session is detached; no slot is held and nothing was committed."""
    monkeypatch.setattr(cancelling, "STEP_PARTS", parts)
    driver = Driver(limits(host_slots=8, nvme_slots=32, copy_depth=1, read_depth=1))
    driver.scanned()
    engine = driver.engine()
    engine.put(engine.chain(8))
    engine.put(engine.chain(8, 1))
    driver.run()
    engine.retrieve(engine.chain(8))
    engine.store(engine.chain(4, 2))
    held = driver.stats().moves_queued
    assert held > 6
    driver.close(engine.workers[0])
    queued = [driver.stats().moves_queued]
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        queued.append(driver.stats().moves_queued)
    assert max(before - after for before, after in pairwise(queued)) <= parts
    assert driver.detached == []
    driver.run()
    finish(driver)
    assert driver.detached == [engine.workers[0]]
    assert sum(tier.pinned for tier in driver.stats().tiers) == 0
    assert driver.service.idle()


def test_a_store_that_is_being_cancelled_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancel has reached the tail only when the head's STORE ends well: it isn't committed."""
    monkeypatch.setattr(cancelling, "STEP_PARTS", 1)
    driver = Driver(limits(host_slots=8, copy_depth=1))
    engine = driver.engine()
    number = engine.store(engine.chain(6))
    engine.cancel(number)
    driver.end(driver.moves[0])
    finish(driver)
    driver.run()
    finish(driver)
    assert driver.completed(engine.workers[0], number).cancelled
    assert engine.peek(engine.chain(6)) == 0
    assert driver.tier().slots_used == 0


def test_leases_of_a_lost_engine_end_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six leases, two an event; they answer nothing from the start."""
    monkeypatch.setattr(leases, "STEP_LEASES", 2)
    driver = Driver(limits(host_slots=8))
    engine, other = driver.engine("e1"), driver.engine("e2")
    engine.put(engine.chain(1))
    for number in range(6):
        assert engine.lookup(engine.chain(1), f"r{number}") == 1
    driver.close(engine.workers[0])
    counts = [driver.stats().leases]
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        counts.append(driver.stats().leases)
    assert counts == [4, 2, 0, 0][: len(counts)]
    assert counts[-1] == 0
    assert other.peek(other.chain(1)) == 1


def test_leases_keep_so_many_bytes_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit those whose deadline is next end early."""
    monkeypatch.setattr(leases, "LEASE_BYTES_MAX", 10 * 32)
    driver = Driver(limits(host_slots=8))
    engine = driver.engine()
    engine.put(engine.chain(4))
    for number in range(5):
        assert engine.lookup(engine.chain(4), f"r{number}") == 4
    assert driver.stats().leases == 2


# ---------------------------------------------------------------- room


def test_no_store_is_refused_for_candidates_that_may_not_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six of eight chunks are leased and come up first; two looks an event don't find one that may
    leave. The store waits for the next events rather than being refused."""
    monkeypatch.setattr(room, "STEP_COPIES", 2)
    driver = Driver(limits(host_slots=8))
    engine = driver.engine()
    for seed in range(8):
        engine.put(engine.chain(1, seed))
    for seed in range(6):
        assert engine.lookup(engine.chain(1, seed), f"r{seed}") == 1
    looked = set()
    evictable = Candidates.evictable

    def look(self: Candidates, copy: Copy) -> bool:
        looked.add(copy.key)
        return evictable(self, copy)

    with monkeypatch.context() as patch:
        patch.setattr(Candidates, "evictable", look)
        number = engine.store(engine.chain(2, 50))
    assert len(looked) <= 6
    finish(driver)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1"
    assert [engine.peek(engine.chain(1, seed)) for seed in range(8)] == [1] * 6 + [0, 0]
    assert driver.drops("host_full") == 0


def test_nothing_used_again_leaves_while_colder_chunks_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 40 chunks the older 30 were used again. Two chunks are stored with four looks an event:
    the stores wait for the next events until those are passed over, and the oldest of the ten that
    weren't used leave."""
    monkeypatch.setattr(room, "STEP_COPIES", 4)
    driver = Driver(limits(host_slots=40))
    engine = driver.engine()
    for seed in range(40):
        engine.put(engine.chain(1, seed))
    for seed in reversed(range(30)):
        engine.peek(engine.chain(1, seed))
    number = engine.store(engine.chain(2, 99))
    assert driver.tier().evictions == 0
    finish(driver)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1"
    gone = [seed for seed in range(40) if not engine.peek(engine.chain(1, seed))]
    assert gone == [30, 31]


def test_a_slab_is_reclaimed_in_steps_unless_a_lease_comes_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two chunks an event leave the slab that the other model needs. A lookup that comes first
    keeps what is left of it; without one the store is kept, and nothing is refused."""
    monkeypatch.setattr(room, "STEP_COPIES", 2)
    for leased in (False, True):
        driver = Driver(Limits(host=TierLimits(1, 8 * BLOCK_BYTES)))
        small, large = driver.engine("small"), driver.engine("large", shape=layout(2))
        for seed in range(8):
            small.put(small.chain(1, seed))
        number = large.store(large.chain(1))
        left = [seed for seed in range(8) if small.peek(small.chain(1, seed))]
        assert len(left) >= 4
        if leased:
            assert small.lookup(small.chain(1, left[-1]), "kept") == 1
        finish(driver)
        driver.run()
        assert driver.completed(large.workers[0], number).done == (b"\0" if leased else b"\1")
        assert small.peek(small.chain(1, left[-1])) == leased
        if leased:
            small.release("kept")
            assert small.put(small.chain(2, 60)) == b"\1\1"


def test_stale_backlog_is_passed_over_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six writes wait when their namespace is cleared: two an event are passed over, each counted,
    and the write behind them is found."""
    monkeypatch.setattr(writing, "LOOKS", 2)
    driver = Driver(limits(host_slots=16, nvme_slots=16, write_depth=1))
    gone, stay = driver.engine("e1", tenant="t1"), driver.engine("e2", tenant="t2")
    gone.put(gone.chain(6))
    stay.put(stay.chain(1))
    driver.clear(tenant="t1")
    driver.scanned()
    finish(driver)
    driver.run()
    assert driver.stats().write_backlog == 0
    assert driver.tier(TierName.NVME).chunks == 1


def test_a_long_chain_that_is_not_written_is_not_climbed_for_each_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More is missing above a chunk than one event brings up: the chunk is left, and counted, until
    the prompt is stored again."""
    monkeypatch.setattr(writing, "CLIMB_MAX", 3)
    driver = Driver(limits(host_slots=16, nvme_slots=16, write_backlog_max=1))
    engine = driver.engine()
    engine.put(engine.chain(8))
    assert driver.drops("nvme_parent_missing") > 0
    driver.scanned()
    driver.run()
    for _ in range(8):
        driver.tick(2.0)
        engine.put(engine.chain(8))
        driver.run()
    assert driver.tier(TierName.NVME).chunks == 8


# ---------------------------------------------------------------- garbage


def test_nothing_leaks_by_cycles() -> None:
    """The daemon runs without cyclic collection: after stores, hits, reads, failures, cancels, lost
    sessions, clears, two sizes in turn and a doomed chain, a collection finds nothing of ours."""
    gc.collect()
    gc.disable()
    try:
        driver = Driver(
            Limits(host=TierLimits(1, 8 * BLOCK_BYTES), nvme=TierLimits(2, 16 * BLOCK_BYTES))
        )
        driver.scanned()
        for turn in range(3):
            live_through(driver, turn)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        ours = [thing for thing in gc.garbage if type(thing).__module__.startswith("kvstore")]
        assert [type(thing).__name__ for thing in ours] == []
        assert isinstance(driver.service, Service)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def live_through(driver: Driver, turn: int) -> None:
    """A bit of everything."""
    small = driver.engine(f"small{turn}", shape=layout(window=16))
    large = driver.engine(f"large{turn}", shape=layout(2))
    for seed in range(6):
        small.put(small.chain(4, seed))
        large.put(large.chain(3, seed))
    number = small.store(small.chain(4, 100 + turn))
    small.cancel(number)
    driver.run()
    large.lookup(large.chain(3, 5), "leased")
    large.retrieve(large.chain(3, 0))
    for move in driver.waiting(MoveKind.READ):
        driver.end(move, MoveStatus.CORRUPT)
    driver.run()
    small.store(small.chain(4, 200 + turn))
    driver.end(driver.moves[0], MoveStatus.FAILED)
    small.retrieve(small.chain(2, 5))
    driver.close(small.workers[0])
    driver.run()
    driver.clear()
    driver.run()
    for session in (*large.workers, large.scheduler, small.scheduler):
        driver.close(session)
    for _ in range(20):
        driver.tick()
    driver.replies.clear()
    driver.handed_out.clear()
