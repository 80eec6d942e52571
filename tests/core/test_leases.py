"""Leases: what a lookup promises, for how long, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.keys import KEY_BYTES, Namespace
from kvstore.core.layout import Shard
from kvstore.core.leases import Lease, Leases, asked
from kvstore.core.messages import (
    EngineState,
    MoveKind,
    MoveStatus,
    Register,
    SetRevision,
    SpaceRecord,
    TierName,
)
from kvstore.core.spaces import Space
from tests.core.driver import MODEL, Driver, Engine, limits

NVME = TierName.NVME


def ready(**settings: Any) -> tuple[Driver, Engine]:
    """A driver with four host slots and an engine."""
    driver = Driver(limits(**settings))
    return driver, driver.engine()


def squeeze(engine: Engine, seed: int = 50) -> int:
    """Store four other chunks; returns how many found a place."""
    return engine.put(engine.chain(4, seed)).count(1)


# ---------------------------------------------------------------- presence


def test_a_leased_hit_stays_until_its_release() -> None:
    """Four slots, a hit of three leased: only one slot is to be had; after the release all are."""
    driver, engine = ready()
    keys = engine.chain(3)
    engine.put(keys)
    assert engine.lookup(keys) == 3
    assert squeeze(engine) == 1
    assert engine.lookup(keys) == 3
    engine.release()
    assert squeeze(engine, 60) == 4
    assert engine.lookup(keys) == 0
    assert driver.stats().leases == 0


def test_a_lease_of_a_partial_hit_protects_what_was_hit_only() -> None:
    """The lookup of another prompt hits the shared head of two; the tail of two may leave."""
    _, engine = ready()
    engine.put(engine.chain(4, seed=1, shared=2))
    assert engine.lookup(engine.chain(4, seed=2, shared=2)) == 2
    assert squeeze(engine) == 2
    assert engine.peek(engine.chain(4, seed=1, shared=2)) == 2


def test_a_lease_pins_the_deepest_chunk_of_each_tier() -> None:
    """[0, 2) in the host, [2, 4) on an NVMe of four slots: neither tier gives its part up."""
    driver = Driver(limits(host_slots=4, nvme_slots=4))
    driver.scanned()
    engine = driver.engine()
    keys = engine.chain(4)
    engine.put(keys)
    tree = driver.service._state.directory.host
    for place in (3, 2):
        copy = tree.find(driver.service._state.spaces.all()[0], keys[place])
        assert copy is not None
        tree.doom(copy)
    assert engine.lookup(keys) == 4
    assert squeeze(engine) == 2
    assert driver.tier(NVME).chunks == 4
    assert driver.drops("nvme_full") > 0
    assert engine.get(keys) == b"\1\1\1\1"


def test_a_lease_expires_without_a_release() -> None:
    """Field case 46: a request that is never heard of again: at its deadline, on a Tick, all is
    evictable."""
    driver, engine = ready(lease_s=10.0)
    keys = engine.chain(4)
    engine.put(keys)
    engine.lookup(keys)
    driver.tick(9.0)
    assert squeeze(engine) == 0
    driver.tick(2.0)
    assert driver.stats().leases == 0
    assert squeeze(engine, 60) == 4


def test_each_repeat_renews_the_lease() -> None:
    """Looked up again after 8 s of 10, the lease is there after 16 s and gone after 19."""
    driver, engine = ready(lease_s=10.0)
    keys = engine.chain(1)
    engine.put(keys)
    engine.lookup(keys)
    driver.tick(8.0)
    engine.lookup(keys)
    driver.tick(8.0)
    assert driver.stats().leases == 1
    driver.tick(3.0)
    assert driver.stats().leases == 0


def test_leases_expire_in_the_order_of_their_deadlines_not_of_their_start() -> None:
    """The older request renews: the younger one's lease ends first."""
    driver, engine = ready(lease_s=10.0)
    engine.put(engine.chain(1, 1))
    engine.put(engine.chain(1, 2))
    engine.lookup(engine.chain(1, 1), "old")
    driver.tick(1.0)
    engine.lookup(engine.chain(1, 2), "young")
    driver.tick(5.0)
    engine.lookup(engine.chain(1, 1), "old")
    driver.tick(5.5)
    assert driver.stats().leases == 1
    assert squeeze(engine) == 3
    assert engine.peek(engine.chain(1, 1)) == 1


def test_beyond_the_limit_the_lease_with_the_next_deadline_ends_early() -> None:
    """Two leases at most: the third lookup ends the first one's."""
    driver, engine = ready(leases_max=2)
    for seed in range(3):
        engine.put(engine.chain(1, seed))
        engine.lookup(engine.chain(1, seed), f"r{seed}")
    assert driver.stats().leases == 2
    assert squeeze(engine) == 2
    assert engine.peek(engine.chain(1, 0)) == 0


