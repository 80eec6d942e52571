"""Lookups and the remote tier: who is made to wait, for how long, and what is remembered."""

from __future__ import annotations

import gc
from typing import Any

from kvstore.core.layout import Part, Shard
from kvstore.core.limits import RemoteLimits
from kvstore.core.messages import HitStatus, LookupReply, SessionID
from kvstore.core.probing import STEP_WAITERS, Waiter
from kvstore.core.remote_messages import Probe, Probed, RemoteState
from tests.core.driver import Driver, Engine, layout, limits
from tests.core.fleet import Fleet, ask, probes, remote_stats, told

PENDING = ("PENDING", 0)


def sharing(chunks: int = 4, **settings: Any) -> tuple[Fleet, Driver, Engine]:
    """A fleet in which another node has stored a prompt, and a fresh node."""
    fleet = Fleet()
    other = fleet.node(host_slots=16)
    engine = other.engine()
    engine.store(engine.chain(chunks))
    fleet.run(other)
    assert len(fleet.values) == chunks
    node = fleet.node(host_slots=16, **settings)
    return fleet, node, node.engine()


def test_while_the_tier_is_down_a_lookup_asks_nothing_and_is_answered_at_once() -> None:
    fleet = Fleet()
    node = fleet.node(up=False)
    engine = node.engine()
    assert told(engine, ask(engine, engine.chain(3).data)) == [("MISS", 0)]
    assert node.remote == []
    assert not remote_stats(node).up


def test_a_lookup_is_pending_until_its_probe_ends_and_then_a_lease() -> None:
    """The push names the hit, and asking again gives the same without another probe."""
    fleet, node, engine = sharing(4)
    keys = engine.chain(4)
    number = ask(engine, keys.data)
    assert told(engine, number) == [PENDING]
    (probe,) = probes(node)
    assert (probe.keys, probe.shards, probe.parts) == (keys.data, (0,), (Part.FULL,))
    fleet.answer(node)
    assert told(engine, number) == [PENDING, ("HIT", 4)]
    assert engine.lookup(keys) == 4
    assert node.remote == []
    assert node.stats().leases == 1


def test_a_hit_during_the_scan_is_not_taken_back_because_another_probe_is_late() -> None:
    """What a scan finds may make the hit longer. That another request's probe of the same keys had
    no answer in time says nothing of what was promised."""
    fleet, _other, _engine = sharing(4)
    node = Driver(limits(host_slots=16, nvme_slots=8, remote=RemoteLimits()))
    node.event(RemoteState(True))
    engine = node.engine()
    keys = engine.chain(4)
    number = ask(engine, keys.data)
    fleet.answer(node)
    assert told(engine, number) == [PENDING, ("HIT", 4)]
    node.tick(RemoteLimits().answer_s)
    late = ask(engine, keys.data, "late")
    node.tick(RemoteLimits().probe_s)
    assert told(engine, late) == [PENDING, ("MISS", 0)]
    assert engine.lookup(keys) == 4
    node.scanned()
    assert engine.lookup(keys) == 4


def test_the_probe_begins_behind_the_local_hit_and_extends_it() -> None:
    """Two of five chunks are in host memory: three are asked for."""
    fleet, node, engine = sharing(5)
    keys = engine.chain(5)
    engine.put(keys[:2])
    node.remote.clear()
    number = ask(engine, keys.data)
    assert [probe.keys for probe in probes(node)] == [keys.data[64:]]
    fleet.answer(node)
    assert told(engine, number)[1:] == [("HIT", 5)]
    stats = remote_stats(node)
    assert (stats.hits, stats.misses) == (3, 0)


def test_a_whole_local_hit_asks_nothing() -> None:
    _fleet, node, engine = sharing(3)
    engine.put(engine.chain(3))
    node.remote.clear()
    assert engine.lookup(engine.chain(3)) == 3
    assert node.remote == []


