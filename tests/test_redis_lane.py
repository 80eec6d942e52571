"""Lane over a pair of sockets: replies in any pieces, cut anywhere, too many, and dripping."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.redis_lane import Lane, LaneBrokenError, ReplyError
from kvstore.tiers.redis_wire import Views

TIMEOUT_S = 30.0
VALUE = bytes(range(256)) * 40


class Landed:
    """Takes a value in two buffers; counts what landed."""

    def __init__(self) -> None:
        self.value = bytearray()
        self.seen = 0

    def place(self, nbytes: int) -> Views:
        self.value = bytearray(nbytes)
        view = memoryview(self.value)
        cut = min(nbytes, 4096)
        return [view[:cut], view[cut:]] if cut < nbytes else [view]

    def landed(self, view: memoryview) -> None:
        self.seen += view.nbytes


@contextlib.contextmanager
def lane(timeout_s: float = TIMEOUT_S) -> Iterator[tuple[Lane, socket.socket]]:
    """A lane, and its peer's socket."""
    ours, peer = socket.socketpair()
    made = Lane(cast(Any, SimpleNamespace(_sock=ours)), timeout_s)
    try:
        yield made, peer
    finally:
        made.close()
        peer.close()


@contextlib.contextmanager
def answering(peer: socket.socket, pieces: list[bytes]) -> Iterator[None]:
    """The peer sends these, then hangs up."""

    def send() -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                peer.sendall(piece)
            peer.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def cut(data: bytes, at: list[int]) -> list[bytes]:
    bounds = [0, *sorted(n % (len(data) + 1) for n in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds) if a < b]


REPLY = b"$%d\r\n%s\r\n" % (len(VALUE), VALUE)


@settings(deadline=None, max_examples=60)
@given(at=st.lists(st.integers(0, len(REPLY)), max_size=6), nbytes=st.integers(0, len(VALUE)))
def test_a_value_comes_in_any_pieces(at: list[int], nbytes: int) -> None:
    """The line, the header and the payload may be cut anywhere."""
    value = VALUE[:nbytes]
    reply = b"$%d\r\n%s\r\n" % (nbytes, value)
    with lane() as (made, peer), answering(peer, cut(reply, at)):
        landed = Landed()
        assert made.get(b"name", landed) == nbytes
        assert bytes(landed.value) == value
        assert landed.seen == nbytes


@settings(deadline=None, max_examples=60)
@given(kept=st.integers(0, len(REPLY) - 1))
def test_a_value_that_is_cut_breaks_the_lane(kept: int) -> None:
    """Never a value that isn't whole."""
    with (
        lane() as (made, peer),
        answering(peer, [REPLY[:kept]]),
        pytest.raises(ConnectionError),
    ):
        made.get(b"name", Landed())


@pytest.mark.parametrize(
    "reply",
    [
        b":7\r\n",
        b"+OK\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$99999999999999\r\n",
        b"$3\r\nabcd\r\n",
        b"$3\r\nabcde",
        b"$3\r\nabc\r\n+OK\r\n",
        b"$-1\r\n+OK\r\n",
        b"-ERR a\r\n+OK\r\n",
        b"HTTP/1.1 400 Bad Request, which has no end of a line for long",
        b"x" * 5000,
    ],
)
def test_what_is_no_value_breaks_the_lane(reply: bytes) -> None:
    """Other types, lengths that aren't, and more than was asked for."""
    with (
        lane() as (made, peer),
        answering(peer, [reply]),
        pytest.raises(LaneBrokenError),
    ):
        made.get(b"name", Landed())


def test_errors_and_absence_leave_the_lane_intact() -> None:
    """They are replies like others."""
    pieces = [b"$-1\r\n", b"-MOVED 3 h:1\r\n", b"+OK\r\n", b"-OOM full\r\n"]
    with lane() as (made, peer):
        peer.sendall(pieces[0])
        assert made.get(b"name", Landed()) is None
        peer.sendall(pieces[1])
        with pytest.raises(ReplyError) as caught:
            made.get(b"name", Landed())
        assert caught.value.code == "MOVED"
        peer.sendall(pieces[2])
        made.set(b"name", [memoryview(b"value")], 0)
        peer.sendall(pieces[3])
        with pytest.raises(ReplyError, match="OOM full"):
            made.set(b"name", [memoryview(b"value")], 5)
        assert made.is_quiet()
        sent = peer.recv(10_000)
    get = b"*2\r\n$3\r\nGET\r\n$4\r\nname\r\n"
    put = b"$3\r\nSET\r\n$4\r\nname\r\n$5\r\nvalue\r\n"
    assert sent == get + get + b"*3\r\n" + put + b"*5\r\n" + put + b"$2\r\nPX\r\n$1\r\n5\r\n"


@settings(deadline=None, max_examples=40)
@given(at=st.lists(st.integers(0, 60), max_size=6))
def test_small_replies_come_in_any_pieces(at: list[int]) -> None:
    """All of a batch, errors among them; then exactly nothing more."""
    data = b":1\r\n$2\r\nab\r\n$-1\r\n-ERR no\r\n*2\r\n:1\r\n$1\r\nx\r\n+OK\r\n"
    with lane() as (made, peer), answering(peer, cut(data, at)):
        one, text, nothing, error, several, ok = made.replies(6)
        assert (one, text, nothing, several, ok) == (1, b"ab", None, [1, b"x"], b"OK")
        assert isinstance(error, ReplyError)


def test_more_replies_than_questions_break_the_lane() -> None:
    """Whose answer would the next one be?"""
    with (
        lane() as (made, peer),
        answering(peer, [b":1\r\n:2\r\n"]),
        pytest.raises(LaneBrokenError),
    ):
        made.call([(b"EXISTS", b"x")])


def test_a_lane_with_something_unread_is_not_quiet() -> None:
    """Field case 54: an answer that comes late, or a peer that hung up."""
    with lane() as (made, peer):
        assert made.is_quiet()
        peer.sendall(b"+OK\r\n")
        assert not made.is_quiet()
    with lane() as (made, peer):
        peer.close()
        assert not made.is_quiet()


@pytest.mark.parametrize("reply", [REPLY, b":1\r\n"])
def test_a_dripping_peer_meets_the_deadline(reply: bytes) -> None:
    """Each byte is progress; the exchange's time is over all the same."""
    stop = threading.Event()
    with lane(0.3) as (made, peer):

        def drip() -> None:
            for at in range(len(reply) - 1):
                if stop.wait(0.05):
                    return
                with contextlib.suppress(OSError):
                    peer.sendall(reply[at : at + 1])

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError):
            made.get(b"name", Landed()) if reply is REPLY else made.replies(1)
        stop.set()
        thread.join()


def test_a_peer_that_takes_nothing_meets_the_deadline() -> None:
    """A value that can't be sent."""
    with lane(0.3) as (made, _), pytest.raises(TimeoutError):
        made.set(b"name", [memoryview(bytes(64 << 20))], 0)


def test_cut_ends_a_wait() -> None:
    """From another thread, at once."""
    with lane(600.0) as (made, peer):
        ended: list[type[BaseException]] = []

        def wait() -> None:
            with pytest.raises(ConnectionError) as caught:
                made.get(b"name", Landed())
            ended.append(caught.type)

        thread = threading.Thread(target=wait)
        thread.start()
        assert peer.recv(100)
        made.cut()
        thread.join()
        assert ended