def test_two_requests_lease_the_same_chunk_each_for_itself() -> None:
    """The release of one leaves the other's protection."""
    _, engine = ready()
    keys = engine.chain(4)
    engine.put(keys)
    engine.lookup(keys, "a")
    engine.lookup(keys, "b")
    engine.release("a")
    assert squeeze(engine) == 0
    engine.release("b")
    assert squeeze(engine) == 4


def test_a_release_of_nothing_and_a_second_release_are_answered() -> None:
    """Field case 47: the end of a request is idempotent, in whatever state it is."""
    driver, engine = ready()
    engine.release("never seen")
    engine.put(engine.chain(1))
    engine.lookup(engine.chain(1))
    engine.release()
    engine.release()
    assert driver.stats().leases == 0


@pytest.mark.parametrize("release", [True, False], ids=["released", "expired"])
def test_lookups_without_loads_pin_nothing_in_the_end(release: bool) -> None:
    """Field case 46: requests that look up and never load: pinned = 0, and a fill evicts all."""
    driver, engine = ready()
    keys = engine.chain(4)
    engine.put(keys)
    for number in range(200):
        assert engine.lookup(keys[: 1 + number % 4], f"r{number}") == 1 + number % 4
    for number in range(200):
        if release:
            engine.release(f"r{number}")
    driver.tick(3600.0)
    assert driver.stats().leases == 0
    assert driver.tier().pinned == 0
    assert squeeze(engine) == 4


# ---------------------------------------------------------------- the same answer


def test_the_same_keys_get_the_same_answer_though_more_has_come() -> None:
    """A scheduler that asks on every step sees one number: 2, though 4 are there by now; released
    and asked anew it sees 4."""
    _, engine = ready()
    keys = engine.chain(4)
    engine.put(keys[:2])
    assert engine.lookup(keys) == 2
    engine.put(keys)
    assert engine.lookup(keys) == 2
    engine.release()
    assert engine.lookup(keys) == 4


def test_a_miss_is_no_promise() -> None:
    """Nothing was found; what another request stores next is found by the very same lookup."""
    driver, engine = ready()
    keys = engine.chain(2)
    assert engine.lookup(keys) == 0
    assert driver.stats().leases == 0
    engine.put(keys)
    assert engine.lookup(keys) == 2


def test_other_keys_replace_the_lease() -> None:
    """The request goes on with a longer prompt, and with a shorter one: the answer is that of the
    keys asked for, and the former pins are gone."""
    driver, engine = ready()
    keys = engine.chain(4)
    engine.put(keys)
    assert engine.lookup(keys[:1]) == 1
    assert engine.lookup(keys) == 4
    assert engine.lookup(keys[:2]) == 2
    assert driver.stats().leases == 1
    assert squeeze(engine) == 2
    assert engine.lookup(keys) == 2


def test_another_request_of_the_same_name_on_another_engine_is_another_lease() -> None:
    """Request IDs are an engine's own: neither engine ends the other one's lease."""
    _, engine = ready()
    other = engine.driver.engine("e2")
    keys = engine.chain(4)
    engine.put(keys)
    assert (engine.lookup(keys), other.lookup(keys)) == (4, 4)
    other.release()
    assert squeeze(engine) == 0


def test_a_worker_looks_up_for_the_same_request_as_the_scheduler() -> None:
    """One lease an engine and request, whichever session asks."""
    driver, engine = ready()
    keys = engine.chain(1)
    engine.put(keys)
    engine.lookup(keys)
    engine.scheduler = engine.workers[0]
    engine.lookup(keys)
    assert driver.stats().leases == 1
    engine.release()
    assert driver.stats().leases == 0


# ---------------------------------------------------------------- how it ends


def test_a_failed_retrieve_cuts_the_answer() -> None:
    """The lookup said 3; chunk 1's LOAD failed: the same lookup says 1 now, so that the engine
    recomputes instead of trying for ever."""
    driver, engine = ready()
    keys = engine.chain(3)
    engine.put(keys)
    engine.lookup(keys)
    engine.retrieve(keys)
    driver.end(driver.moves[1], MoveStatus.FAILED)
    driver.run()
    assert engine.lookup(keys) == 1


def test_a_failure_of_another_request_cuts_its_own_answer_only() -> None:
    """Request "b" fails a LOAD; "a" keeps its answer, as the chunk itself is good."""
    driver, engine = ready()
    keys = engine.chain(2)
    engine.put(keys)
    engine.lookup(keys, "a")
    engine.lookup(keys, "b")
    engine.retrieve(keys, request="b")
    driver.end(driver.moves[0], MoveStatus.FAILED)
    driver.run()
    assert engine.lookup(keys, "a") == 2
    assert engine.lookup(keys, "b") == 0


def test_an_expired_lease_is_at_worst_a_miss() -> None:
    """The hit was leased, the lease ran out, the chunks left: the retrieve says so, and the next
    lookup too."""
    driver, engine = ready(lease_s=10.0)
    keys = engine.chain(2)
    engine.put(keys)
    engine.lookup(keys)
    driver.tick(11.0)
    squeeze(engine)
    assert engine.get(keys) == b"\0\0"
    assert engine.lookup(keys) == 0


