"""RedisNode over pairs of sockets: what breaks a lane, what opens the breaker, what closes it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.core.errors import TierUnavailableError
from kvstore.tiers.redis_errors import AUTH_FAILED, AuthFailedError
from kvstore.tiers.redis_lane import Lane, ReplyError
from kvstore.tiers.redis_node import CONNECTING, FAILURES_MAX, NodeLimits, RedisNode
from tests.redis_rig import wait_until

SERVER = ("127.0.0.1", 1)


class Peers:
    """Makes lanes, whose peers' sockets it keeps; ``error`` is raised instead while it's set."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.sockets: list[socket.socket] = []
        self.error: TierUnavailableError | None = None
        self.tries = 0
        self.changes: list[bool] = []
        self.node = RedisNode(SERVER, self.connect, self.connect, NodeLimits(2, 0.3), self.changed)

    def connect(self) -> Lane:
        self.tries += 1
        if self.error is not None:
            raise self.error
        ours, peer = socket.socketpair()
        self.sockets.append(peer)
        return Lane(cast(Any, SimpleNamespace(_sock=ours)), self.timeout_s)

    def changed(self) -> None:
        self.changes.append(self.node.is_up)


@pytest.fixture
def make() -> Iterator[Callable[..., Peers]]:
    made: list[Peers] = []

    def one(**settings: float) -> Peers:
        peers = Peers(**settings)
        made.append(peers)
        peers.node.check(lambda lane: None)
        return peers

    yield one
    for peers in made:
        peers.node.close()
        for peer in peers.sockets:
            peer.close()


def exchange(peers: Peers, reply: bytes | None) -> object:
    """One PING on the newest lane, with this reply of the peer, or none."""
    with peers.node.lane() as lane:
        if reply is not None:
            peers.sockets[-1].sendall(reply)
        return lane.ask((b"PING",))


def test_it_starts_down_and_a_check_brings_it_up() -> None:
    """Nobody connects before the tier's thread did; its lane is then used."""
    peers = Peers()
    with pytest.raises(TierUnavailableError, match=CONNECTING), peers.node.lane():
        pass
    assert (peers.tries, peers.node.is_up) == (0, False)
    peers.node.check(lambda lane: None)
    assert (peers.node.is_up, peers.changes) == (True, [True])
    assert exchange(peers, b"+PONG\r\n") == b"PONG"
    assert peers.tries == 1
    peers.node.close()
    peers.sockets[0].close()


def test_a_lane_that_missed_its_reply_is_never_used_again(make: Callable[..., Peers]) -> None:
    """The reply may still come, and would answer another question."""
    peers = make(timeout_s=0.2)
    with pytest.raises(TierUnavailableError, match="in time"):
        exchange(peers, None)
    with contextlib.suppress(OSError):
        peers.sockets[0].sendall(b"+LATE\r\n")
    peers.timeout_s = 30.0
    with peers.node.lane() as lane:
        peers.sockets[1].sendall(b"+PONG\r\n")
        assert lane.ask((b"PING",)) == b"PONG"
    assert peers.tries == 2
    # The timeout and the hang-up of the former.
    peers.sockets[0].recv(100)
    assert peers.sockets[0].recv(100) == b""


def test_three_failures_in_a_row_open_the_breaker(make: Callable[..., Peers]) -> None:
    """A success in between counts them anew; open, nobody connects; a check closes it."""
    peers = make()
    for reply in (b"x\r\n", b"x\r\n", b"+PONG\r\n", b"x\r\n", b"x\r\n"):
        with contextlib.suppress(TierUnavailableError), peers.node.lane() as lane:
            peers.sockets[-1].sendall(reply)
            lane.ask((b"PING",))
    assert peers.node.is_up
    with pytest.raises(TierUnavailableError):
        exchange(peers, b"x\r\n")
    assert not peers.node.is_up
    tries = peers.tries
    for _ in range(100):
        with pytest.raises(TierUnavailableError, match="is down"):
            exchange(peers, None)
    assert peers.tries == tries
    assert peers.node.stats().openings == 1
    peers.node.check(lambda lane: None)
    assert peers.node.is_up
    assert peers.changes == [True, False, True]


