"""Transfers: lanes and their depths, priorities, turns by bytes, dropped jobs."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvariantError
from kvstore.core.layout import Part
from kvstore.core.messages import (
    MoveID,
    MoveKind,
    MoveStatus,
    SessionID,
    TierName,
)
from kvstore.core.slabs import Slab
from kvstore.core.transfers import STORES_FIRST_S, FairQueue
from tests.core.driver import Driver, limits
from tests.core.lanes import ONE, Lanes

TWO, THREE = SessionID(2), SessionID(3)


def test_each_lane_has_its_depth() -> None:
    """Of five jobs a kind no more go out than the lane's depth; copies are one lane, reads one,
    writes and erases one."""
    lanes = Lanes(copies=3, reads=2, writes=1)
    for kind in (MoveKind.STORE, MoveKind.READ, MoveKind.ERASE):
        lanes.push(kind, 5)
    out = lanes.out()
    assert [out.count(kind) for kind in MoveKind] == [3, 0, 2, 0, 1]
    assert lanes.out() == []
    assert (lanes.transfers.running(), lanes.transfers.queued()) == (6, 9)


def test_a_finished_move_makes_room_for_the_next_of_its_lane() -> None:
    """One out, one in, in the order of the queue."""
    lanes = Lanes(copies=1)
    first, second = lanes.push(MoveKind.STORE, 2)
    lanes.out()
    assert lanes.transfers.is_running(first.id)
    assert lanes.transfers.finish(first.id) is first
    assert lanes.out() == [MoveKind.STORE]
    assert lanes.transfers.is_running(second.id)


def test_loads_go_before_stores_that_were_there_first() -> None:
    """An engine waits for a retrieve before its next token; a store has time."""
    lanes = Lanes(copies=2)
    lanes.push(MoveKind.STORE, 2)
    lanes.push(MoveKind.LOAD, 1)
    assert lanes.out() == [MoveKind.LOAD, MoveKind.STORE]


def test_stores_never_keep_a_load_from_the_hands() -> None:
    """However many STOREs run, LOADs go out up to the depth, since the hands carry them out first;
    no STORE goes out beyond it."""
    lanes = Lanes(copies=2)
    lanes.push(MoveKind.STORE, 5)
    assert lanes.out() == [MoveKind.STORE] * 2
    lanes.push(MoveKind.LOAD, 5)
    assert lanes.out() == [MoveKind.LOAD] * 2
    assert lanes.out() == []


def test_no_write_goes_out_while_a_retrieve_is_queued_or_runs() -> None:
    """Field case 68, the core's part: with a READ running, one queued, or a LOAD, the backlog
    waits; when the last has ended it goes on."""
    lanes = Lanes(copies=1, reads=1, writes=2)
    lanes.backlog = [lanes.job(MoveKind.WRITE) for _ in range(3)]
    (read,) = lanes.push(MoveKind.READ)
    (load,) = lanes.push(MoveKind.LOAD)
    assert lanes.out() == [MoveKind.LOAD, MoveKind.READ]
    lanes.transfers.finish(read.id)
    assert lanes.out() == []
    lanes.transfers.finish(load.id)
    assert lanes.out() == [MoveKind.WRITE, MoveKind.WRITE]


def test_writes_wait_for_a_burst_of_stores_but_not_for_ever() -> None:
    """A prompt's STOREs are done before the first write; engines that store without a pause don't
    keep the backlog from the disk, and after a pause the next prompt goes first again."""
    lanes = Lanes(copies=1, writes=1)
    lanes.backlog = [lanes.job(MoveKind.WRITE) for _ in range(4)]
    first, second, third = lanes.push(MoveKind.STORE, 3)
    assert lanes.out() == [MoveKind.STORE]
    lanes.now = STORES_FIRST_S / 2
    lanes.transfers.finish(first.id)
    assert lanes.out() == [MoveKind.STORE]
    lanes.now = STORES_FIRST_S
    lanes.transfers.finish(second.id)
    assert lanes.out() == [MoveKind.STORE, MoveKind.WRITE]
    lanes.transfers.finish(third.id)
    assert lanes.out() == []
    lanes.push(MoveKind.STORE, 1)
    lanes.now += STORES_FIRST_S / 2
    assert lanes.out() == [MoveKind.STORE]


def test_writes_wait_until_a_store_was_answered() -> None:
    """The threads that write would take the cores from the engine that is being told."""
    lanes = Lanes(copies=1, writes=1, answer_first_s=STORES_FIRST_S / 4)
    lanes.backlog = [lanes.job(MoveKind.WRITE) for _ in range(4)]
    [first] = lanes.push(MoveKind.STORE, 1)
    lanes.out()
    lanes.now = STORES_FIRST_S / 2
    lanes.transfers.finish(first.id)
    assert lanes.out() == []
    assert lanes.transfers.held_until(lanes.now) == pytest.approx(STORES_FIRST_S * 3 / 4)
    lanes.now = STORES_FIRST_S
    assert lanes.transfers.held_until(lanes.now) is None
    assert lanes.out() == [MoveKind.WRITE]


@pytest.mark.parametrize("ended_s", [0.1 + i / 977 for i in range(40)])
def test_writes_go_out_at_the_time_that_they_wait_for(ended_s: float) -> None:
    """Rounding of that time mustn't cost a whole Tick more: it is what the core is woken at."""
    lanes = Lanes(copies=1, writes=1, answer_first_s=0.001)
    lanes.backlog = [lanes.job(MoveKind.WRITE)]
    lanes.now = ended_s - STORES_FIRST_S / 10
    [store] = lanes.push(MoveKind.STORE, 1)
    lanes.out()
    lanes.now = ended_s
    lanes.transfers.finish(store.id)
    assert lanes.out() == []
    held_s = lanes.transfers.held_until(lanes.now)
    assert held_s is not None
    lanes.now = held_s
    assert lanes.out() == [MoveKind.WRITE]