def test_the_loss_of_a_worker_ends_the_engines_leases() -> None:
    """Nobody will retrieve; another engine's leases stay."""
    driver, engine = ready()
    other = driver.engine("e2")
    engine.put(engine.chain(2))
    engine.put(engine.chain(2, 1))
    engine.lookup(engine.chain(2))
    other.lookup(engine.chain(2, 1))
    driver.close(engine.workers[0])
    assert driver.stats().leases == 1
    assert squeeze(other) == 2


def test_the_loss_of_the_last_session_ends_the_engines_leases() -> None:
    """The worker went first, then the scheduler."""
    driver, engine = ready()
    engine.put(engine.chain(1))
    driver.close(engine.workers[0])
    driver.close(engine.scheduler)
    assert driver.stats().leases == 0
    assert driver.stats().engines == ()


def test_the_loss_of_a_scheduler_leaves_the_leases_to_their_deadline() -> None:
    """It reconnects and asks again; its requests go on."""
    driver, engine = ready(lease_s=10.0)
    keys = engine.chain(1)
    engine.put(keys)
    engine.lookup(keys)
    driver.close(engine.scheduler)
    assert driver.stats().leases == 1
    driver.tick(11.0)
    assert driver.stats().leases == 0


def test_a_new_revision_ends_the_engines_leases() -> None:
    """Field case 12: the promise was for the old weights: the very same keys miss now, though they
    were leased, and their chunks may leave."""
    driver, engine = ready()
    keys = engine.chain(4)
    engine.put(keys)
    assert engine.lookup(keys) == 4
    state = driver.ask(engine.workers[0], SetRevision("r2"))
    assert isinstance(state, EngineState)
    assert engine.lookup(keys) == 0
    assert driver.stats().leases == 0
    engine.digest = state.namespace
    assert squeeze(engine) == 4


def test_a_lease_outlives_the_loss_of_the_copy_that_it_pins() -> None:
    """The bytes of the pinned chunk turn out bad: its copy is doomed under the lease; the answer
    is cut, and ending the lease harms nothing."""
    driver = Driver(limits(nvme_slots=8))
    driver.scanned()
    engine = driver.engine()
    keys = engine.chain(2)
    engine.put(keys)
    for seed in range(4):
        engine.put(engine.chain(1, 9 + seed))
    assert engine.lookup(keys, "a") == engine.lookup(keys, "b") == 2
    engine.retrieve(keys, request="a")
    driver.end(next(m for m in driver.moves if m.header.key == keys[1]), MoveStatus.CORRUPT)
    driver.run()
    assert engine.lookup(keys, "a") == 1
    assert engine.lookup(keys, "b") == 1
    driver.tick(3600.0)
    assert driver.stats().leases == 0
    assert driver.count(MoveKind.ERASE) == 1


def test_a_registration_under_the_same_name_begins_without_leases() -> None:
    """The engine restarts: its former requests mean nothing to it."""
    driver, engine = ready()
    keys = engine.chain(1)
    engine.put(keys)
    engine.lookup(keys)
    driver.close(engine.workers[0])
    session = driver.session()
    namespace = Namespace(MODEL.model, MODEL.revision, MODEL.format)
    driver.ask(session, Register("e1", "t1", namespace, engine.layout, Shard()))
    assert driver.stats().leases == 0
    assert engine.lookup(keys) == 1


def test_a_retrieve_that_misses_cuts_its_own_lease() -> None:
    """Requests "a" and "b" were promised three chunks. "a" finds chunk 1 bad; "b", whose pinned
    chunk lies below and isn't swept yet, retrieves in vain, and is told 1 from then on."""
    driver = Driver(limits(nvme_slots=8))
    driver.scanned()
    engine = driver.engine()
    keys = engine.chain(3)
    engine.put(keys)
    for seed in range(4):
        engine.put(engine.chain(1, 9 + seed))
    assert engine.lookup(keys, "a") == engine.lookup(keys, "b") == 3
    engine.retrieve(keys[:2], request="a")
    driver.end(next(m for m in driver.moves if m.header.key == keys[1]), MoveStatus.CORRUPT)
    driver.run()
    assert engine.get(keys, request="b") == b"\1\0\0"
    assert engine.lookup(keys, "b") == 1


def test_a_cut_finds_keys_at_their_places_only() -> None:
    """The bytes of key 2 also stand across keys 0 and 1: the cut is at 2 all the same."""
    half = [bytes([number]) * (KEY_BYTES // 2) for number in range(4)]
    keys = half[0] + half[1] + half[2] + half[3] + half[1] + half[2]
    leases = Leases(lease_s=60.0, leases_max=8)
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
    leases.take(("t", "e"), "r", Lease(asked(keys), keys, 3, [], 60.0, space))
    leases.cut(("t", "e"), "r", keys[2 * KEY_BYTES :])
    lease = leases.renew(("t", "e"), "r", keys, 1.0)
    assert lease is not None
    assert lease.chunks == 2
