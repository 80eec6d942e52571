"""Retrieves from the remote tier: beside host memory and NVMe, once for all who wait, and harmless
where it fails."""

from __future__ import annotations

import pytest

import kvstore.core.reads as reads_module
from kvstore.core.keys import ChunkKeys
from kvstore.core.layout import Part
from kvstore.core.limits import RemoteLimits
from kvstore.core.messages import MoveKind, MoveStatus, TierName
from kvstore.core.remote_messages import RemoteState
from tests.core.driver import Driver, Engine, block_ids, layout
from tests.core.fleet import FIRST_EPOCH, Fleet, ask, is_remote, remote_moves, told

NULL = b"\xff\xff\xff\xff"


def offered(
    chunks: int = 4, remote: RemoteLimits | None = None, **settings: int
) -> tuple[Fleet, Driver, Engine, ChunkKeys]:
    """A fleet in which another node has stored a prompt, and a node whose request "r" knows."""
    fleet = Fleet()
    other = fleet.node(host_slots=64)
    engine = other.engine()
    engine.store(engine.chain(chunks))
    fleet.run(other)
    node = fleet.node(remote=remote, **{"host_slots": 16, **settings})
    mine = node.engine()
    keys = mine.chain(chunks)
    offer(fleet, mine, keys, chunks)
    return fleet, node, mine, keys


def offer(fleet: Fleet, engine: Engine, keys: ChunkKeys, chunks: int, request: str = "r") -> None:
    """A lookup that finds so many chunks."""
    number = ask(engine, keys.data, request)
    fleet.answer(engine.driver)
    assert told(engine, number)[-1] == ("HIT", chunks)


def done(fleet: Fleet, engine: Engine, number: int) -> bytes:
    """Carry everything out; the done mask of a retrieve."""
    fleet.run(engine.driver)
    return engine.driver.completed(engine.workers[0], number).done


def test_what_another_node_stored_is_read_once_and_promoted() -> None:
    """Four reads, four loads; then the chunks are in host memory and nothing is written back."""
    fleet, node, engine, keys = offered(4)
    assert done(fleet, engine, engine.retrieve(keys)) == b"\1\1\1\1"
    assert node.count(MoveKind.READ) == 4
    assert node.tier().chunks == 4
    assert engine.peek(keys) == 4
    assert node.count(MoveKind.WRITE) == 0
    assert done(fleet, engine, engine.retrieve(keys)) == b"\1\1\1\1"
    assert node.count(MoveKind.READ) == 4


def test_several_reads_are_in_the_hands_at_a_time_up_to_their_own_depth() -> None:
    fleet, node, engine, keys = offered(6, remote=RemoteLimits(read_depth=3), read_depth=1)
    number = engine.retrieve(keys)
    assert len(remote_moves(node, MoveKind.READ)) == 3
    assert done(fleet, engine, number) == b"\1" * 6


def test_two_who_wait_for_one_chunk_share_its_read() -> None:
    fleet, node, engine, keys = offered(2)
    offer(fleet, engine, keys, 2, "s")
    first, second = engine.retrieve(keys), engine.retrieve(keys, request="s")
    assert len(remote_moves(node, MoveKind.READ)) == 2
    assert done(fleet, engine, first) == done(fleet, engine, second) == b"\1\1"
    assert node.count(MoveKind.READ) == 2
    assert node.count(MoveKind.LOAD) == 4


def thirds(**settings: int) -> tuple[Fleet, Driver, Engine, ChunkKeys]:
    """A prompt of nine chunks: three in host memory, six on NVMe, all in the remote tier."""
    fleet = Fleet()
    other = fleet.node(host_slots=64)
    there = other.engine()
    there.store(there.chain(9))
    fleet.run(other)
    node = fleet.node(**{"host_slots": 9, "nvme_slots": 32, **settings})
    engine = node.engine()
    keys = engine.chain(9)
    engine.put(keys[:6])
    fleet.run(node)
    for seed in range(3):  # the tail of the prompt leaves host memory
        engine.put(engine.chain(2, seed + 5))
        fleet.run(node)
    assert engine.peek(keys[:6]) == 6
    return fleet, node, engine, keys


def test_the_three_tiers_are_read_at_a_time_and_all_is_promoted() -> None:
    """Loads from host memory, reads from NVMe and reads from Redis are in the hands together; a
    chunk from Redis takes a host slot though those before it still wait for NVMe. In the end NVMe
    has all of it, too."""
    fleet, node, engine, keys = thirds(read_depth=1)
    number = ask(engine, keys.data)
    fleet.answer(node)
    assert told(engine, number)[-1] == ("HIT", 9)
    local = [tree.visible_run(engine_space(node), keys.data) for tree in trees(node)]
    assert local == [3, 6]
    number = engine.retrieve(keys)
    kinds = {(m.kind, m.source.tier) for m in node.moves if m.source is not None}
    assert kinds == {
        (MoveKind.LOAD, TierName.HOST),
        (MoveKind.READ, TierName.NVME),
        (MoveKind.READ, TierName.REDIS),
    }
    targets = [m.target for m in node.waiting(MoveKind.READ)]
    assert all(target is not None and target.slab == 0 for target in targets)  # none is staged
    for move in remote_moves(node, MoveKind.READ):  # Redis is quicker than NVMe this time
        fleet.end(node, move)
    assert done(fleet, engine, number) == b"\1" * 9
    assert [tree.visible_run(engine_space(node), keys.data) for tree in trees(node)] == [9, 9]


