"""One engine process's connection as the daemon sees it: its socket, its process, its phase.

A Connection only moves frames; what they mean is its owner's to say. It ends in two steps: first it
stops reading (the peer is gone, or broke the protocol), later, when nothing uses the session's
memory any more, the socket is closed, so that the peer sees the end of the stream as a fence.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvstore.core.errors import CapacityError, ProtocolError
from kvstore.core.messages import SessionID
from kvstore.wire import DESCRIPTORS_MAX, FRAME_BYTES_MAX, FrameReader, FrameWriter
from kvstore.wire_messages import Registration

_PEER_CREDENTIALS = struct.Struct("3i")
_COMPLETIONS_BYTES_MAX = 3 << 20
_ANSWERS_BYTES_MAX = 1 << 20
OUTGOING_BYTES_MAX = _COMPLETIONS_BYTES_MAX + _ANSWERS_BYTES_MAX
"""Replies kept for a peer that doesn't read: some 30,000 completions of stores that nobody asks
after, and the answers beside them. A peer that leaves more unread is lost."""

JOIN_DEADLINE_S = 30.0
"""Who hasn't joined an engine so long after connecting, and isn't joining just then, is lost."""

TURN_S = 0.001
"""How long one peer, or what other threads posted, is served before the others have their turn."""


class Phase(Enum):
    """GREETING: no HELLO yet. GREETED: may register or attach. OPENING: its memory is being mapped
    in a thread. JOINING: the core was asked and hasn't answered. ACTIVE: it serves. CLOSING: the
    peer is gone, its memory still in use. CLOSED: the memory is being unmapped, or is."""

    GREETING = "greeting"
    GREETED = "greeted"
    OPENING = "opening"
    JOINING = "joining"
    ACTIVE = "active"
    CLOSING = "closing"
    CLOSED = "closed"


class EnginePages(Protocol):
    """An engine's mapped memory, as far as the server knows it."""

    def close(self) -> None:
        """Unmap it."""


@dataclass(frozen=True, slots=True)
class SessionStats:
    """One connection: whose it is, where it stands and what was sent to it."""

    session: int
    engine: str
    role: str
    phase: str
    sent_bytes: int


@dataclass(slots=True)
class ServerCounts:
    """What the engine link counts."""

    connections_total: int = 0
    connections_refused: int = 0
    protocol_errors: int = 0
    requests_refused: int = 0
    internal_errors: int = 0
    sessions_ended: int = 0
    joins_overdue: int = 0


class ConnectionOwner(Protocol):
    """Who acts on what a connection delivers."""

    def received(self, connection: Connection, frame: bytes) -> None:
        """A frame has come; raises ProtocolError where the stream has lost its meaning."""

    def lost(self, connection: Connection, reason: str) -> None:
        """The peer is gone, or its process is."""

    def broken(self, connection: Connection, reason: str) -> None:
        """The peer sent what isn't the protocol."""


