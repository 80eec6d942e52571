"""The core's driver: effects, events from other threads, administration, stop and bugs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import (
    InvariantError,
    SessionLostError,
)
from kvstore.core.messages import (
    Attach,
    Clear,
    Cleared,
    Move,
    Moved,
    MoveID,
    MoveKind,
    MoveStatus,
    Persist,
    Persisted,
    Reply,
    SessionID,
)
from kvstore.proto_gen import engine_pb2 as pb
from tests.link_rig import (
    DEADLINE_S,
    Peer,
    Rig,
    admin_answer,
    engine_memory,
    eventually,
    folder,
    lookup_message,
    running_rig,
    store_message,
)

ONE = SessionID(1)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A running server."""
    with running_rig() as running:
        yield running


@pytest.fixture
def memory() -> Iterator[int]:
    """An engine's memory."""
    with engine_memory() as descriptor:
        yield descriptor


def test_effects_reach_the_hands_and_events_come_back_in_order(rig: Rig) -> None:
    """Moves go to the mover; what its threads report arrives at the core, none lost."""
    move = Move(MoveID(1), MoveKind.LOAD, None, None, None)  # type: ignore[arg-type]
    rig.emit(move)
    eventually(lambda: rig.mover.moves == [move])

    def report(first: int) -> None:
        for number in range(first, first + 500):
            rig.server.post(Moved(MoveID(number), MoveStatus.OK))

    reports = [threading.Thread(target=report, args=(first,)) for first in (0, 1000, 2000)]
    for thread in reports:
        thread.start()
    for thread in reports:
        thread.join()
    eventually(lambda: len(rig.core.events) == 1500)
    numbers = [event.move for event in rig.core.events if isinstance(event, Moved)]
    for first in (0, 1000, 2000):
        mine = [n for n in numbers if first <= n < first + 1000]
        assert mine == list(range(first, first + 500))


def test_persists_that_wait_are_made_durable_as_one(rig: Rig) -> None:
    """While one is being written 200 engines with new models register. Each Persist replaces the
    whole, so only the newest is written, and its number stands for all: neither memory nor a stop
    grows with how many came."""
    done: list[int] = []
    free = threading.Event()

    def persist(effect: Persist) -> None:
        done.append(effect.number)
        assert free.wait(DEADLINE_S)

    rig.persisting = persist
    rig.emit(Persist(1, ()))
    eventually(lambda: done == [1])
    rig.emit(*(Persist(number, ()) for number in range(2, 202)))
    eventually(lambda: not rig.core.queued)
    rig.server.call(lambda: None).result(DEADLINE_S)
    free.set()
    eventually(lambda: len(rig.core.events) == 2)
    assert done == [1, 201]
    assert rig.core.events == [Persisted(1), Persisted(201)]


def test_persist_that_fails_is_reported_and_the_next_one_still_written(rig: Rig) -> None:
    """The disk is full for a while: the core learns why, and tries again later."""

    def persist(effect: Persist) -> None:
        if effect.number == 2:
            raise OSError(28, "No space left on device")

    rig.persisting = persist
    for number in (1, 2, 3):
        rig.emit(Persist(number, ()))
        eventually(lambda number=number: len(rig.core.events) == number)  # type: ignore[misc]
    events = [e for e in rig.core.events if isinstance(e, Persisted)]
    assert [(e.number, bool(e.error)) for e in events] == [(1, False), (2, True), (3, False)]
    assert "No space left on device" in events[1].error


def test_persist_with_a_bug_stops_the_daemon() -> None:
    """An error that nobody expected says nothing about what is on disk. It ends the daemon as a
    broken invariant does, so that the folder isn't marked as cleanly left."""
    with folder() as path:
        rig = Rig(str(path / "s.sock"))
        rig.start()

        def persist(effect: Persist) -> None:
            raise ZeroDivisionError("a bug")

        rig.persisting = persist
        rig.emit(Persist(1, ()))
        rig._thread.join(DEADLINE_S)
        rig.join()
        assert isinstance(rig.failure, InvariantError)
        assert "ZeroDivisionError('a bug')" in str(rig.failure)


