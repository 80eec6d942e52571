"""How a connection becomes a session, and everything that doesn't make one, with bare peers and a
scripted core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.core.messages import (
    Lookup,
    SessionID,
)
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire import FRAME_BYTES_MAX, hello
from tests.link_rig import (
    DEADLINE_S,
    Peer,
    Rig,
    eventually,
    frame,
    lookup_message,
    running_rig,
)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A running server."""
    with running_rig() as running:
        yield running


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("protocol", 2, "protocol: client 2, daemon 1"),
        ("hash_algorithm", "md5", "hash algorithm: client md5, daemon sha256/chain-v1"),
        ("golden_probe", b"", "golden probe: client none, daemon "),
    ],
)
def test_a_client_that_differs_is_refused_in_one_line_and_closed(
    rig: Rig, field: str, value: object, words: str
) -> None:
    """An engine of another version, or one that hashes otherwise, is told at once what differs
    (field cases 3 and 59)."""
    ours = hello()
    setattr(ours, field, value)
    with Peer(rig.path) as peer:
        peer.send(pb.ClientMessage(kind=pb.ClientMessage.HELLO, hello=ours))
        assert peer.answer().hello.protocol == 1
        assert words in peer.refusal()
        assert peer.receive() is None
    assert rig.core.events == []


def test_hello_names_what_the_daemon_is(rig: Rig) -> None:
    """The client can compare for itself."""
    with Peer(rig.path) as peer:
        peer.send(pb.ClientMessage(kind=pb.ClientMessage.HELLO, hello=hello()))
        assert peer.answer().hello == hello()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.ClientMessage(kind=pb.ClientMessage.ATTACH, engine="e"), "ATTACH is out of place"),
        (lookup_message(), "LOOKUP is out of place: the session is greeting"),
    ],
)
def test_nothing_goes_before_hello(rig: Rig, message: pb.ClientMessage, words: str) -> None:
    """A peer that skips the handshake is refused and may still do it."""
    with Peer(rig.path) as peer:
        peer.send(message)
        assert words in peer.refusal()
        peer.attach()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (FRAME_BYTES_MAX + 1).to_bytes(4, "little"),
        frame(b"\xff\xff\xff\xff"),
    ],
    ids=["http", "length", "message"],
)
def test_garbage_ends_the_connection_once_and_only_that(rig: Rig, garbage: bytes) -> None:
    """A peer sends what isn't the protocol: it is told so and closed; others don't notice."""
    with Peer(rig.path) as good, Peer(rig.path) as bad:
        good.attach()
        bad.attach("e2")
        bad.send_bytes(garbage)
        assert bad.refusal()
        assert bad.receive() is None
        eventually(lambda: rig.core.closed() == [SessionID(2)])
        good.send(lookup_message())
        assert good.answer().chunks == 2
    assert rig.server.call(rig.server.stats).result(DEADLINE_S).protocol_errors == 1


def test_a_message_id_that_does_not_rise_ends_the_connection(rig: Rig) -> None:
    """Two transfers of one ID could not be told apart, so the stream has lost its meaning."""
    with Peer(rig.path) as peer:
        peer.attach()
        again = pb.ClientMessage(kind=pb.ClientMessage.LOOKUP, id=1, request="r", keys=b"k" * 32)
        peer.send_bytes(frame(again.SerializeToString()))
        assert "message id 1 after 2 doesn't rise" in peer.refusal()
        assert peer.receive() is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.ClientMessage(kind=pb.ClientMessage.LOOKUP, request="r", keys=b"k"), "keys of 1 bytes"),
        (pb.ClientMessage(kind=pb.ClientMessage.UNSPECIFIED), "out of place"),
        (pb.ClientMessage(kind=42), "message kind 42"),  # type: ignore[arg-type]
        (pb.ClientMessage(kind=pb.ClientMessage.ATTACH, engine="e2"), "out of place"),
    ],
)
def test_a_malformed_message_is_refused_and_the_session_goes_on(
    rig: Rig, message: pb.ClientMessage, words: str
) -> None:
    """One bad message is one refusal; the core never sees it."""
    with Peer(rig.path) as peer:
        peer.attach()
        peer.send(message)
        assert words in peer.refusal()
        peer.send(lookup_message())
        assert peer.answer().chunks == 2
    assert len(rig.core.requests(Lookup)) == 1


def test_a_fault_before_the_core_is_one_refusal(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error while a request is read is logged, counted and answered at once."""
    with Peer(rig.path) as peer:
        peer.attach()

        def boom(message: object) -> object:
            raise ZeroDivisionError("boom")

        monkeypatch.setattr("kvstore.server_sessions.read_request", boom)
        peer.send(lookup_message())
        assert peer.refusal() == "internal error: ZeroDivisionError"
        monkeypatch.undo()
        peer.send(lookup_message())
        assert peer.answer().chunks == 2
    assert rig.server.call(rig.server.stats).result(DEADLINE_S).internal_errors == 1
