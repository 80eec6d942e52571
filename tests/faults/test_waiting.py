"""Faults that other services were seen to have: somebody waits for what isn't his concern."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore import HitStatus
from kvstore.core.messages import MoveKind
from kvstore.server_sessions import Sessions
from kvstore.tiers.base import IOKind
from tests.client_rig import BLOCKS, Engine, keys_of
from tests.faults.conftest import StartEngine, StartNode
from tests.faults.node import Gate
from tests.link_rig import eventually, running_rig
from tests.small_engine import WAIT_S, tokens

HOUR_S = 3600.0


def test_an_acknowledged_store_is_visible_at_once_from_another_connection(
    start_node: StartNode, start_engine: StartEngine
) -> None:
    """A hundred prompts, one after the other: stored on one connection, looked up on another with
    no pause between, and all of it is there, every time."""
    node = start_node(256)
    writer, reader = start_engine(node, 2, "writer"), start_engine(node, 2, "reader")
    for seed in range(100):
        keys = writer.keys(tokens(2, seed))
        writer.fill(keys)
        assert writer.store(keys).leading_chunks == 2
        assert reader.hits(keys) == 2, seed
    assert reader.retrieve(keys).leading_chunks == 2
    assert reader.right_chunks(keys) == 2


@pytest.mark.parametrize("kind", [IOKind.READ, IOKind.WRITE])
def test_a_client_that_waits_for_a_slow_tier_delays_nobody(
    start_node: StartNode, start_engine: StartEngine, hold: Callable[[], Gate], kind: IOKind
) -> None:
    """The disk doesn't answer at all: one engine waits for its chunks there. Another one's lookup,
    store and retrieve are answered meanwhile. Field case 68: so are stores while nothing can be
    written."""
    node = start_node(16, 64)
    assert node.nvme is not None
    gate = hold()
    slow, fast = start_engine(node, 16, "slow"), start_engine(node, 4, "fast")
    keys = slow.keys(tokens(8))
    slow.fill(keys)
    if kind is IOKind.READ:
        assert slow.store(keys).leading_chunks == 8
        node.rest()
        assert slow.store(slow.keys(tokens(16, 1))).leading_chunks == 16
        node.rest()
        for _ in range(8):
            node.nvme.inject(kind, lambda place: gate.hold())
        waits = slow.begin_retrieve(keys)
    else:
        for _ in range(8):
            node.nvme.inject(kind, lambda place: gate.hold())
        waits = slow.begin_store(keys)
    assert gate.reached.wait(WAIT_S)
    for seed in range(20):
        mine = fast.keys(tokens(4, 100 + seed))
        fast.fill(mine)
        assert fast.store(mine).leading_chunks == 4
        assert fast.hits(mine) == 4
        assert fast.retrieve(mine).leading_chunks == 4
        assert fast.right_chunks(mine) == 4
    assert waits.done() is (kind is IOKind.WRITE), "a store never waits for the disk"
    gate.open()
    outcome = waits.wait(WAIT_S)
    assert outcome is not None
    assert outcome.leading_chunks == 8


def test_an_error_in_a_handler_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's code for a request raises what nobody expected: the lookup is a miss and the
    transfer has ended, though their deadline is an hour away; the session goes on."""
    with running_rig() as rig, Engine(rig.path, lookup_timeout_s=HOUR_S) as engine:
        assert engine.worker.wait_ready(WAIT_S)
        keys = keys_of(1)
        assert engine.worker.lookup("r", keys).status is HitStatus.HIT
        with monkeypatch.context() as broken:

            def fail(*_: object) -> None:
                raise ZeroDivisionError

            broken.setattr(Sessions, "_route", fail)
            assert engine.worker.lookup("r", keys).status is HitStatus.MISS
            outcome = engine.worker.store("r", keys, BLOCKS).wait(HOUR_S)
            assert outcome is not None
            assert outcome.done == (False,)
            assert "internal error" in outcome.reason
        assert engine.worker.lookup("r", keys).status is HitStatus.HIT


def test_a_bug_that_stops_the_daemon_is_an_answer_at_once() -> None:
    """The core itself fails: the daemon ends rather than go on, and whoever waits learns it by the
    end of the stream, not by a deadline."""
    with running_rig() as rig, Engine(rig.path, lookup_timeout_s=HOUR_S) as engine:
        assert engine.worker.wait_ready(WAIT_S)
        waits = engine.worker.store("r", keys_of(1), BLOCKS)
        eventually(lambda: bool(rig.core.transfers))
        rig.core.error = ZeroDivisionError("a bug")
        worker = engine.worker
        worker.release("r")
        rig.join()
        outcome = waits.wait(HOUR_S)
        assert outcome is not None
        assert outcome.done == (False,)
        assert worker.lookup("r", keys_of(1)).status is HitStatus.MISS
        assert isinstance(rig.failure, Exception)
        rig.failure = None


def test_nothing_waits_while_an_engines_memory_is_slow(
    start_node: StartNode, start_engine: StartEngine, hold: Callable[[], Gate]
) -> None:
    """Field case 40: copies from one engine's memory stand still, as they do when a driver hangs.
    Figures and another engine's lookups are answered; nothing on the loop waits for a copy."""
    node = start_node(16)
    gate = hold()
    stuck, other = start_engine(node, 2, "stuck"), start_engine(node, 2, "other")
    keys = other.keys(tokens(2, 1))
    other.fill(keys)
    assert other.store(keys).leading_chunks == 2
    node.hooks.move = lambda move: gate.hold() if move.kind is MoveKind.STORE else None
    ticket = stuck.begin_store(stuck.keys(tokens(2)))
    assert gate.reached.wait(WAIT_S)
    for _ in range(100):
        assert other.hits(keys) == 2
        assert node.stats().moves_in_flight > 0
    assert not ticket.done()
    gate.open()
    outcome = ticket.wait(WAIT_S)
    assert outcome is not None
    assert outcome.leading_chunks == 2