def test_only_the_leading_run_counts() -> None:
    """Chunk 2 of five is gone: the hit ends before it, whatever lies behind."""
    fleet, node, engine = sharing(5)
    keys = engine.chain(5)
    fleet.lose(keys[2])
    number = ask(engine, keys.data)
    fleet.answer(node)
    assert told(engine, number)[1:] == [("HIT", 2)]


def test_a_negative_answer_is_remembered_for_a_while() -> None:
    """Another request of the same prompt, also a longer one, is a miss at once; later it is asked
    for anew."""
    fleet = Fleet()
    node = fleet.node()
    engine = node.engine()
    number = ask(engine, engine.chain(3).data)
    fleet.answer(node)
    assert told(engine, number) == [PENDING, ("MISS", 0)]
    assert told(engine, ask(engine, engine.chain(3).data, "next")) == [("MISS", 0)]
    assert told(engine, ask(engine, engine.chain(5).data, "longer")) == [("MISS", 0)]
    assert remote_stats(node).remembered == 2
    node.tick(RemoteLimits().answer_s)
    assert told(engine, ask(engine, engine.chain(3).data, "later")) == [PENDING]


def test_at_the_deadline_the_local_answer_stands_and_a_late_one_serves_the_next() -> None:
    """The probe takes longer than 20 ms: the request gets what is in host memory, for good; the
    next request has the late answer at once."""
    fleet, node, engine = sharing(4)
    keys = engine.chain(4)
    engine.put(keys[:1])
    node.remote.clear()
    number = ask(engine, keys.data)
    (probe,) = probes(node)
    assert 0 < node.service.next_tick_s(node.now) <= RemoteLimits().probe_s
    node.tick(0.010)
    assert told(engine, number) == [PENDING]
    node.tick(0.010)
    assert told(engine, number) == [PENDING, ("HIT", 1)]
    assert told(engine, ask(engine, keys.data, "meanwhile")) == [("HIT", 1)]
    node.event(fleet.probed(probe))
    assert told(engine, ask(engine, keys.data, "next")) == [("HIT", 4)]
    assert engine.lookup(keys) == 1
    stats = remote_stats(node)
    assert (stats.timed_out, stats.late, stats.waiting, stats.probes) == (1, 1, 0, 1)


def test_nobody_waits_for_a_probe_that_is_late_already() -> None:
    """It has been out for longer than what is remembered of it: a lookup of the same keys gets its
    local answer, and no second probe goes out for them."""
    _fleet, node, engine = sharing(2)
    keys = engine.chain(2)
    ask(engine, keys.data)
    node.tick(0.020)
    node.tick(RemoteLimits().answer_s)
    assert told(engine, ask(engine, keys.data, "next")) == [("MISS", 0)]
    assert len(probes(node)) == 1


def test_lookups_of_the_same_keys_share_one_probe() -> None:
    fleet, node, engine = sharing(3)
    keys = engine.chain(3)
    numbers = [ask(engine, keys.data, f"r{i}") for i in range(3)]
    assert len(probes(node)) == 1
    fleet.answer(node)
    assert [told(engine, number) for number in numbers] == [[PENDING, ("HIT", 3)]] * 3


def test_many_who_wait_are_answered_in_steps() -> None:
    """No event answers more than its share; the rest follows at Ticks that are due at once."""
    fleet, node, engine = sharing(2)
    keys = engine.chain(2)
    numbers = [ask(engine, keys.data, f"r{i}") for i in range(3 * STEP_WAITERS)]
    (probe,) = probes(node)
    answered = len(node.event(fleet.probed(probe)))
    assert answered == STEP_WAITERS
    assert node.service.next_tick_s(node.now) == 0.0
    node.tick()
    node.tick()
    assert all(told(engine, number)[1:] == [("HIT", 2)] for number in numbers)
    assert remote_stats(node).waiting == 0


def test_beyond_each_limit_the_local_answer_is_given_at_once() -> None:
    """Two probes, or two that wait: the third lookup doesn't."""
    fleet = Fleet()
    for bound in ({"probes_max": 2}, {"waiters_max": 2}, {"waiting_bytes_max": 64}):
        node = fleet.node(remote=RemoteLimits(**bound))
        engine = node.engine()
        first, second, third = (ask(engine, engine.chain(1, i).data, f"r{i}") for i in range(3))
        assert told(engine, first) == told(engine, second) == [PENDING]
        assert told(engine, third) == [("MISS", 0)]


