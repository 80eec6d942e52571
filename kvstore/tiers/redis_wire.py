"""Wire: whole pieces of bytes over a connected socket, each by a deadline.

A plain socket blocks in the kernel with a time limit and MSG_WAITALL: one call takes a whole value
into its slot, however many segments it comes in, and no interpreter wakes up in between. A TLS
socket gives a record of at most 16 KiB a call, so it's read and written in a loop.

Deadlines are instants of ``time.monotonic`` and hold for the whole piece: a peer that drips a byte
now and then gains nothing.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias

Views: TypeAlias = Sequence[memoryview]

_TIMEVAL = struct.Struct("@ll")
_TLS_SEND_BYTES = 256 << 10
_LAST_S = 0.05
"""Of a deadline: what isn't cut up any more."""
_VECTOR_MAX = 512
"""Buffers a call; the kernel takes 1024."""


class Wire(Protocol):
    """A connection's bytes. Used by one thread at a time, but for ``cut``.

    Any OSError (TimeoutError and EOFError as ConnectionError included) leaves it in an unknown
    state: it must be closed then.
    """

    def send(self, views: Views, deadline_s: float) -> None:
        """Send all of it."""

    def receive_some(self, view: memoryview, deadline_s: float) -> int:
        """Fill the beginning of ``view`` with at least one byte; how many."""

    def receive(self, views: Views, deadline_s: float) -> None:
        """Fill all of it."""

    def is_quiet(self) -> bool:
        """Whether the peer neither hung up nor sent anything that nobody waits for."""

    def cut(self) -> None:
        """End it from any thread; whoever waits for it gets an error at once."""

    def close(self) -> None:
        """Let go of it."""


def wire_of(sock: socket.socket) -> Wire:
    """The wire over a connected socket, which belongs to it from then on."""
    return TlsWire(sock) if isinstance(sock, ssl.SSLSocket) else PlainWire(sock)


class PlainWire:
    """A TCP or Unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._limits_s = {socket.SO_SNDTIMEO: 0.0, socket.SO_RCVTIMEO: 0.0}
        sock.settimeout(None)

    def send(self, views: Views, deadline_s: float) -> None:
        """One sendmsg, mostly."""
        left = list(views)
        while left:
            self._limit(socket.SO_SNDTIMEO, deadline_s)
            try:
                done = self._socket.sendmsg(left[:_VECTOR_MAX])
            except BlockingIOError:
                continue
            left = _after(left, done)

    def receive_some(self, view: memoryview, deadline_s: float) -> int:
        """One recv_into."""
        while True:
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            try:
                return _some(self._socket.recv_into(view))
            except BlockingIOError:
                continue

    def receive(self, views: Views, deadline_s: float) -> None:
        """One recvmsg_into, mostly."""
        left = _after(views, 0)
        while left:
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            try:
                done = self._socket.recvmsg_into(left[:_VECTOR_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            left = _after(left, _some(done))

    def is_quiet(self) -> bool:
        """One poll."""
        return not _readable(self._socket)

    def cut(self) -> None:
        """Shut it down."""
        _shut(self._socket)

    def close(self) -> None:
        """Shut it down and close it."""
        _shut(self._socket)
        self._socket.close()

    def _limit(self, option: int, deadline_s: float) -> None:
        """Let the next call end by the deadline. A limit that is shorter wakes it up early and
        costs nothing where nobody is late, so it mostly stays as it is."""
        left_s = _left_s(deadline_s)
        if left_s / 16 <= self._limits_s[option] <= left_s:
            return
        limit_s = self._limits_s[option] = left_s / 4 if left_s > _LAST_S else left_s
        seconds, part = divmod(limit_s, 1.0)
        # A limit of nothing would mean none.
        timeval = _TIMEVAL.pack(int(seconds), max(1, int(part * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)


class TlsWire:
    """A TLS socket, whose handshake is over."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock

    def send(self, views: Views, deadline_s: float) -> None:
        """Records, in pieces that a deadline can stop."""
        for view in views:
            for start in range(0, view.nbytes, _TLS_SEND_BYTES):
                self._socket.settimeout(_left_s(deadline_s))
                self._socket.sendall(view[start : start + _TLS_SEND_BYTES])

    def receive_some(self, view: memoryview, deadline_s: float) -> int:
        """At most a record."""
        self._socket.settimeout(_left_s(deadline_s))
        return _some(self._socket.recv_into(view))

    def receive(self, views: Views, deadline_s: float) -> None:
        """Record after record."""
        for view in views:
            done = 0
            while done < view.nbytes:
                done += self.receive_some(view[done:], deadline_s)

    def is_quiet(self) -> bool:
        """What is there may be TLS's own (session tickets): only a look tells."""
        if not self._socket.pending() and not _readable(self._socket):
            return True
        self._socket.settimeout(0.0)
        try:
            self._socket.recv(1)
        except ssl.SSLWantReadError:
            return True
        except OSError:
            return False
        return False

    def cut(self) -> None:
        """Shut the socket below down: TLS's own state belongs to the thread that uses it."""
        _shut(self._socket)

    def close(self) -> None:
        """Shut it down and close it."""
        _shut(self._socket)
        self._socket.close()


def _after(views: Views, done: int) -> list[memoryview]:
    """What is left of ``views`` behind ``done`` bytes; without empty ones."""
    left = []
    for view in views:
        if done < view.nbytes:
            left.append(view[done:] if done else view)
        done = max(0, done - view.nbytes)
    return left


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline is over")
    return left_s


def _some(done: int) -> int:
    if not done:
        raise ConnectionResetError("the server closed the connection")
    return done


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _shut(sock: socket.socket) -> None:
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return