def test_the_administration_waits_for_its_answer(rig: Rig) -> None:
    """A clear is answered when the core says so, and errors come out as themselves."""
    rig.core.answers[Clear] = lambda event: [Reply(event.session, event.id, Cleared(1, 2))]
    assert admin_answer(rig, Clear(None, None)) == Cleared(1, 2)
    rig.core.answers[Clear] = lambda event: []
    waiting = rig.server.admin(Clear(None, None))
    eventually(lambda: len(rig.core.requests(Clear)) == 2)
    with pytest.raises(ZeroDivisionError):
        rig.server.call(lambda: 1 // 0).result(DEADLINE_S)
    rig.stop()
    with pytest.raises(SessionLostError):
        waiting.result(DEADLINE_S)
    with pytest.raises(SessionLostError):
        rig.server.call(lambda: 1).result(DEADLINE_S)


def test_an_answer_that_nobody_waits_for_any_more_harms_nothing(rig: Rig) -> None:
    """An administrator's deadline passes while the loop is busy: the call is dropped before it
    begins, or answered to nobody; either way the daemon goes on."""
    free = threading.Event()
    busy = rig.server.call(lambda: free.wait(DEADLINE_S))
    eventually(busy.running)
    dropped = rig.server.call(lambda: 1)
    assert dropped.cancel()
    assert not busy.cancel()
    free.set()
    assert busy.result(DEADLINE_S)
    assert rig.server.call(lambda: 2).result(DEADLINE_S) == 2


def test_a_stop_drains_then_ends_every_session(memory: int) -> None:
    """While Moves run the daemon waits for them, refuses new work but takes cancels; then every
    session is detached and the socket file is gone."""
    with folder() as path:
        rig = Rig(str(path / "s.sock"))
        rig.start()
        rig.core.moves = 1
        with Peer(rig.path) as peer:
            peer.greet()
            peer.register([memory])
            peer.answer()
            peer.send(store_message())
            eventually(lambda: bool(rig.core.transfers))
            rig.server.stop(DEADLINE_S)
            eventually(lambda: not Path(rig.path).exists())
            peer.send(lookup_message())
            assert peer.refusal() == "the daemon is stopping"
            peer.send(pb.ClientMessage(kind=pb.ClientMessage.CANCEL, transfer=3))
            assert peer.answer().kind == pb.DaemonMessage.DONE
            assert peer.answer().cancelled
            assert rig.core.closed() == []
            rig.core.moves = 0
            assert peer.receive() is None
            rig.join()
        assert rig.core.closed() == [ONE]
        assert [p.closed for p in rig.pages] == [1]
        assert not Path(rig.path).exists()
        assert rig.failure is None


def test_a_stop_leaves_streams_open_whose_moves_run_on(memory: int) -> None:
    """A Move hangs beyond the drain: run returns, but the engine sees no end of stream until the
    mover has stopped and the server is closed."""
    with folder() as path:
        rig = Rig(str(path / "s.sock"))
        rig.start()
        rig.core.busy.add(ONE)
        rig.core.moves = 1
        with Peer(rig.path) as peer:
            peer.greet()
            peer.register([memory])
            peer.answer()
            rig.server.stop(0.0)
            rig._thread.join(DEADLINE_S)
            assert not rig._thread.is_alive()
            assert [p.closed for p in rig.pages] == [0]
            assert peer.is_quiet()
            rig.join()
            assert peer.receive() is None
            assert [p.closed for p in rig.pages] == [1]


def test_figures_tell_who_is_connected_and_how_long_lookups_take(rig: Rig) -> None:
    """Statistics name each session and count its bytes."""
    with Peer(rig.path) as peer:
        peer.attach()
        peer.send(lookup_message())
        peer.answer()
        figures = rig.server.call(rig.server.stats).result(DEADLINE_S)
    (session,) = figures.sessions
    assert (session.engine, session.role, session.phase) == ("e1", "scheduler", "active")
    assert session.sent_bytes > 0
    assert figures.lookup.count == 1


def test_a_credential_names_the_tenant(rig: Rig) -> None:
    """The tenant is the server's to say, never the client's."""
    with Peer(rig.path) as peer:
        peer.greet()
        peer.send(pb.ClientMessage(kind=pb.ClientMessage.ATTACH, engine="e", credential="secret"))
        peer.answer()
    (request,) = rig.core.requests(Attach)
    assert request.message == Attach("e", "secret")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvariantError("two chunks in one slot"), "two chunks in one slot"),
        (ZeroDivisionError("boom"), "server: ZeroDivisionError('boom')"),
    ],
)
def test_a_bug_in_the_core_stops_the_daemon(error: Exception, said: str) -> None:
    """A bug of the core, broken invariant or any other error, is never served over: the event was
    left half done. run raises it, and the peers' streams stay open until nothing can move."""
    with folder() as path:
        rig = Rig(str(path / "s.sock"))
        rig.start()
        with Peer(rig.path) as peer:
            peer.attach()
            rig.core.error = error
            peer.send(lookup_message())
            rig._thread.join(DEADLINE_S)
            assert isinstance(rig.failure, InvariantError)
            assert str(rig.failure) == said
            assert peer.is_quiet()
            rig.join()
            assert peer.receive() is None