def test_errors_of_a_server_that_works_do_not_count(make: Callable[..., Peers]) -> None:
    """Full, moved, no right: replies like others. Those of a server that doesn't serve count."""
    peers = make()
    for text in (b"OOM", b"MOVED 1 h:1", b"NOPERM x", b"WRONGTYPE x") * FAILURES_MAX:
        with pytest.raises(ReplyError):
            exchange(peers, b"-%s\r\n" % text)
    assert (peers.node.is_up, peers.tries) == (True, 1)
    for _ in range(FAILURES_MAX):
        with pytest.raises(ReplyError):
            exchange(peers, b"-LOADING x\r\n")
    assert not peers.node.is_up


def test_refused_credentials_open_it_at_once(make: Callable[..., Peers]) -> None:
    """There is nothing to try again."""
    peers = make()
    with pytest.raises(ReplyError):
        exchange(peers, b"-NOAUTH Authentication required.\r\n")
    assert peers.node.stats().reason == AUTH_FAILED
    peers.error = AuthFailedError("redis: h: auth failed")
    peers.node.check(lambda lane: None)
    assert peers.node.stats().reason == AUTH_FAILED


def test_a_check_that_fails_leaves_it_down() -> None:
    """It connects and then doesn't serve."""
    peers = Peers()

    def test(lane: Lane) -> None:
        peers.sockets[-1].sendall(b"-LOADING the data set\r\n")
        lane.ask((b"PING",))

    peers.node.check(test)
    assert not peers.node.is_up
    assert "LOADING" in peers.node.stats().reason
    assert peers.sockets[-1].recv(100)
    assert peers.sockets[-1].recv(100) == b""
    peers.sockets[-1].close()


def test_a_node_that_was_closed_stays_so() -> None:
    """Also where a check was under way."""
    peers = Peers()
    peers.node.check(lambda lane: peers.node.close())
    assert not peers.node.is_up
    with pytest.raises(TierUnavailableError, match="closed"), peers.node.lane():
        pass
    assert peers.sockets[0].recv(100) == b""
    peers.sockets[0].close()


def test_waits_end_and_are_counted(make: Callable[..., Peers]) -> None:
    """Two lanes are in use: who comes third waits for one of them, for so long at most; that isn't
    a failure of the server."""
    peers = make()
    with peers.node.lane(), peers.node.lane():
        for _ in range(FAILURES_MAX):
            with pytest.raises(TierUnavailableError, match="free in time"), peers.node.lane():
                pass
    stats = peers.node.stats()
    assert (stats.reason, stats.lanes, stats.waits, peers.tries) == ("", 2, FAILURES_MAX, 2)
    assert stats.wait_s > 0


def test_who_waits_gets_the_next_free_lane(make: Callable[..., Peers]) -> None:
    """As soon as it is given back."""
    peers = make()
    got = threading.Event()

    def third() -> None:
        with peers.node.lane():
            got.set()

    with peers.node.lane():
        with peers.node.lane():
            thread = threading.Thread(target=third)
            thread.start()
            wait_until(lambda: peers.node.stats().waits, "the third waits")
        thread.join()
    assert got.is_set()


def test_a_connect_that_fails_gives_its_room_back(make: Callable[..., Peers]) -> None:
    """Else the pool would shrink with every failure."""
    peers = make()
    with peers.node.lane():
        peers.error = TierUnavailableError("redis: refused")
        for _ in range(FAILURES_MAX - 1):
            with pytest.raises(TierUnavailableError, match="refused"), peers.node.lane():
                pass
        peers.error = None
        with peers.node.lane():
            assert peers.node.stats().lanes == 2


def test_a_named_server_is_trusted_once() -> None:
    """A redirection names a server that nobody tried: it's used at once. One that is known to be
    down stays down."""
    peers = Peers()
    peers.node.trust()
    with peers.node.lane():
        assert peers.tries == 1
    peers.error = TierUnavailableError("redis: refused")
    peers.node.check(lambda lane: None)
    peers.node.trust()
    assert not peers.node.is_up
    peers.node.close()
    peers.sockets[0].close()
