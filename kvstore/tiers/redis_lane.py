"""Lane: one connection that redis-py set up and authenticated, then spoken to directly.

redis-py connects: addresses, TLS, ACL, database, its own deadline. From then on only this module
uses the socket, since redis-py copies a value three times on its way: here a bulk reply is read
straight into its slot, and a value is sent from where it lies. Small replies are parsed by hiredis.

A lane on which anything went wrong but an error *reply* is broken: what comes next on it may belong
to another question. Its owner closes it and never uses it again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

from kvstore.tiers.redis_driver import (
    TcpConnection,
    TlsConnection,
    UnixDomainSocketConnection,
    hiredis,
)
from kvstore.tiers.redis_wire import Views, Wire, wire_of

Word: TypeAlias = bytes | int
Command: TypeAlias = Sequence[Word]
Reply: TypeAlias = "bytes | int | ReplyError | list[Reply] | None"
AnyConnection: TypeAlias = TcpConnection | TlsConnection | UnixDomainSocketConnection

HEAD_BYTES = 4096
_LINE_BYTES = 32
"""Room for the longest line before a value."""
_ERROR_BYTES_MAX = 4096
_REPLY_PIECE_BYTES = 64 << 10
_CRLF = b"\r\n"


class Landing(Protocol):
    """Where a value lands, and what is done with it as it does."""

    def place(self, nbytes: int) -> Views:
        """Buffers that hold a value of so many bytes together. What it raises breaks the lane."""

    def landed(self, view: memoryview) -> None:
        """One of them is full. More arrives meanwhile."""


class ReplyError(Exception):
    """An error that the server replied. The lane is intact. ``code`` is its first word, as
    ``MOVED`` or ``OOM``."""

    @property
    def code(self) -> str:
        """The first word."""
        return str(self).partition(" ")[0]


class LaneBrokenError(ConnectionError):
    """What came isn't a reply of this protocol."""


