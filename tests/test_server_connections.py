"""The end of a session, whatever caused it: told to the core once, and a fence to the engine."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import server_connections
from kvstore.core.messages import (
    Attach,
    Completed,
    Detach,
    Effect,
    Release,
    Reply,
    Request,
    SessionID,
)
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.server_connections import OUTGOING_BYTES_MAX, Connection
from tests.link_rig import (
    DEADLINE_S,
    Peer,
    Rig,
    engine_memory,
    eventually,
    frame,
    layout,
    lookup_message,
    open_descriptors,
    running_rig,
    store_message,
)

ROOT = Path(__file__).resolve().parent.parent
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


def test_the_stream_ends_only_after_the_core_has_detached(rig: Rig, memory: int) -> None:
    """A Move still runs when the engine says goodbye: mapping and socket stay until it has ended,
    so the end of the stream is a fence."""
    rig.core.busy.add(ONE)
    with Peer(rig.path) as peer:
        peer.greet()
        peer.register([memory])
        peer.answer()
        peer.socket.shutdown(socket.SHUT_WR)
        eventually(lambda: rig.core.closed() == [ONE])
        assert peer.is_quiet()
        assert [p.closed for p in rig.pages] == [0]
        rig.emit(Detach(ONE))
        assert peer.receive() is None
        assert [p.closed for p in rig.pages] == [1]
    assert rig.core.closed() == [ONE]


def test_what_the_core_says_after_the_peer_shut_down_still_arrives(rig: Rig) -> None:
    """A client that has shut down its own direction reads until the end: completions come
    through."""
    rig.core.busy.add(ONE)
    with Peer(rig.path) as peer:
        peer.attach()
        peer.send(store_message())
        peer.socket.shutdown(socket.SHUT_WR)
        eventually(lambda: rig.core.closed() == [ONE])
        rig.emit(Reply(ONE, 3, Completed(b"\1")), Detach(ONE))
        assert peer.answer().done == b"\1"
        assert peer.receive() is None


def test_a_descriptor_leaked_into_a_child_does_not_keep_a_dead_engine(rig: Rig) -> None:
    """An engine forks a child that inherits its connection and is then killed -9: no end of stream
    comes, but its process has ended."""
    script = (
        "import os, sys, time\n"
        "from tests.link_rig import Peer\n"
        "peer = Peer(sys.argv[1]); peer.attach()\n"
        "os.set_inheritable(peer.socket.fileno(), True)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(300)\n"
        "print(child, flush=True)\n"
        "time.sleep(300)\n"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", script, rig.path], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert engine.stdout is not None
    child = int(engine.stdout.readline())
    try:
        eventually(lambda: len(rig.core.requests(Attach)) == 1)
        assert rig.core.closed() == []
        engine.kill()
        eventually(lambda: rig.core.closed() == [ONE])
        assert Path(f"/proc/{child}").exists()
    finally:
        engine.kill()
        os.kill(child, 9)
        engine.wait()
        engine.stdout.close()
    eventually(lambda: rig.server.stats().sessions == ())


def test_killed_engines_leave_no_mapping_and_no_descriptor(rig: Rig) -> None:
    """SIGKILL 20 engines: sessions, mappings and descriptors are those of the start, and another
    engine goes on (field case 49)."""
    script = (
        "import sys, time\n"
        "from kvstore import create_host_memory\n"
        "from tests.link_rig import MEMORY_BYTES, Peer\n"
        "memory = create_host_memory('e', MEMORY_BYTES)\n"
        "peer = Peer(sys.argv[1]); peer.greet(); peer.register([memory.fd])\n"
        "assert peer.answer().engine.ready\n"
        "print('up', flush=True)\n"
        "time.sleep(300)\n"
    )
    with Peer(rig.path) as other:
        other.attach("e0")
        before = open_descriptors()
        engines = []
        for _ in range(20):
            engines.append(
                subprocess.Popen(
                    [sys.executable, "-c", script, rig.path], stdout=subprocess.PIPE, cwd=ROOT
                )
            )
            if len(engines) == 4:
                _kill_when_up(engines)
                engines = []
        eventually(lambda: len(rig.server.stats().sessions) == 1)
        assert [p.closed for p in rig.pages] == [1] * 20
        assert rig.mover.attached == {}
        eventually(lambda: open_descriptors() == before)
        other.send(lookup_message())
        assert other.answer().chunks == 2


def _kill_when_up(engines: list[subprocess.Popen[bytes]]) -> None:
    for engine in engines:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"up\n"
    for engine in engines:
        engine.kill()
        engine.wait()
        assert engine.stdout is not None
        engine.stdout.close()


def test_a_peer_that_does_not_read_is_lost_at_its_limit(rig: Rig) -> None:
    """Replies pile up for a peer that never reads: beyond the limit its session ends, and the
    daemon keeps no more of them."""
    with Peer(rig.path) as lazy, Peer(rig.path) as other:
        lazy.attach()
        other.attach("e2")
        body = Completed(b"\1" * 60_000)
        for number in range(OUTGOING_BYTES_MAX // 60_000 + 8):
            rig.emit(Reply(ONE, 1000 + number, body))
        eventually(lambda: rig.core.closed() == [ONE])
        other.send(lookup_message())
        assert other.answer().chunks == 2
        assert rig.server.stats().sessions_ended == 1


def test_sessions_of_every_ending_leave_no_garbage(rig: Rig, memory: int) -> None:
    """The daemon runs without cyclic collection: connections that were refused, closed, broken or
    never registered are freed by themselves."""
    gc.collect()
    gc.disable()
    others = {id(connection) for connection in connections()}
    try:
        for _ in range(5):
            for ending in (_register_and_close, _refused, _broken, _never_registered):
                with Peer(rig.path) as peer:
                    ending(rig, peer, memory)
        eventually(lambda: rig.server.stats().sessions == ())
        rig.server.call(lambda: None).result(DEADLINE_S)
        eventually(lambda: {id(connection) for connection in connections()} <= others)
    finally:
        gc.enable()


def connections() -> list[Connection]:
    """All that are alive in this process, those of other tests' servers included."""
    return [thing for thing in gc.get_objects() if type(thing) is Connection]


