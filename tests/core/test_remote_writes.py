"""Sharing: what is written to the remote tier, when, and what is dropped instead; and clears of the
whole fleet."""

from __future__ import annotations

from typing import Any

import pytest

import kvstore.core.sharing as sharing_module
from kvstore.core.layout import Part, Shard
from kvstore.core.limits import RemoteLimits
from kvstore.core.messages import ADMIN, Cleared, MoveKind, MoveStatus, Persisted, Refused
from kvstore.core.remote_messages import (
    Probed,
    RemoteClear,
    RemoteCleared,
    RemoteEnter,
    RemoteState,
)
from tests.core.driver import MODEL, Driver, Engine, layout, limits
from tests.core.fleet import (
    FIRST_EPOCH,
    Fleet,
    ask,
    probes,
    remote_moves,
    remote_stats,
    stored,
    told,
)


def alone(**settings: Any) -> tuple[Fleet, Driver, Engine]:
    """A fleet of one node and one engine."""
    fleet = Fleet()
    node = fleet.node(**{"host_slots": 16, **settings})
    return fleet, node, node.engine()


def test_a_commit_is_acknowledged_first_then_probed_and_what_is_absent_is_written() -> None:
    """Three chunks, of which another node has written the second."""
    fleet, node, engine = alone()
    keys = engine.chain(3)
    stored(engine, 3)
    (probe,) = probes(node)
    assert (probe.keys, probe.shards, probe.parts) == (keys.data, (0,), (Part.FULL,))
    assert node.count(MoveKind.WRITE) == 0
    found = (b"\0\1\0",)
    node.remote.clear()
    node.event(Probed(probe.id, FIRST_EPOCH, found))
    writes = remote_moves(node, MoveKind.WRITE)
    assert [write.header.depth for write in writes] == [0, 2]
    assert {write.target.slab for write in writes if write.target} == {FIRST_EPOCH}
    fleet.run(node)
    stats = remote_stats(node)
    assert (stats.present, stats.written, stats.backlog) == (1, 2, 0)


def test_a_namespace_is_entered_before_its_first_write_and_each_time_the_tier_came_up() -> None:
    fleet, node, engine = alone()
    stored(engine, 2)
    fleet.run(node)
    entered = RemoteEnter("t1", engine.digest, MODEL.model, MODEL.alias)
    assert fleet.entered == [entered]
    stored(engine, 2, seed=1)
    fleet.run(node)
    assert fleet.entered == [entered]
    node.event(RemoteState(False))
    node.event(RemoteState(True))
    node.event(RemoteState(True))
    stored(engine, 2, seed=2)
    fleet.run(node)
    assert fleet.entered == [entered] * 2


def test_each_shard_is_probed_and_written_on_its_own() -> None:
    fleet, node, _ = alone()
    shards = [Shard(tp_rank=rank, tp_size=2) for rank in range(2)]
    engine = node.engine("e2", "t2", shards=shards)
    engine.put(engine.chain(2))
    asked = []
    while node.remote or node.moves:
        asked += [probe.shards for probe in probes(node)]
        fleet.answer(node)
        for move in list(node.moves):
            fleet.end(node, move)
    assert sorted(asked) == [(0,), (1,)]
    assert len(fleet.values) == 4


def test_both_parts_of_a_chunk_are_shared() -> None:
    fleet, node, _ = alone()
    engine = node.engine("e2", "t2", shape=layout(window=16))
    engine.put(engine.chain(2))
    fleet.run(node)
    assert sorted(part for *_, part in fleet.values) == [0, 0, 1, 1]


def test_what_is_shared_isnt_asked_for_again() -> None:
    """The same prompt is stored again: it is there, and known to be shared."""
    fleet, node, engine = alone()
    stored(engine, 3)
    fleet.run(node)
    stored(engine, 3)
    assert node.remote == []


def test_nothing_is_probed_or_written_while_a_retrieve_runs() -> None:
    fleet, node, engine = alone()
    stored(engine, 2)
    fleet.run(node)
    number = engine.retrieve(engine.chain(2))
    store = engine.store(engine.chain(2, 1))
    node.run(MoveKind.STORE)
    assert node.completed(engine.workers[0], store).done == b"\1\1"
    assert node.remote == []
    node.run(MoveKind.LOAD)
    assert node.completed(engine.workers[0], number).done == b"\1\1"
    assert len(probes(node)) == 1