class Connection:
    """A peer's socket under the event loop. Mutable; the loop's thread alone touches it."""

    def __init__(self, session: SessionID, peer: socket.socket, owner: ConnectionOwner) -> None:
        self.session = session
        self.phase = Phase.GREETING
        self.engine = ""
        self.tenant = ""
        self.role = "none"
        self.pages: EnginePages | None = None
        self.opening: Future[tuple[Registration, EnginePages]] | None = None
        self.last_id = 0
        self.join_id = 0
        self.overdue = False
        self.process = 0
        self.user = 0
        self.reader = FrameReader(FRAME_BYTES_MAX, DESCRIPTORS_MAX)
        self._peer = peer
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._writer = FrameWriter(OUTGOING_BYTES_MAX)
        self._pid_fd: int | None = None
        self._reading = False
        self._writing = False
        self._behind = False
        self._joins: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Start reading and, where the peer's process is visible, watching it."""
        size = _PEER_CREDENTIALS.size
        found = self._peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        self.process, self.user, _ = _PEER_CREDENTIALS.unpack(found)
        self._loop.add_reader(self._peer.fileno(), self._readable)
        self._reading = True
        self._joins = self._loop.call_later(JOIN_DEADLINE_S, self._must_have_joined)
        self._watch_process()

    def send(self, message: bytes) -> None:
        """Send a message, or queue it; a peer that leaves too much unread is lost."""
        if self._peer.fileno() < 0:
            return
        try:
            self._writer.send(self._peer, message)
        except CapacityError as error:
            self._owner.lost(self, f"it doesn't read its replies: {error}")
        except OSError as error:
            self._owner.lost(self, f"sending failed: {error.strerror}")
        else:
            if self._writer.pending_bytes and not self._writing:
                self._loop.add_writer(self._peer.fileno(), self._writable)
                self._writing = True

    def take_descriptor(self) -> int | None:
        """The one descriptor that came with the frame, now the caller's; None where this process
        could open no more. Raises ProtocolError where another number came; those are closed."""
        descriptors = self.reader.take_descriptors()
        if len(descriptors) == 1:
            return descriptors[0]
        for fd in descriptors:
            os.close(fd)
        if self.reader.descriptors_lost:
            return None
        raise ProtocolError(f"REGISTER with {len(descriptors)} descriptors; valid is 1")

    def stop_reading(self) -> None:
        """Take nothing from the peer any more; the socket stays open. Idempotent."""
        if self._reading:
            self._loop.remove_reader(self._peer.fileno())
            self._reading = False
        self.reader.close()
        if self._joins is not None:
            self._joins.cancel()
        self._forget_process()

    def close(self) -> None:
        """Send what the socket takes at once of what waits, and close it. Idempotent."""
        if self._peer.fileno() < 0:
            return
        self.stop_reading()
        self._stop_writing()
        with suppress(OSError):
            self._writer.flush(self._peer)
        self._peer.close()

    def stats(self) -> SessionStats:
        """Where the connection stands."""
        return SessionStats(
            session=self.session,
            engine=self.engine,
            role=self.role,
            phase=self.phase.value,
            sent_bytes=self._writer.sent_bytes,
        )

    def _readable(self) -> None:
        """Read once, so that one busy peer can't keep the loop from the others."""
        if self._behind:
            return
        try:
            count = self.reader.receive(self._peer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._owner.lost(self, f"receiving failed: {error.strerror}")
            return
        if not count:
            self._owner.lost(self, "it closed the connection")
            return
        self._deliver()

    def _deliver(self) -> None:
        """Hand on the frames that have come; after a turn's time the others go first."""
        until_s = time.monotonic() + TURN_S
        self._behind = False
        try:
            while self._reading:
                frame = self.reader.next_frame()
                if frame is None:
                    return
                self._owner.received(self, frame)
                if time.monotonic() > until_s:
                    self._behind = True
                    self._loop.call_soon(self._deliver)
                    return
        except ProtocolError as error:
            self._owner.broken(self, str(error))

    def _writable(self) -> None:
        try:
            if not self._writer.flush(self._peer):
                return
        except OSError as error:
            self._owner.lost(self, f"sending failed: {error.strerror}")
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._writing:
            self._loop.remove_writer(self._peer.fileno())
            self._writing = False

    def _watch_process(self) -> None:
        """Watch the process that connected: a copy of its socket in a child may outlive it."""
        if self.process <= 0:
            return
        try:
            self._pid_fd = os.pidfd_open(self.process)
        except OSError as error:
            if error.errno == errno.ESRCH:
                self._process_ended()
            return
        self._loop.add_reader(self._pid_fd, self._process_ended)

    def _must_have_joined(self) -> None:
        """A peer that says nothing keeps its connection from others."""
        if self.phase in (Phase.OPENING, Phase.JOINING):
            self._joins = self._loop.call_later(JOIN_DEADLINE_S, self._must_have_joined)
        elif self.phase in (Phase.GREETING, Phase.GREETED):
            self.overdue = True
            self._owner.lost(self, f"it joined no engine in {JOIN_DEADLINE_S:g} s")

    def _process_ended(self) -> None:
        self._forget_process()
        self._owner.lost(self, f"its process {self.process} ended")

    def _forget_process(self) -> None:
        if self._pid_fd is not None:
            self._loop.remove_reader(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = None
