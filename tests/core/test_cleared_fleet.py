"""What another node has cleared: it isn't shared again."""

from __future__ import annotations

from typing import Any

from kvstore.core.messages import ADMIN, MoveKind, MoveStatus
from kvstore.core.remote_messages import RemoteState
from tests.core.driver import Driver, Engine
from tests.core.fleet import Fleet, remote_moves, stored


def cleared_fleet(**settings: Any) -> tuple[Fleet, Driver, Engine]:
    """A fleet that another node has cleared; and this node, which keeps a prompt from before that
    couldn't be written there."""
    fleet = Fleet()
    first, node = [fleet.node(**{"host_slots": 16, **settings}) for _ in range(2)]
    engine = node.engine()
    stored(first.engine(), 1, seed=9)
    fleet.run(first)
    stored(engine, 3)
    fleet.answer(node)
    for move in remote_moves(node, MoveKind.WRITE):
        node.end(move, MoveStatus.FAILED)
    fleet.run(node)
    number = first.clear()
    fleet.answer(first)
    assert not first.is_open(ADMIN, number)
    fleet.values.clear()
    return fleet, node, engine


def test_what_another_node_cleared_is_not_shared_again() -> None:
    """What this node keeps is older than the clear: stored again it stays here. What is stored
    since is shared, also before the clear was noticed, and so is all after a clear of this node."""
    fleet, node, engine = cleared_fleet()
    stored(engine, 2, seed=1)
    fleet.run(node)
    stored(engine, 3)
    fleet.run(node)
    assert {value[3] for value in fleet.values} == set(engine.chain(2, 1))
    assert node.drops("cleared") == 3
    assert engine.lookup(engine.chain(3)) == 3
    node.clear()
    fleet.answer(node)
    stored(engine, 3)
    fleet.run(node)
    assert set(engine.chain(3)) <= {value[3] for value in fleet.values}


def test_what_is_to_be_shared_when_a_clear_is_noticed_and_is_older_is_dropped() -> None:
    """Stored again before the clear was noticed: the probe that it is for tells of it."""
    fleet, node, engine = cleared_fleet()
    stored(engine, 3)
    fleet.run(node)
    assert fleet.values == {}
    assert node.drops("cleared") == 3


def test_what_another_node_cleared_is_not_shared_from_nvme_either() -> None:
    """Copies there are as old, and so is what is read back from them into host memory."""
    fleet, node, engine = cleared_fleet(host_slots=4, nvme_slots=32)
    for seed in (2, 3):
        stored(engine, 3, seed)
        fleet.run(node)
    fleet.values.clear()
    assert engine.get(engine.chain(3)) == b"\1" * 3
    fleet.run(node)
    assert fleet.values == {}


def test_an_epoch_that_is_told_while_the_tier_is_down_counts() -> None:
    """The probe's answer was on its way when the tier went down: what it was for was here then, so
    a higher epoch later tells of a clear in between."""
    fleet = Fleet()
    node = fleet.node(host_slots=16)
    engine = node.engine()
    other = fleet.node(host_slots=16)
    stored(other.engine(), 1, seed=9)
    fleet.run(other)
    stored(engine, 3)
    node.event(RemoteState(False))
    fleet.answer(node)
    assert node.drops("redis_down") == 3
    number = other.clear()
    fleet.answer(other)
    assert not other.is_open(ADMIN, number)
    fleet.values.clear()
    node.event(RemoteState(True))
    stored(engine, 3)
    fleet.run(node)
    assert fleet.values == {}
    assert node.drops("cleared") == 3