def test_a_probe_asks_for_a_bounded_number_of_values() -> None:
    """Eight names, two shards: four keys of six are asked for, and a hit ends there."""
    fleet = Fleet()
    shards = [Shard(tp_rank=rank, tp_size=2) for rank in range(2)]
    other = fleet.node(host_slots=16)
    there = other.engine(shards=shards)
    there.put(there.chain(6))
    fleet.run(other)
    node = fleet.node(remote=RemoteLimits(probe_names_max=8))
    engine = node.engine(shards=shards)
    number = ask(engine, engine.chain(6).data)
    (probe,) = probes(node)
    assert (len(probe.keys), probe.shards) == (4 * 32, (0, 1))
    fleet.answer(node)
    assert told(engine, number)[1:] == [("HIT", 4)]


def test_an_error_or_a_tier_that_goes_down_gives_the_local_answer() -> None:
    """And what was asked isn't asked again at once after an error."""
    _fleet, node, engine = sharing(2)
    keys = engine.chain(2)
    number = ask(engine, keys.data)
    (probe,) = probes(node)
    node.event(Probed(probe.id, 0, (), "connection refused"))
    assert told(engine, number) == [PENDING, ("MISS", 0)]
    assert told(engine, ask(engine, keys.data, "next")) == [("MISS", 0)]
    node.tick(RemoteLimits().answer_s)
    number = ask(engine, keys.data, "later")
    node.event(RemoteState(False))
    assert told(engine, number) == [PENDING, ("MISS", 0)]
    node.event(Probed(probes(node)[1].id, 0, (), "closed"))
    assert remote_stats(node).probes_failed == 2


def test_a_promise_from_the_remote_tier_ends_when_that_goes_down() -> None:
    """The local part stays promised; the rest isn't promised again when the tier is back, as the
    request may have computed it meanwhile."""
    fleet, node, engine = sharing(4)
    keys = engine.chain(4)
    engine.put(keys[:1])
    fleet.run(node)
    number = ask(engine, keys.data)
    fleet.answer(node)
    assert told(engine, number)[-1] == ("HIT", 4)
    node.event(RemoteState(False))
    assert engine.lookup(keys) == 1
    node.event(RemoteState(True))
    assert engine.lookup(keys) == 1


def test_a_release_ends_the_wait_with_a_miss() -> None:
    """Each PENDING is followed by exactly one answer, and no lease is taken for nobody."""
    fleet, node, engine = sharing(3)
    released = ask(engine, engine.chain(3).data)
    engine.release("r")
    assert told(engine, released) == [PENDING, ("MISS", 0)]
    fleet.answer(node)
    assert node.stats().leases == 0
    assert told(engine, released) == [PENDING, ("MISS", 0)]


def test_a_lookup_that_is_asked_anew_gets_its_local_answer() -> None:
    """With the same keys, as a client does that has waited for long; or with others, which wait for
    themselves."""
    fleet, node, engine = sharing(3)
    engine.put(engine.chain(3)[:1])
    node.remote.clear()
    first = ask(engine, engine.chain(3).data)
    second = ask(engine, engine.chain(3).data)
    assert told(engine, first) == [PENDING, ("HIT", 1)]
    assert told(engine, second) == [("HIT", 1)]
    first = ask(engine, engine.chain(3).data, "other")
    second = ask(engine, engine.chain(2).data, "other")
    assert told(engine, first) == [PENDING, ("HIT", 1)]
    assert told(engine, second) == [PENDING]
    fleet.answer(node)
    assert told(engine, second) == [PENDING, ("HIT", 2)]


def test_a_session_that_is_lost_is_told_nothing() -> None:
    fleet, node, engine = sharing(2)
    number = ask(engine, engine.chain(2).data)
    node.close(engine.scheduler)
    fleet.answer(node)
    assert told(engine, number) == [PENDING]
    assert remote_stats(node).waiting == 0
    assert node.stats().leases == 0