def test_nothing_wakes_the_core_for_writes_that_a_store_holds_back() -> None:
    """The STORE's end does, or the end of the time for which it comes first."""
    lanes = Lanes(copies=1, writes=1, answer_first_s=STORES_FIRST_S / 8)
    lanes.backlog = [lanes.job(MoveKind.WRITE)]
    lanes.push(MoveKind.STORE, 1)
    assert lanes.out() == [MoveKind.STORE]
    assert lanes.transfers.held_until(lanes.now) == STORES_FIRST_S
    lanes.now = STORES_FIRST_S
    assert lanes.transfers.held_until(lanes.now) is None
    assert lanes.out() == [MoveKind.WRITE]


def test_stores_with_short_pauses_do_not_keep_writes_back_for_ever() -> None:
    """Each pause is shorter than an answer takes: all of it counts as one burst."""
    lanes = Lanes(copies=1, writes=1, answer_first_s=STORES_FIRST_S / 4)
    lanes.backlog = [lanes.job(MoveKind.WRITE) for _ in range(4)]
    for eighth in range(8):
        [store] = lanes.push(MoveKind.STORE, 1)
        lanes.now = STORES_FIRST_S * eighth / 8
        assert lanes.out() == [MoveKind.STORE]
        lanes.transfers.finish(store.id)
        assert lanes.out() == []
    lanes.now = STORES_FIRST_S
    assert lanes.out() == [MoveKind.WRITE]


def test_a_tick_comes_when_writes_may_go_out() -> None:
    """Nothing else would wake the core: the engine has its answer and asks nothing."""
    driver = Driver(limits(nvme_slots=4, answer_first_s=0.002))
    driver.scanned()
    engine = driver.engine()
    engine.put(engine.chain(1))
    assert driver.count(MoveKind.WRITE) == 0
    assert driver.service.next_tick_s(driver.now) == pytest.approx(0.002)
    driver.tick(0.002)
    assert driver.count(MoveKind.WRITE) == 1
    driver.run()
    assert driver.service.next_tick_s(driver.now) > 0.1