def test_writes_have_a_depth_of_their_own() -> None:
    fleet, node, engine = alone(remote=RemoteLimits(write_depth=2), nvme_slots=16, write_depth=1)
    stored(engine, 5)
    fleet.answer(node)
    assert len(remote_moves(node, MoveKind.WRITE)) == 2
    assert len(node.waiting(MoveKind.WRITE)) == 3
    fleet.run(node)
    assert len(fleet.values) == 5


def test_the_backlog_is_bounded_and_holds_no_pin() -> None:
    """Three may wait; a fourth is dropped and counted. What is evicted meanwhile isn't written."""
    fleet, node, engine = alone(remote=RemoteLimits(backlog_max=3), host_slots=4)
    stored(engine, 4)
    assert node.drops("redis_backlog") == 1
    stored(engine, 4, seed=1)
    assert node.drops("redis_backlog") == 5
    fleet.run(node)
    assert node.drops("evicted_before_redis") == 3
    assert fleet.values == {}
    assert remote_stats(node).backlog == 0


def test_a_dropped_part_is_shared_when_it_is_stored_again() -> None:
    fleet, node, engine = alone(remote=RemoteLimits(backlog_max=2))
    stored(engine, 4)
    fleet.run(node)
    assert len(fleet.values) == 2
    stored(engine, 4)
    fleet.run(node)
    assert len(fleet.values) == 4


@pytest.mark.parametrize(
    ("status", "drop"),
    [(MoveStatus.FAILED, "redis_write_failed"), (MoveStatus.NO_SPACE, "redis_full")],
)
def test_a_failed_write_is_counted_and_not_retried(status: MoveStatus, drop: str) -> None:
    fleet, node, engine = alone()
    stored(engine, 1)
    fleet.answer(node)
    node.end(remote_moves(node, MoveKind.WRITE)[0], status)
    fleet.run(node)
    assert node.drops(drop) == 1
    assert node.count(MoveKind.WRITE) == 1
    assert node.tier().pinned == 0


def test_after_the_tier_was_full_nothing_is_written_for_a_second() -> None:
    fleet, node, engine = alone()
    stored(engine, 1)
    fleet.answer(node)
    node.end(remote_moves(node, MoveKind.WRITE)[0], MoveStatus.NO_SPACE)
    node.remote.clear()
    stored(engine, 1, seed=1)
    assert node.remote == []
    node.tick(1.0)
    fleet.run(node)
    assert len(fleet.values) == 1


def test_a_probe_that_fails_drops_what_it_was_for() -> None:
    fleet, node, engine = alone()
    stored(engine, 3)
    (probe,) = probes(node)
    node.remote.clear()
    node.event(Probed(probe.id, 0, (), "timed out"))
    assert node.drops("redis_probe_failed") == 3
    assert remote_stats(node).backlog == 0
    assert fleet.run(node) == []


