"""A proxy in front of a real server that makes it sick in one way at a time, changed at run time.

It reads the protocol on both sides, so that a fault hits a reply of its choice: every reply that
carries a value (a bulk of VALUE_BYTES or more), and for some faults all of them. It counts the
commands that pass and remembers the values that it saw, with which it answers for others.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterator
from enum import Enum
from typing import BinaryIO

from tests.redis_rig import free_port

VALUE_BYTES = 4096
CUT_BYTES = 700
DRIP_PAUSE_S = 0.02
LINGER_NONE = struct.pack("ii", 1, 0)


class Fault(Enum):
    """What the proxy does."""

    NONE = "passes everything"
    REFUSE = "refuses connections and resets those it has"
    BLACK_HOLE = "answers neither new connections nor requests"
    RESET = "resets the connection in the middle of a value, in either direction"
    CUT = "closes the connection in the middle of a value"
    DRIP = "gives a value byte by byte"
    DELAY = "holds each reply for delay_s"
    FLIP = "turns one bit of a value round"
    SHORT = "gives the first half of a value as if it were whole"
    OTHER_TYPE = "answers a value with a number"
    ERROR = "answers everything with an error"
    GARBAGE = "answers with what isn't the protocol"
    SWAP = "answers with a value of the same size that another name has"
    LATE = "gives each reply to the request after its own"


class Proxy:
    """Listens on loopback for the server at ``port``. Change ``fault`` by ``set``."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.delay_s = 0.05
        self.fault = Fault.NONE
        self.commands: Counter[str] = Counter()
        self.connections = 0
        self.port = free_port()
        self.values: dict[bytes, bytes] = {}
        self.hit = threading.Event()
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._fillers: list[socket.socket] = []

    def __enter__(self) -> Proxy:
        self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        self._changed.set()
        self._stop_listening()
        self.drop()
        for thread in self._threads:
            thread.join()

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where a tier reaches it."""
        return f"redis://{self.address}"

    def set(self, fault: Fault) -> None:
        """From now on do this. ``hit`` is set as soon as it has met something."""
        closed = (Fault.REFUSE, Fault.BLACK_HOLE)
        before, self.fault = self.fault, fault
        self.hit.clear()
        self._changed.set()
        self._changed = threading.Event()
        if before is Fault.REFUSE or before is Fault.BLACK_HOLE or fault in closed:
            self._stop_listening()
            if fault is Fault.BLACK_HOLE:
                self._listen_deaf()
            elif fault is not Fault.REFUSE:
                self._listen()
        if fault is Fault.REFUSE or (before is Fault.BLACK_HOLE and fault is not before):
            self.drop()

    def drop(self) -> None:
        """Reset all connections."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.reset()

    def _listen(self) -> None:
        self._listener = _bound(self.port)
        self._listener.listen(128)
        thread = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen_deaf(self) -> None:
        """A listener whose queue is full: the kernel drops what else wants to connect."""
        self._listener = _bound(self.port)
        self._listener.listen(0)
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            self._fillers.append(filler)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", self.port))

    def _stop_listening(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self._open(client)

    def _open(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            _reset(client)
            return
        link = _Link(self, client, server)
        with self._lock:
            self.connections += 1
            self._links.add(link)
        for work in (link.requests, link.replies):
            thread = threading.Thread(target=work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def forget(self, link: _Link) -> None:
        """A link has ended."""
        with self._lock:
            self._links.discard(link)

    def seen(self, words: list[bytes]) -> None:
        """A request passes."""
        with self._lock:
            self.commands[words[0].decode("ascii", "replace").upper()] += 1
            if words[0].upper() == b"SET" and len(words[2]) >= VALUE_BYTES:
                self.values[words[1]] = words[2]

    def other(self, name: bytes, size: int) -> bytes | None:
        """A value of this size that another name has."""
        with self._lock:
            return next(
                (v for n, v in self.values.items() if n != name and len(v) == size), None
            )  # fmt: skip

    def wait_changed(self, limit_s: float) -> bool:
        """Wait until the fault changes or so long; true where it changed."""
        return self._changed.wait(limit_s)


class _Link:
    """One client's connection and ours to the server."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server
        self.asked: deque[bytes] = deque()
        self.late: bytes | None = None

    def reset(self) -> None:
        """Both sides at once, with RST."""
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                side.shutdown(socket.SHUT_RD)
        for side in (self.client, self.server):
            _reset(side)

    def requests(self) -> None:
        """From the client to the server."""
        stream = self.client.makefile("rb", buffering=1 << 16)
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                frame, words = read_request(stream)
                self.proxy.seen(words)
                if self.proxy.fault is Fault.BLACK_HOLE:
                    self.proxy.hit.set()
                    continue
                if self.proxy.fault is Fault.RESET and len(frame) > VALUE_BYTES:
                    self.server.sendall(frame[: len(frame) // 2])
                    self.proxy.hit.set()
                    break
                self.asked.append(words[1] if len(words) > 1 else b"")
                self.server.sendall(frame)
        self.end(stream)

    def replies(self) -> None:
        """From the server to the client."""
        stream = self.server.makefile("rb", buffering=1 << 16)
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                frame = read_reply(stream)
                name = self.asked.popleft() if self.asked else b""
                if not self.answer(frame, name):
                    break
        self.end(stream)

    def end(self, stream: BinaryIO) -> None:
        """One direction is over, so both are."""
        self.reset()
        with contextlib.suppress(OSError):
            stream.close()
        self.proxy.forget(self)

    def answer(self, frame: bytes, name: bytes) -> bool:
        """Give a reply to the client, or what the fault makes of it; false ends the connection."""
        fault = self.proxy.fault
        if fault is Fault.NONE:
            self.client.sendall(frame)
            return True
        if fault is Fault.BLACK_HOLE:
            self.proxy.hit.set()
            return True
        if fault is Fault.DELAY:
            self.proxy.hit.set()
            self.proxy.wait_changed(self.proxy.delay_s)
        made = self.damaged(frame, name, fault)
        if made is not None:
            if made != frame:
                self.proxy.hit.set()
            self.client.sendall(made)
            return True
        return self.broken_off(frame, fault)

    def damaged(self, frame: bytes, name: bytes, fault: Fault) -> bytes | None:
        """The bytes to give instead; None where the fault lies in how they are given."""
        if fault is Fault.ERROR:
            return b"-ERR the proxy says no\r\n"
        if fault is Fault.GARBAGE:
            return b"HTTP/1.1 400 Bad Request\r\n\r\n"
        if fault is Fault.LATE:
            given, self.late = self.late, frame
            return given if given is not None else b":7\r\n"
        if not carries_value(frame):
            return frame
        if fault in (Fault.RESET, Fault.CUT, Fault.DRIP):
            return None
        return self.falsified(frame, name, fault)

    def falsified(self, frame: bytes, name: bytes, fault: Fault) -> bytes:
        """Another reply instead of one that carries a value."""
        if fault is Fault.OTHER_TYPE:
            return b":7\r\n"
        if fault is Fault.FLIP:
            middle = len(frame) // 2
            return frame[:middle] + bytes([frame[middle] ^ 1]) + frame[middle + 1 :]
        if not frame.startswith(b"$"):
            return frame
        start = frame.index(b"\r\n") + 2
        size = len(frame) - start - 2
        if fault is Fault.SHORT:
            return b"$%d\r\n%s\r\n" % (size // 2, frame[start : start + size // 2])
        if fault is Fault.SWAP:
            other = self.proxy.other(name, size)
            return frame if other is None else b"$%d\r\n%s\r\n" % (size, other)
        return frame

    def broken_off(self, frame: bytes, fault: Fault) -> bool:
        """Give part of a reply; true where it was given to the end after all."""
        self.proxy.hit.set()
        if fault is Fault.DRIP:
            sent = 0
            while not self.proxy.wait_changed(DRIP_PAUSE_S) and sent < len(frame):
                self.client.sendall(frame[sent : sent + 1])
                sent += 1
            self.client.sendall(frame[sent:])
            return True
        self.client.sendall(frame[: max(CUT_BYTES, len(frame) // 2)])
        if fault is Fault.CUT:
            self.client.shutdown(socket.SHUT_WR)
            self.proxy.wait_changed(1.0)
        return False


def read_request(stream: BinaryIO) -> tuple[bytes, list[bytes]]:
    """A request's bytes and its words."""
    head = _line(stream)
    parts, words = [head], []
    for _ in range(int(head[1:])):
        size = _line(stream)
        body = _exactly(stream, int(size[1:]) + 2)
        parts += [size, body]
        words.append(body[:-2])
    return b"".join(parts), words


def read_reply(stream: BinaryIO) -> bytes:
    """One reply's bytes, nested ones included."""
    head = _line(stream)
    kind = head[:1]
    if kind in b"$=!":
        size = int(head[1:])
        return head if size < 0 else head + _exactly(stream, size + 2)
    if kind in b"*~>%|":
        count = max(0, int(head[1:])) * (2 if kind in b"%|" else 1)
        nested = b"".join(read_reply(stream) for _ in range(count))
        return head + nested + (read_reply(stream) if kind == b"|" else b"")
    return head


def carries_value(frame: bytes) -> bool:
    """Whether a reply is large enough to be a chunk."""
    return len(frame) >= VALUE_BYTES and frame[:1] in b"$*"


@contextlib.contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """A proxy for a server's port."""
    with Proxy(port) as proxy:
        yield proxy


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline(1 << 20)
    if not line.endswith(b"\r\n"):
        raise EOFError
    return line


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError
    return data


def _bound(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


def _reset(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
    with contextlib.suppress(OSError):
        side.close()