def test_a_queued_read_that_cannot_land_holds_back_writes_but_no_copies() -> None:
    """No slot for the READ: the lane of copies goes on, the writes wait."""
    lanes = Lanes()
    lanes.can_land = False
    lanes.push(MoveKind.READ)
    lanes.push(MoveKind.STORE)
    lanes.backlog = [lanes.job(MoveKind.WRITE)]
    assert lanes.out() == [MoveKind.STORE]
    lanes.can_land = True
    assert lanes.out() == [MoveKind.READ]


def test_an_erase_does_not_wait_for_retrieves() -> None:
    """It keeps bad bytes from coming back, and is small."""
    lanes = Lanes()
    lanes.push(MoveKind.READ)
    lanes.push(MoveKind.ERASE, session=None)
    assert sorted(kind.value for kind in lanes.out()) == ["erase", "read"]


def test_a_dropped_job_never_goes_out() -> None:
    """The first of three is dropped: the others go; the lanes count right."""
    lanes = Lanes(copies=1)
    first, second, third = lanes.push(MoveKind.STORE, 3)
    lanes.transfers.drop(first)
    assert lanes.transfers.queued() == 2
    lanes.out()
    assert lanes.transfers.is_running(second.id)
    lanes.transfers.drop(third)
    lanes.transfers.finish(second.id)
    assert lanes.out() == []
    assert (lanes.transfers.running(), lanes.transfers.queued()) == (0, 0)


def test_dropped_reads_no_longer_hold_back_writes() -> None:
    """The retrieve that was queued is cancelled: a write may go."""
    lanes = Lanes()
    lanes.can_land = False
    (read,) = lanes.push(MoveKind.READ)
    lanes.backlog = [lanes.job(MoveKind.WRITE)]
    assert lanes.out() == []
    lanes.transfers.drop(read)
    assert lanes.out() == [MoveKind.WRITE]


def test_dropping_what_runs_and_finishing_what_waits_raise() -> None:
    """A running Move ends with its Moved only; a queued one can't have ended."""
    lanes = Lanes(copies=1)
    running, waiting = lanes.push(MoveKind.STORE, 2)
    lanes.out()
    with pytest.raises(InvariantError):
        lanes.transfers.drop(running)
    with pytest.raises(InvariantError):
        lanes.transfers.finish(waiting.id)
    lanes.transfers.finish(running.id)
    with pytest.raises(InvariantError):
        lanes.transfers.finish(running.id)


def test_a_queued_job_holds_its_slots() -> None:
    """From the moment that it is decided, nobody may take them."""
    lanes = Lanes()
    slot = Slab(TierName.HOST, 0, 4096, 1).make(0)
    slot.reserve(None, 0, Part.FULL, 4096)
    job = lanes.job(MoveKind.STORE, ONE)
    job.target = slot
    lanes.transfers.push(job)
    assert slot.holders == {job.id}
    assert lanes.transfers.queued_job(job.id) is job
    assert lanes.transfers.queued_job(MoveID(99)) is None


# ---------------------------------------------------------------- turns


def served(queue: FairQueue, count: int) -> list[SessionID | None]:
    """Whose jobs come next."""
    found = []
    for _ in range(count):
        job = queue.pop()
        assert job is not None
        found.append(job.session or job.turn)
    return found


