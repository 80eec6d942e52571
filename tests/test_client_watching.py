"""What a session is told of chunks that come and leave: at a daemon that says what the test wants,
and at a real one that is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore import ChunkChange, ChunkChanges, Client, SchedulerSession, Shard, TierName
from kvstore import create_host_memory as create
from kvstore.core.changes import Changes
from kvstore.core.messages import LOCAL_TIERS, Refused
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire_messages import write_reply
from tests.client_rig import BareDaemon, bare_daemon, keys_of
from tests.conftest import StartDaemon
from tests.link_rig import DEADLINE_S, MEMORY_BYTES, SPACE, eventually, layout

KEY = keys_of(1)[0]
THERE = ChunkChange(KEY, TierName.HOST, True)
GONE = ChunkChange(KEY, TierName.NVME, False)
WATCH = pb.ClientMessage.WATCH


@pytest.fixture
def bare() -> Iterator[BareDaemon]:
    """A bare daemon."""
    with bare_daemon() as daemon:
        yield daemon


@pytest.fixture
def session(bare: BareDaemon) -> Iterator[SchedulerSession]:
    """A scheduler's session at it."""
    with Client(bare.path, connect_timeout_s=0.01) as client:
        found = client.attach("e1")
        bare.welcome()
        eventually(lambda: found.state().ready)
        yield found


def told(session: SchedulerSession, wanted: Callable[[ChunkChanges], bool]) -> ChunkChanges:
    """The next changes that are as wanted; everything before must be nothing."""
    found: list[ChunkChanges] = []

    def has_come() -> bool:
        found.append(session.changes())
        return wanted(found[-1])

    eventually(has_come)
    assert not any(before.changes for before in found[:-1])
    return found[-1]


def test_one_question_is_under_way_and_nothing_is_waited_for(
    bare: BareDaemon, session: SchedulerSession
) -> None:
    """Calls without an answer send nothing more; the next question goes out with an answer."""
    for _ in range(3):
        assert session.changes() == ChunkChanges()
    first = bare.receive()
    assert first.kind == WATCH
    bare.send(write_reply(first.id, Changes(KEY + KEY, b"\1\2", True)))
    assert told(session, lambda c: c.resync) == ChunkChanges((THERE, GONE), True)
    assert session.changes() == ChunkChanges()
    second = bare.receive()
    assert (second.kind, second.id) == (WATCH, first.id + 1)
    session.release("r")
    assert bare.receive().kind == pb.ClientMessage.RELEASE


@pytest.mark.parametrize(("keys", "kinds"), [(KEY[:31], b"\1"), (KEY, b"\1\1"), (KEY, b"\x08")])
def test_an_answer_that_makes_no_sense_is_a_resync(
    bare: BareDaemon, session: SchedulerSession, keys: bytes, kinds: bytes
) -> None:
    """Nothing of it is believed, and nothing before."""
    session.changes()
    bare.send(write_reply(bare.receive().id, Changes(keys, kinds, False)))
    assert told(session, lambda c: c.resync) == ChunkChanges(resync=True)


def test_a_daemon_that_cannot_tell_is_asked_once(
    bare: BareDaemon, session: SchedulerSession
) -> None:
    """An older one refuses the message; the session goes on without."""
    session.changes()
    bare.send(write_reply(bare.receive().id, Refused("message kind 10 isn't one")))
    for _ in range(3):
        assert session.changes() == ChunkChanges()
    session.release("r")
    assert bare.receive().kind == pb.ClientMessage.RELEASE


def test_a_lost_daemon_voids_what_it_told_and_is_asked_again(
    bare: BareDaemon, session: SchedulerSession
) -> None:
    """The first call after the loss says so, once; the next connection begins anew."""
    session.changes()
    bare.send(write_reply(bare.receive().id, Changes(KEY, b"\1", True)))
    told(session, lambda c: c.resync)
    bare.receive()
    bare.hang_up()
    assert told(session, lambda c: c.resync) == ChunkChanges(resync=True)
    assert session.changes() == ChunkChanges()
    bare.welcome()
    eventually(lambda: session.state().ready)
    assert session.changes() == ChunkChanges()
    assert bare.receive().kind == WATCH


def test_a_real_daemon_tells_what_is_stored_and_what_a_clear_took(
    start_daemon: StartDaemon,
) -> None:
    """In host memory and on NVMe; after the clear nothing counts any more."""
    daemon = start_daemon()
    with create("engine", MEMORY_BYTES) as memory, Client(daemon.socket) as client:
        worker = client.register("e1", SPACE, layout(), memory.describe(), Shard())
        scheduler = client.attach("e1")
        assert worker.wait_ready(DEADLINE_S)
        assert scheduler.wait_ready(DEADLINE_S)
        told(scheduler, lambda c: c.resync)
        keys = worker.keys(range(100))[:2]
        blocks = {"full": range(len(keys) * layout().blocks_per_chunk(0))}
        assert worker.store("r", keys, blocks).wait(DEADLINE_S) is not None
        seen: list[ChunkChange] = []

        def complete() -> bool:
            seen.extend(scheduler.changes().changes)
            return len(seen) >= 2 * len(keys)

        eventually(complete)
        assert {(c.key, c.tier, c.present) for c in seen} == {
            (key, tier, True) for key in keys for tier in LOCAL_TIERS
        }
        assert daemon.kvstore("clear", "--all", "--yes").returncode == 0
        assert told(scheduler, lambda c: c.resync) == ChunkChanges(resync=True)
        assert daemon.stats()["traffic"]["watchers"] == 1
        client.close()