class Lane:
    """A connection of its own, used by one thread at a time.

    Raises OSError (LaneBrokenError and TimeoutError are) where it is broken from then on.
    """

    def __init__(self, connection: AnyConnection, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._connection = connection
        """Holds the socket: redis-py closes it when its connection is collected."""
        sock = cast("socket.socket | None", connection._sock)
        if sock is None:
            raise LaneBrokenError("redis-py gave no connected socket")
        self._wire: Wire = wire_of(sock)
        self._scratch = memoryview(bytearray(_LINE_BYTES + HEAD_BYTES))
        self._piece = memoryview(bytearray(_REPLY_PIECE_BYTES))
        self._reader = hiredis.Reader(protocolError=LaneBrokenError, replyError=ReplyError)

    def begin(self) -> None:
        """An exchange begins: it has ``timeout_s`` from now on, all together."""
        self._deadline_s = time.monotonic() + self._timeout_s

    def call(self, commands: Sequence[Command]) -> list[Reply]:
        """Send all commands, then give all their replies; an error reply is one of them."""
        self.send(b"".join(map(pack, commands)))
        return self.replies(len(commands))

    def ask(self, command: Command) -> Reply:
        """One command; raises its ReplyError."""
        reply = self.call([command])[0]
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def send(self, data: bytes) -> None:
        """Send packed commands, whose ``replies`` must be taken next."""
        self._wire.send([memoryview(data)], self._deadline_s)

    def replies(self, count: int) -> list[Reply]:
        """The next so many small replies."""
        found: list[Reply] = []
        view = self._piece
        while len(found) < count:
            reply = self._parsed()
            if reply is not False:
                found.append(reply)
                continue
            done = self._wire.receive_some(view, self._deadline_s)
            self._reader.feed(bytes(view[:done]))
        if self._reader.has_data():
            raise LaneBrokenError("there is more than was asked for")
        return found

    def get(self, name: bytes, landing: Landing) -> int | None:
        """GET: let the value land and give its length; None where there is none.
        Raises ReplyError."""
        self.send(pack((b"GET", name)))
        line, rest = self._line()
        if line[:1] != b"$":
            raise LaneBrokenError("a reply to GET is no value")
        nbytes = _length(line[1:])
        if nbytes is None:
            self._nothing_left(rest)
            return None
        end = memoryview(bytearray(2))
        *views, last = landing.place(nbytes)
        for view in views:
            self._wire.receive([_rest_of(view, rest)], self._deadline_s)
            rest = rest[view.nbytes :]
            landing.landed(view)
        self._wire.receive(
            [_rest_of(last, rest), _rest_of(end, rest[last.nbytes :])], self._deadline_s
        )
        landing.landed(last)
        self._nothing_left(rest[last.nbytes + 2 :])
        if end != _CRLF:
            raise LaneBrokenError("a value doesn't end where it should")
        return nbytes

    def set(self, name: bytes, value: Views, expiry_ms: int) -> None:
        """SET, for so many milliseconds (0: for ever). Returns only after the server's OK.
        Raises ReplyError."""
        expiry: Command = (b"PX", expiry_ms) if expiry_ms else ()
        nbytes = sum(view.nbytes for view in value)
        head = b"*%d\r\n$3\r\nSET\r\n%s$%d\r\n" % (3 + len(expiry), _word(name), nbytes)
        tail = _CRLF + b"".join(_word(word) for word in expiry)
        self._wire.send([memoryview(head), *value, memoryview(tail)], self._deadline_s)
        line, rest = self._line()
        self._nothing_left(rest)
        if line != b"+OK":
            raise LaneBrokenError("a reply to SET isn't OK")

    def is_quiet(self) -> bool:
        """Whether it can be used: the peer is there, and nothing waits that nobody asked for."""
        return self._wire.is_quiet()

    def cut(self) -> None:
        """End it from any thread."""
        self._wire.cut()

    def close(self) -> None:
        """Let go of it."""
        self._wire.close()

    def _parsed(self) -> Reply:
        """The next reply that has come, False where none is whole. hiredis lets Python's own errors
        through: a number of thousands of digits, a dict whose key is a list, a list of billions."""
        try:
            reply: Reply = self._reader.gets()
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            raise LaneBrokenError("what came can't be a reply") from error
        return reply

    def _line(self) -> tuple[bytes, memoryview]:
        """The first line of a reply, and what came behind it. Raises ReplyError."""
        done = end = 0
        while True:
            done += self._wire.receive_some(self._scratch[done:], self._deadline_s)
            end = bytes(self._scratch[: min(done, _ERROR_BYTES_MAX)]).find(_CRLF)
            if end >= 0:
                break
            if (done > _LINE_BYTES and self._scratch[0] != ord("-")) or done >= _ERROR_BYTES_MAX:
                raise LaneBrokenError("a reply has no line")
        line, rest = bytes(self._scratch[:end]), self._scratch[end + 2 : done]
        if line[:1] == b"-":
            self._nothing_left(rest)
            raise ReplyError(line[1:].decode("utf-8", "replace"))
        return line, rest

    @staticmethod
    def _nothing_left(rest: memoryview) -> None:
        if rest.nbytes:
            raise LaneBrokenError("there is more than was asked for")


def pack(command: Command) -> bytes:
    """A command as it is sent."""
    return b"*%d\r\n%s" % (len(command), b"".join([_word(word) for word in command]))


def _word(word: Word) -> bytes:
    data = word if isinstance(word, bytes) else b"%d" % word
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _length(text: bytes) -> int | None:
    if text == b"-1":
        return None
    if not text.isdigit() or len(text) > 12:
        raise LaneBrokenError("a value's length is no number")
    return int(text)


def _rest_of(view: memoryview, data: memoryview) -> memoryview:
    """Put the beginning of ``data`` into ``view``; what of that is left to fill."""
    taken = min(view.nbytes, data.nbytes)
    if taken:
        view[:taken] = data[:taken]
    return view[taken:]