def test_reads_before_one_get_their_slots_in_bounded_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One slot an event is taken ahead: the reads from Redis begin when all before them have
    theirs, and none is staged."""
    monkeypatch.setattr(reads_module, "STEP_READS", 1)
    fleet, node, engine, keys = thirds(read_depth=1)
    number = ask(engine, keys.data)
    fleet.answer(node)
    assert told(engine, number)[-1] == ("HIT", 9)
    number = engine.retrieve(keys)
    assert remote_moves(node, MoveKind.READ) == []
    assert done(fleet, engine, number) == b"\1" * 9
    assert node.tier().chunks == 9


def test_a_cancelled_read_gives_back_the_slot_that_it_took_ahead() -> None:
    """The reads from NVMe that wait have host slots already; nothing is held in the end."""
    fleet, node, engine, keys = thirds(read_depth=1)
    number = ask(engine, keys.data)
    fleet.answer(node)
    assert told(engine, number)[-1] == ("HIT", 9)
    number = engine.retrieve(keys)
    engine.cancel(number)
    assert 0 in done(fleet, engine, number)
    assert node.tier().pinned == 0
    assert engine.peek(keys[:6]) == 6


def test_without_a_host_slot_the_bytes_are_handed_on_from_half_of_the_staging_slots() -> None:
    """Host memory is full of what is leased: chunks are staged, two at a time, so that NVMe's reads
    never wait for a slow Redis."""
    fleet, node, engine, keys = offered(4, host_slots=4, staging_slots=4)
    engine.put(engine.chain(4, 9))
    assert engine.lookup(engine.chain(4, 9), "mine") == 4
    fleet.run(node)
    number = engine.retrieve(keys)
    assert len(remote_moves(node, MoveKind.READ)) == 2
    assert done(fleet, engine, number) == b"\1" * 4
    assert node.tier().chunks == 4
    assert engine.peek(engine.chain(4, 9)) == 4


@pytest.mark.parametrize(
    ("status", "drop"),
    [
        (MoveStatus.CORRUPT, "redis_lost"),
        (MoveStatus.FOREIGN, "key_collision"),
        (MoveStatus.FAILED, "redis_read_failed"),
    ],
)
def test_a_failed_read_is_a_miss_and_cuts_what_is_offered(status: MoveStatus, drop: str) -> None:
    """Chunk 2 of four can't be read: the request keeps two, and another one isn't offered more."""
    fleet, node, engine, keys = offered(4)
    number = engine.retrieve(keys)
    moves = remote_moves(node, MoveKind.READ)
    fleet.end(node, moves[2], status)
    assert done(fleet, engine, number) == b"\1\1\0\1"
    assert node.drops(drop) == 1
    assert engine.lookup(keys) == 2
    assert told(engine, ask(engine, keys.data, "other"))[-1] == ("HIT", 2)


def test_a_value_that_is_gone_is_a_miss() -> None:
    fleet, _node, engine, keys = offered(3)
    fleet.lose(keys[1])
    assert done(fleet, engine, engine.retrieve(keys)) == b"\1\0\1"
    assert engine.lookup(keys) == 1


def test_a_retrieve_without_a_lease_reads_nothing_from_the_remote_tier() -> None:
    """It was released, or it is another request: what isn't local is a miss."""
    fleet, node, engine, keys = offered(2)
    assert done(fleet, engine, engine.retrieve(keys, request="other")) == b"\0\0"
    engine.release()
    assert done(fleet, engine, engine.retrieve(keys)) == b"\0\0"
    assert node.count(MoveKind.READ) == 0


def test_only_what_the_lease_promises_is_read() -> None:
    """The hit ended at 2 of 4, as chunk 2 was gone; it is there again meanwhile."""
    fleet, node, engine, keys = offered(4)
    lost = {value: head for value, head in fleet.values.items() if value[3] == keys[2]}
    fleet.lose(keys[2])
    offer(fleet, engine, engine.chain(4), 4)
    engine.release()
    node.tick(RemoteLimits().answer_s)
    offer(fleet, engine, keys, 2)
    fleet.values.update(lost)
    assert done(fleet, engine, engine.retrieve(keys)) == b"\1\1\0\0"