def _register_and_close(rig: Rig, peer: Peer, memory: int) -> None:
    peer.greet()
    peer.register([memory])
    assert peer.answer().engine.ready
    peer.send(lookup_message())
    assert peer.answer().chunks == 2
    peer.send(pb.ClientMessage(kind=pb.ClientMessage.LOOKUP, request="r", keys=b"k"))
    assert peer.refusal()


def _refused(rig: Rig, peer: Peer, memory: int) -> None:
    peer.greet()
    peer.register([memory], layout(blocks=33))
    assert "but the memory has" in peer.refusal()


def _broken(rig: Rig, peer: Peer, memory: int) -> None:
    peer.attach()
    peer.send_bytes(b"GET / HTTP/1.1")
    assert peer.refusal()
    assert peer.receive() is None


def _never_registered(rig: Rig, peer: Peer, memory: int) -> None:
    peer.greet()


def test_a_busy_peer_does_not_keep_the_others_waiting(rig: Rig) -> None:
    """One peer has thousands of requests in its socket: another's is answered long before they
    are."""
    with Peer(rig.path) as busy, Peer(rig.path) as other:
        busy.attach("e1")
        other.attach("e2")
        release = pb.ClientMessage(kind=pb.ClientMessage.RELEASE, request="r")
        data = b""
        for number in range(3000):
            release.id = 100 + number
            data += frame(release.SerializeToString())
        slow = threading.Event()
        answer = rig.core._answer

        def count(event: Request) -> list[Effect]:
            slow.wait(0.0005)
            return answer(event)

        rig.core.answers[Release] = count
        busy.send_bytes(data)
        other.send(lookup_message())
        assert other.answer().chunks == 2
        assert len(rig.core.requests(Release)) < 1500


def test_connections_are_limited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the limit is refused with the limit; when one leaves, the next may come."""
    monkeypatch.setattr("kvstore.server_sessions.CONNECTIONS_MAX", 2)
    with Peer(rig.path) as first, Peer(rig.path) as second, Peer(rig.path) as third:
        first.attach()
        second.greet()
        assert third.refusal() == "the daemon has 2 connections already"
        assert third.receive() is None
        first.close()
        eventually(lambda: len(rig.server.stats().sessions) == 1)
        with Peer(rig.path) as fourth:
            fourth.attach("e2")


class Deadlines:
    """Stands in for a connection's look at its deadline: early, but not before it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.look = Connection._must_have_joined
        self.may = threading.Event()
        self.passed = threading.Event()
        monkeypatch.setattr(server_connections, "JOIN_DEADLINE_S", 0.02)
        monkeypatch.setattr(Connection, "_must_have_joined", lambda peer: self.looks(peer))

    def looks(self, connection: Connection) -> None:
        """On the loop."""
        if self.may.is_set():
            self.look(connection)
            self.passed.set()
        else:
            connection._loop.call_later(0.02, self.looks, connection)


def test_a_peer_that_says_nothing_is_lost_and_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without HELLO, or without joining after it, a connection ends at its deadline; one that has
    joined lives on."""
    deadlines = Deadlines(monkeypatch)
    with Peer(rig.path) as joined, Peer(rig.path) as silent, Peer(rig.path) as greeted:
        greeted.greet()
        joined.attach()
        deadlines.may.set()
        assert silent.receive() is None
        assert greeted.receive() is None
        joined.send(lookup_message())
        assert joined.answer().chunks == 2
        eventually(lambda: rig.server.stats().joins_overdue == 2)
        assert [session.engine for session in rig.server.stats().sessions] == ["e1"]


def test_a_peer_whose_memory_is_being_mapped_is_not_overdue(
    rig: Rig, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline passes while a thread maps its memory: the peer has done its part."""
    deadlines, mapping, go_on = Deadlines(monkeypatch), threading.Event(), threading.Event()

    def opening() -> None:
        mapping.set()
        assert go_on.wait(DEADLINE_S)

    rig.opening = opening
    with Peer(rig.path) as peer:
        peer.greet()
        peer.register([memory])
        assert mapping.wait(DEADLINE_S)
        deadlines.may.set()
        assert deadlines.passed.wait(DEADLINE_S)
        go_on.set()
        assert peer.answer().engine.ready
    assert rig.server.stats().joins_overdue == 0
