"""Registrations: memory is mapped, or nothing is left of the try."""

from __future__ import annotations

import errno
import gc
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore.core.errors import (
    LayoutMismatchError,
)
from kvstore.core.messages import (
    Refused,
    Register,
    Reply,
    Request,
    SessionID,
)
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.server_listener import Listener
from tests.link_rig import (
    DEADLINE_S,
    Peer,
    Rig,
    engine_memory,
    eventually,
    folder,
    layout,
    lookup_message,
    open_descriptors,
    register_message,
    running_rig,
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


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """In this process nothing can be opened, and no garbage of other tests frees a descriptor."""
    gc.collect()
    gc.disable()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.enable()


def test_a_registration_brings_memory_then_the_mover_then_the_core(rig: Rig, memory: int) -> None:
    """The core may send Moves as soon as it knows of the session, so the mover must know first."""
    known: list[bool] = []

    def answer(event: Request) -> list[Reply]:
        known.append(event.session in rig.mover.attached)
        return rig.core._answer(event)  # type: ignore[return-value]

    rig.core.answers[Register] = answer  # type: ignore[assignment]
    with Peer(rig.path) as peer:
        peer.greet()
        peer.register([memory])
        state = peer.answer().engine
        assert (state.engine, state.ready) == ("e1", True)
        assert known == [True]
        (request,) = rig.core.requests(Register)
        assert isinstance(request.message, Register)
        assert request.message.tenant == f"uid:{os.getuid()}"
        assert request.message.layout == layout()
    eventually(lambda: [p.closed for p in rig.pages] == [1])
    assert rig.mover.attached == {}


@pytest.mark.parametrize("count", [0, 2])
def test_a_registration_has_exactly_one_descriptor(rig: Rig, memory: int, count: int) -> None:
    """None, or one too many, is refused; what came is closed; a proper one may follow."""
    before = open_descriptors()
    with Peer(rig.path) as peer:
        peer.greet()
        peer.register([memory] * count)
        assert f"REGISTER with {count} descriptors; valid is 1" in peer.refusal()
        peer.register([memory])
        assert peer.answer().engine.ready
    eventually(lambda: open_descriptors() == before)


def test_a_daemon_that_is_out_of_descriptors_is_left_to_be_tried_again(
    rig: Rig, memory: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel drops the engine's descriptor, as the daemon can take none. That isn't the
    engine's fault, and not for ever: the connection is closed, and a later one registers."""
    with Peer(rig.path) as peer:
        peer.greet()
        with no_descriptor_left():
            peer.register([memory])
            assert peer.receive() is None
    assert "out of descriptors (RLIMIT_NOFILE" in caplog.text
    assert rig.server.call(rig.server.stats).result(DEADLINE_S).connections_refused == 1
    with Peer(rig.path) as peer:
        peer.greet()
        peer.register([memory])
        assert peer.answer().kind == pb.DaemonMessage.ENGINE


def test_connections_that_cannot_be_accepted_are_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of descriptors for hours: one line in the log, and when there are some again the peer
    that waits is served."""
    monkeypatch.setattr("kvstore.server._ACCEPT_PAUSE_S", 0.01)
    starved = threading.Event()
    tries: list[int] = []
    accept = Listener.accept

    def failing(listener: Listener) -> socket.socket | None:
        if starved.is_set():
            tries.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(Listener, "accept", failing)
    for round_number in (1, 2):
        starved.set()
        tries.clear()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
            waiting.connect(rig.path)
            eventually(lambda: len(tries) > 5)
            starved.clear()
            eventually(lambda: rig.server.stats().connections_total == round_number)  # noqa: B023
    assert caplog.text.count("no connection can be accepted") == 2


def test_descriptors_that_come_unasked_are_closed(rig: Rig, memory: int) -> None:
    """A peer sends descriptors with messages that need none: none is kept, the messages count."""
    with Peer(rig.path) as peer:
        peer.attach()
        before = open_descriptors()
        for _ in range(20):
            peer.send(lookup_message(), [memory, memory, memory])
            assert peer.answer().chunks == 2
        peer.send(lookup_message())
        assert peer.answer().chunks == 2
        assert open_descriptors() == before


def test_an_unsound_layout_is_refused_before_any_memory_is_mapped(rig: Rig, memory: int) -> None:
    """The layout says more than the memory has: one line, nothing attached, no descriptor left."""
    with Peer(rig.path) as peer:
        peer.greet()
        before = open_descriptors()
        peer.register([memory], layout(blocks=33))
        assert "but the memory has 2048 bytes" in peer.refusal()
        assert rig.pages == []
        assert open_descriptors() == before
    assert rig.core.requests(Register) == []


def test_memory_that_cannot_be_mapped_is_a_refusal(rig: Rig, memory: int) -> None:
    """The mapping says no, by an error of ours or of the system: the peer gets the reason."""
    with Peer(rig.path) as peer:
        peer.greet()
        for error, words in (
            (LayoutMismatchError("memory: not sealed"), "memory: not sealed"),
            (OSError(12, "Cannot allocate memory"), "memory: Cannot allocate memory"),
        ):

            def fail(error: Exception = error) -> None:
                raise error

            rig.opening = fail
            peer.register([memory])
            assert peer.refusal() == words
    assert rig.mover.attached == {}


def test_cuda_memory_is_refused_with_what_the_daemon_can(rig: Rig) -> None:
    """Both sides' kinds of memory are named (field case 99, in part)."""
    message = register_message(layout())
    message.register.memory.kind = pb.Memory.CUDA
    with Peer(rig.path) as peer:
        peer.greet()
        peer.send(message)
        line = peer.refusal()
    assert "host memory" in line
    assert "CUDA memory" in line


def test_a_registration_that_the_core_refuses_is_undone(rig: Rig, memory: int) -> None:
    """Another session holds the shard: the memory is unmapped, and the peer may try again."""
    rig.core.answers[Register] = lambda event: [Reply(event.session, event.id, Refused("taken"))]
    with Peer(rig.path) as peer:
        peer.greet()
        peer.register([memory])
        assert peer.refusal() == "taken"
        eventually(lambda: [p.closed for p in rig.pages] == [1])
        assert rig.mover.attached == {}
        del rig.core.answers[Register]
        peer.register([memory])
        assert peer.answer().engine.ready
        peer.register([memory])
        assert "REGISTER is out of place: the session is active" in peer.refusal()
    eventually(lambda: [p.closed for p in rig.pages] == [1, 1])
    assert rig.core.closed() == [ONE]


def test_a_peer_that_goes_while_its_memory_is_mapped_leaves_nothing(rig: Rig, memory: int) -> None:
    """An engine is killed a moment after it registered: the mapping that the thread then brings is
    undone, and the core never hears of it."""
    before = open_descriptors()
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    rig.opening = slow
    peer = Peer(rig.path)
    peer.greet()
    peer.register([memory])
    assert begun.wait(DEADLINE_S)
    peer.close()
    eventually(lambda: rig.server.stats().sessions[0].phase == "closing")
    go_on.set()
    eventually(lambda: rig.server.stats().sessions == ())
    assert [p.closed for p in rig.pages] == [1]
    assert rig.mover.attached == {}
    assert rig.core.events == []
    assert open_descriptors() == before


def test_a_stop_while_memory_is_mapped_leaves_nothing(memory: int) -> None:
    """The daemon stops while a thread still maps: what it brings is unmapped in the end."""
    with folder() as path:
        rig = Rig(str(path / "s.sock"))
        rig.start()
        begun, go_on = threading.Event(), threading.Event()

        def slow() -> None:
            begun.set()
            assert go_on.wait(DEADLINE_S)

        rig.opening = slow
        with Peer(rig.path) as peer:
            peer.greet()
            peer.register([memory])
            assert begun.wait(DEADLINE_S)
            rig.server.stop(0.0)
            rig._thread.join(DEADLINE_S)
            go_on.set()
            rig.join()
            assert peer.receive() is None
        assert [p.closed for p in rig.pages] == [1]