def test_while_the_tier_is_down_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is dropped in steps, what is committed meanwhile at once; a write that runs ends
    as the hands say."""
    monkeypatch.setattr(sharing_module, "STEP_PARTS", 2)
    monkeypatch.setattr(sharing_module, "PROBE_PARTS", 2)
    fleet, node, engine = alone(remote=RemoteLimits(write_depth=1))
    stored(engine, 7)
    fleet.answer(node)
    assert len(remote_moves(node, MoveKind.WRITE)) == 1
    assert len(probes(node)) == 1
    node.event(RemoteState(False))
    assert node.service.next_tick_s(node.now) == 0.0
    for _ in range(4):
        node.tick()
    stored(engine, 1, seed=1)
    node.event(Probed(probes(node)[0].id, 0, (), "closed"))
    node.end(remote_moves(node, MoveKind.WRITE)[0], MoveStatus.FAILED)
    assert remote_stats(node).backlog == 0
    counts = [node.drops(f"redis_{why}") for why in ("down", "probe_failed", "write_failed")]
    assert counts == [5, 2, 1]
    assert node.service.idle()


def test_chunks_that_come_from_nvme_are_shared_too() -> None:
    """They were stored while the tier was down, and left host memory."""
    fleet, node, engine = alone(host_slots=4, nvme_slots=16, up=False)
    keys = engine.chain(4)
    engine.put(keys)
    engine.put(engine.chain(4, 1))
    assert engine.lookup(keys) == 4
    node.event(RemoteState(True))
    assert engine.get(keys) == b"\1" * 4
    fleet.run(node)
    assert {value[3] for value in fleet.values} == set(keys)


def test_what_was_read_from_there_isnt_asked_for() -> None:
    fleet, node, engine = alone()
    stored(engine, 3)
    fleet.run(node)
    other = fleet.node(host_slots=16)
    there = other.engine()
    number = ask(there, there.chain(3).data)
    fleet.answer(other)
    assert told(there, number)[-1] == ("HIT", 3)
    there.retrieve(there.chain(3))
    fleet.run(other)
    assert other.tier().chunks == 3
    assert probes(other) == []
    assert remote_stats(other).present == 0


# ---------------------------------------------------------------- clears


def test_a_clear_raises_the_fleets_epochs_first_and_says_both() -> None:
    """No other node finds a thing afterwards; what this one stores then is shared under the new
    epoch."""
    fleet, node, engine = alone()
    stored(engine, 3)
    fleet.run(node)
    other = fleet.node(host_slots=16)
    there = other.engine()
    number = node.clear()
    assert node.remote == [RemoteClear(1, None, None)]
    assert node.is_open(ADMIN, number)
    assert engine.peek(engine.chain(3)) == 3
    fleet.answer(node)
    assert node.answer(ADMIN, number) == Cleared(1, 3, RemoteCleared(1, 1))
    assert engine.peek(engine.chain(3, 5)) == 0
    asked = ask(there, there.chain(3).data)
    fleet.answer(other)
    assert told(there, asked)[-1] == ("MISS", 0)
    stored(engine, 3)
    fleet.run(node)
    assert {value[2] for value in fleet.values} == {FIRST_EPOCH, FIRST_EPOCH + 1}


def test_a_clear_while_the_tier_is_down_clears_this_node_and_says_so() -> None:
    fleet, node, engine = alone()
    stored(engine, 2)
    fleet.run(node)
    node.event(RemoteState(False))
    number = node.clear()
    answer = node.answer(ADMIN, number)
    assert isinstance(answer, Cleared)
    assert answer.remote == RemoteCleared(0, 0, "the Redis tier is down")
    assert (answer.namespaces, answer.chunks) == (1, 2)
    assert node.remote == []


def test_a_clear_that_fails_in_the_fleet_still_clears_this_node() -> None:
    fleet, node, engine = alone()
    stored(engine, 2)
    fleet.run(node)
    number = node.clear()
    node.remote.clear()
    node.event(RemoteCleared(1, 0, "timed out"))
    answer = node.answer(ADMIN, number)
    assert isinstance(answer, Cleared)
    assert (answer.chunks, answer.remote) == (2, RemoteCleared(1, 0, "timed out"))


def test_a_clear_that_isnt_durable_names_the_fleets_error_too() -> None:
    fleet, node, engine = alone()
    stored(engine, 1)
    fleet.run(node)
    node.event(RemoteState(False))
    node.durable = False
    number = node.clear()
    node.event(Persisted(node.persists[-1].number, "read-only"))
    answer = node.answer(ADMIN, number)
    assert isinstance(answer, Refused)
    assert "read-only" in answer.reason
    assert "the fleet's chunks aren't cleared: the Redis tier is down" in answer.reason


def test_without_a_remote_tier_a_clear_says_nothing_of_it() -> None:
    node = Driver(limits(4))
    engine = node.engine()
    engine.put(engine.chain(1))
    assert node.answer(ADMIN, node.clear()) == Cleared(1, 1, None)


def test_writes_of_a_cleared_namespace_go_nowhere() -> None:
    """Its parts wait in the backlog, known to be absent or not probed yet."""
    fleet, node, engine = alone(remote=RemoteLimits(write_depth=1))
    stored(engine, 4)
    fleet.answer(node)
    node.clear()
    fleet.run(node)
    assert len([value for value in fleet.values if value[2] > FIRST_EPOCH]) == 0
    assert len(fleet.values) == 1
    assert node.drops("cleared") == 3