def test_two_sessions_take_turns_by_bytes() -> None:
    """Session 1 queues eight jobs of 100 bytes before session 2 queues two of 400: by the time that
    800 bytes each have gone, both had the same, and neither waited for the other's whole queue."""
    lanes, queue = Lanes(), FairQueue()
    for _ in range(8):
        queue.push(lanes.job(MoveKind.LOAD, ONE, 100))
    for _ in range(2):
        queue.push(lanes.job(MoveKind.LOAD, TWO, 400))
    order = served(queue, 10)
    assert order.index(TWO) <= 1
    second = order.index(TWO, order.index(TWO) + 1)
    assert order[:second].count(ONE) in (4, 5)
    assert queue.pop() is None


def test_a_newcomer_has_no_debt_and_no_credit() -> None:
    """After session 1 was served long, session 2 comes: they alternate from there on, the newcomer
    doesn't catch up first."""
    lanes, queue = Lanes(), FairQueue()
    for _ in range(20):
        queue.push(lanes.job(MoveKind.LOAD, ONE))
    served(queue, 10)
    for _ in range(5):
        queue.push(lanes.job(MoveKind.LOAD, TWO))
    order = served(queue, 8)
    assert order.count(TWO) == 4
    assert order[:2].count(TWO) == 1


def test_reads_take_the_turn_of_the_session_that_asked() -> None:
    """A READ uses no session's memory, but it is somebody's turn all the same."""
    lanes, queue = Lanes(), FairQueue()
    for _ in range(4):
        queue.push(lanes.job(MoveKind.READ, turn=ONE))
    queue.push(lanes.job(MoveKind.READ, turn=TWO))
    assert TWO in served(queue, 2)


def test_dropped_jobs_take_no_turn_and_leave_no_session_behind() -> None:
    """All of session 1's jobs are dropped: session 2 is served, and the length is right."""
    lanes, queue = Lanes(), FairQueue()
    jobs = [lanes.job(MoveKind.LOAD, ONE) for _ in range(3)]
    for job in jobs:
        queue.push(job)
    queue.push(lanes.job(MoveKind.LOAD, TWO))
    for job in jobs:
        queue.drop(job)
    assert len(queue) == 1
    assert served(queue, 1) == [TWO]
    assert len(queue) == 0
    assert queue.head() is None


def test_one_session_is_in_order() -> None:
    """A session's own jobs go out in the order in which it asked."""
    lanes, queue = Lanes(), FairQueue()
    jobs = [lanes.job(MoveKind.LOAD, ONE, 100 + place) for place in range(5)]
    for job in jobs:
        queue.push(job)
    assert [queue.pop() for _ in jobs] == jobs


# ---------------------------------------------------------------- through the service


def test_an_engine_with_a_long_retrieve_does_not_starve_another() -> None:
    """Engine 1 asks for eight chunks, then engine 2 for four: with one LOAD at a time they take
    turns, so engine 2 is through after its fourth turn, not after engine 1."""
    driver = Driver(limits(host_slots=16, copy_depth=1))
    one, two = driver.engine("e1"), driver.engine("e2")
    one.put(one.chain(8))
    two.put(two.chain(4, 1))
    driver.handed_out.clear()
    one.retrieve(one.chain(8))
    number = two.retrieve(two.chain(4, 1))
    while driver.is_open(two.workers[0], number):
        driver.end(driver.moves[0])
    sessions = [move.session for move in driver.handed_out]
    assert sessions.count(one.workers[0]) <= 5
    driver.run()


def test_a_move_that_fails_frees_its_lane() -> None:
    """Field case 42: the third of ten writes fails: the others go on, nothing stays queued."""
    driver = Driver(limits(host_slots=10, nvme_slots=16, write_depth=1))
    driver.scanned()
    engine = driver.engine()
    for seed in range(10):
        engine.store(engine.chain(1, seed))
    driver.run(MoveKind.STORE)
    for place in range(10):
        (write,) = driver.waiting(MoveKind.WRITE)
        driver.end(write, MoveStatus.FAILED if place == 2 else MoveStatus.OK)
    assert driver.tier(TierName.NVME).chunks == 9
    assert driver.drops("nvme_write_failed") == 1
    assert driver.service.idle()