def test_a_retrieve_of_later_chunks_reads_the_right_ones() -> None:
    """An engine has the first two chunks itself: keys [2, 4) are asked for, at their own depth."""
    fleet, node, engine, keys = offered(4)
    assert done(fleet, engine, engine.retrieve(keys[2:])) == b"\1\1"
    assert [m.header.depth for m in node.handed_out if m.kind is MoveKind.READ] == [2, 3]


def test_while_the_tier_is_down_nothing_is_read_and_what_waits_is_given_up() -> None:
    """Two reads run, two wait: the latter end at once, the former when the hands say so."""
    fleet, node, engine, keys = offered(4, remote=RemoteLimits(read_depth=2))
    number = engine.retrieve(keys)
    assert len(remote_moves(node, MoveKind.READ)) == 2
    node.event(RemoteState(False))
    assert node.drops("redis_down") == 2
    for move in remote_moves(node, MoveKind.READ):
        fleet.end(node, move, MoveStatus.FAILED)
    assert node.completed(engine.workers[0], number).done == bytes(4)
    assert engine.lookup(keys) == 0
    assert done(fleet, engine, engine.retrieve(keys)) == bytes(4)
    assert node.count(MoveKind.READ) == 2


def test_reads_that_wait_are_given_up_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads_module, "STEP_READS", 2)
    fleet, node, engine, keys = offered(8, remote=RemoteLimits(read_depth=1))
    number = engine.retrieve(keys)
    node.event(RemoteState(False))
    assert node.drops("redis_down") == 2
    assert node.service.next_tick_s(node.now) == 0.0
    for _ in range(4):
        node.tick()
    assert node.drops("redis_down") == 7
    for move in remote_moves(node, MoveKind.READ):
        fleet.end(node, move, MoveStatus.FAILED)
    assert node.completed(engine.workers[0], number).done == bytes(8)


def test_a_clear_ends_what_was_promised_from_the_remote_tier() -> None:
    """The lease pins nothing, as all of it is remote; after the clear nothing of it is read."""
    fleet, node, engine, keys = offered(3)
    node.clear()
    fleet.answer(node)
    assert done(fleet, engine, engine.retrieve(keys)) == bytes(3)
    assert node.count(MoveKind.READ) == 0
    assert told(engine, ask(engine, keys.data)) == [("PENDING", 0)]


def test_a_read_that_is_under_way_while_its_namespace_is_cleared_isnt_kept() -> None:
    fleet, node, engine, keys = offered(2)
    number = engine.retrieve(keys)
    node.clear()
    fleet.answer(node)
    fleet.run(node)
    assert len(node.completed(engine.workers[0], number).done) == 2
    assert node.tier().chunks == 0
    assert engine.peek(keys) == 0


def test_what_was_read_under_a_former_epoch_isnt_shared_later() -> None:
    """The request was promised two chunks; then another node cleared the fleet, and this one was
    told. The chunks are read all the same, and go to NVMe. When they come back from there they
    aren't given to Redis under the new epoch."""
    fleet, node, engine, keys = offered(2, host_slots=2, nvme_slots=16)
    name = ("t1", engine.digest)
    fleet.epochs[name] = fleet.epoch(*name) + 1
    ask(engine, engine.chain(1, seed=7).data, "other")
    fleet.answer(node)
    assert done(fleet, engine, engine.retrieve(keys)) == b"\1\1"
    engine.release()
    engine.store(engine.chain(2, seed=9))
    fleet.run(node)
    assert engine.lookup(keys, "again") == 2
    assert done(fleet, engine, engine.retrieve(keys, request="again")) == b"\1\1"
    assert [value for value in fleet.values if value[2] > FIRST_EPOCH and value[3] in keys] == []
    assert node.drops("cleared") == 2


def test_parts_of_a_chunk_may_come_from_different_tiers() -> None:
    """FULL parts are in host memory, the last windows are not: those are read from Redis."""
    fleet = Fleet()
    shape = layout(window=16)
    other = fleet.node(host_slots=32)
    there = other.engine(shape=shape)
    there.put(there.chain(3))
    fleet.run(other)
    node = fleet.node(host_slots=32)
    engine = node.engine(shape=shape)
    keys = engine.chain(3)
    engine.store(keys, window=NULL * 3)
    fleet.run(node)
    number = ask(engine, keys.data)
    fleet.answer(node)
    assert told(engine, number)[-1] == ("HIT", 3)
    window = NULL * 2 + block_ids(1)
    assert done(fleet, engine, engine.retrieve(keys, window=window)) == b"\1\1\1"
    (read,) = [m for m in node.handed_out if m.kind is MoveKind.READ]
    assert (read.header.part, is_remote(read.source)) == (Part.WINDOW, True)


def engine_space(node: Driver):  # type: ignore[no-untyped-def]
    """The node's one namespace."""
    return node.service._state.spaces.all()[0]


def trees(node: Driver):  # type: ignore[no-untyped-def]
    """The node's trees."""
    return node.service._state.directory.trees()