def test_an_engine_that_became_unready_gets_a_miss() -> None:
    fleet, node, engine = sharing(2)
    number = ask(engine, engine.chain(2).data)
    node.close(engine.workers[0])
    fleet.answer(node)
    assert told(engine, number) == [PENDING, ("MISS", 0)]


def test_a_probe_asks_for_all_shards_and_a_hit_needs_them() -> None:
    """Rank 1's part of chunk 1 is gone: only chunk 0 is a hit."""
    fleet = Fleet()
    shards = [Shard(tp_rank=rank, tp_size=2) for rank in range(2)]
    other = fleet.node(host_slots=16)
    there = other.engine(shards=shards)
    there.put(there.chain(3))
    fleet.run(other)
    keys = there.chain(3)
    for value in [v for v in fleet.values if v[3] == keys[1] and v[4] == 1]:
        del fleet.values[value]
    node = fleet.node()
    engine = node.engine(shards=shards)
    number = ask(engine, keys.data)
    fleet.answer(node)
    assert told(engine, number)[1:] == [("HIT", 1)]


def test_windows_of_a_hit_may_come_from_either_tier() -> None:
    """Two windows are needed. The other node shared four chunks; its window of chunk 3 is gone, so
    a hit of three is what windows 1 and 2 allow."""
    fleet = Fleet()
    shape = layout(window=32)
    other = fleet.node(host_slots=32)
    there = other.engine(shape=shape)
    there.put(there.chain(4))
    fleet.run(other)
    node = fleet.node(host_slots=32)
    engine = node.engine(shape=shape)
    keys = engine.chain(4)
    engine.put(keys[:2])
    node.remote.clear()
    for value in [v for v in fleet.values if v[3] == keys[3] and v[5] is Part.WINDOW]:
        del fleet.values[value]
    number = ask(engine, keys.data)
    (probe,) = probes(node)
    assert (probe.parts, probe.keys) == ((Part.FULL, Part.WINDOW), keys.data)
    fleet.answer(node)
    assert told(engine, number)[1:] == [("HIT", 3)]
    assert engine.lookup(keys) == 3


def test_a_cleared_namespace_takes_nothing_from_an_old_probe() -> None:
    """The probe was made before the clear: its answer belongs to a namespace that is dead."""
    fleet, node, engine = sharing(2)
    number = ask(engine, engine.chain(2).data)
    (probe,) = probes(node)
    found = fleet.probed(probe)
    node.remote.clear()
    node.clear()
    fleet.answer(node)
    node.event(found)
    assert told(engine, number) == [PENDING, ("MISS", 0)]
    assert told(engine, ask(engine, engine.chain(2).data, "next")) == [PENDING]


def test_what_has_waited_leaves_nothing_behind() -> None:
    """The daemon runs without cyclic collection: lookups that were pending are freed as they are,
    whether their probe came in time, late or never brought anything."""
    fleet, node, engine = sharing(2)
    gc.collect()
    gc.disable()
    try:
        ask(engine, engine.chain(2).data, "in time")
        fleet.answer(node)
        ask(engine, engine.chain(2, seed=5).data, "late")
        node.tick(RemoteLimits().probe_s)
        fleet.answer(node)
        ask(engine, engine.chain(2, seed=6).data, "released")
        engine.release("released")
        fleet.answer(node)
        assert [one for one in gc.get_objects() if type(one) is Waiter] == []
    finally:
        gc.enable()


def test_no_reply_but_lookups_is_ever_pending() -> None:
    """Probes that nobody waits for, of writes, make no reply."""
    fleet, node, engine = sharing(1)
    engine.put(engine.chain(3, seed=7))
    assert all(isinstance(effect, Probe) for effect in node.remote)
    before = len(node.replies)
    fleet.answer(node)
    assert len(node.replies) == before
    assert SessionID(0) not in {reply.session for reply in node.replies}
    assert LookupReply(HitStatus.PENDING, 0) not in [reply.body for reply in node.replies]
