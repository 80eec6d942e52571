"""The sessions of the engine link: from a connection to a registered engine process and to its end.

The life of a session: HELLO; REGISTER (its memory is mapped and validated in a thread, then the
mover learns of it, then the core) or ATTACH; messages; the end. The end comes once, whatever caused
it: nothing is read any more, the core is told, and only when it answers with Detach (no Move uses
the memory) is the memory unmapped and the socket closed: to the client, the end of the stream is a
fence. A session that ends while its memory is still being mapped is undone when the thread returns.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from kvstore.core.errors import InvariantError, KVStoreError, LayoutMismatchError, ProtocolError
from kvstore.core.guard import guarded
from kvstore.core.messages import (
    Attach,
    Cause,
    Event,
    Refused,
    Register,
    Reply,
    Request,
    SessionClosed,
    SessionID,
)
from kvstore.core.stats import Histogram
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.server_connections import (
    Connection,
    EnginePages,
    Phase,
    ServerCounts,
    SessionStats,
)
from kvstore.server_hands import Mover, OpenPages, Tenants
from kvstore.server_refusals import Refusals
from kvstore.wire import hello, hello_mismatch, read_client_message
from kvstore.wire_messages import (
    Registration,
    check_memory,
    read_engine,
    read_registration,
    read_request,
    refused_as,
    write_hello,
    write_reply,
)

CONNECTIONS_MAX = 1024 + 64
"""The core's sessions, and some that say HELLO or are on their way out."""
MAPPERS = 4
"""Threads that map and unmap engines' memory."""

Opening = Future[tuple[Registration, EnginePages]]
_log = logging.getLogger(__name__)


class Sessions:
    """All connections of the daemon. Mutable; the loop's thread alone touches it.

    ``drive`` hands an event to the core and carries out its effects; ``post`` does so soon, from
    any thread.
    """

    def __init__(
        self,
        drive: Callable[[Event], None],
        post: Callable[[Event], None],
        mover: Mover,
        open_pages: OpenPages,
        tenants: Tenants,
    ) -> None:
        self.counts = ServerCounts()
        self.lookups = Histogram()
        self._drive = drive
        self._post = post
        self._mover = mover
        self._open_pages = open_pages
        self._tenants = tenants
        self._connections: dict[SessionID, Connection] = {}
        self._last_session = 0
        self._refusals = Refusals()
        self._stopping = ""
        self._threads = ThreadPoolExecutor(MAPPERS, thread_name_prefix="kvstore-map")

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, peer: socket.socket) -> None:
        """Take in a new connection; beyond the limit it is refused and closed."""
        self.counts.connections_total += 1
        self._last_session += 1
        connection = Connection(SessionID(self._last_session), peer, self)
        if len(self._connections) >= CONNECTIONS_MAX:
            self.counts.connections_refused += 1
            reason = f"the daemon has {CONNECTIONS_MAX} connections already"
            connection.send(write_reply(0, Refused(reason, Cause.LIMIT)))
            connection.close()
            return
        self._connections[connection.session] = connection
        connection.open()

    def refuse_work(self, reason: str) -> None:
        """From now on answer requests with this reason; transfers may still be cancelled."""
        self._stopping = reason

    def end_all(self, reason: str) -> None:
        """End every session as if its peer had gone."""
        for connection in list(self._connections.values()):
            self.lost(connection, reason)

    def stop_reading(self) -> None:
        """Read nothing more from anyone; sockets and memory stay as they are."""
        for connection in self._connections.values():
            connection.stop_reading()

    def close(self) -> None:
        """Wait for the threads, then unmap and close whatever is left. Only once no Move runs any
        more: to the clients this is the fence."""
        self._threads.shutdown(wait=True)
        for connection in self._connections.values():
            opening, connection.opening = connection.opening, None
            if opening is not None and opening.exception() is None:
                _, connection.pages = opening.result()
            pages, connection.pages = connection.pages, None
            if pages is not None:
                pages.close()
            connection.close()
        self._connections.clear()

    def stats(self) -> tuple[SessionStats, ...]:
        """Every connection there is."""
        return tuple(connection.stats() for connection in list(self._connections.values()))

    # ------------------------------------------------------------ what connections deliver

    def received(self, connection: Connection, frame: bytes) -> None:
        """Act on one frame; raises ProtocolError where the stream has lost its meaning."""
        message = read_client_message(frame)
        started_s = time.perf_counter()
        if message.id <= connection.last_id:
            raise ProtocolError(f"message id {message.id} after {connection.last_id} doesn't rise")
        connection.last_id = message.id
        self._attempt(connection, message.id, self._route, message)
        if message.kind == pb.ClientMessage.LOOKUP:
            self.lookups.add(time.perf_counter() - started_s)

    def broken(self, connection: Connection, reason: str) -> None:
        """The peer broke the protocol: say so, then end the session."""
        self.counts.protocol_errors += 1
        connection.send(write_reply(0, Refused(reason, Cause.PROTOCOL)))
        self.lost(connection, f"it broke the protocol: {reason}")

    def lost(self, connection: Connection, reason: str) -> None:
        """End the session, once: stop reading, tell the core if it knows the session."""
        phase = connection.phase
        if phase in (Phase.CLOSING, Phase.CLOSED):
            return
        connection.phase = Phase.CLOSING
        connection.stop_reading()
        self.counts.joins_overdue += connection.overdue
        if connection.engine:
            self.counts.sessions_ended += 1
            _log.info("session %d of engine %s ended: %s", *_name(connection), reason)
        if phase in (Phase.JOINING, Phase.ACTIVE):
            self._post(SessionClosed(connection.session))
        elif phase is not Phase.OPENING:
            self._finish(connection)

    # ------------------------------------------------------------ what the core says

    def reply(self, effect: Reply) -> None:
        """Send the core's answer; one that ends joining changes the session's phase first."""
        connection = self._connections.get(effect.session)
        if connection is None:
            return
        body = effect.body
        if connection.join_id and effect.id == connection.join_id:
            connection.join_id = 0
            self._joined(connection, body if isinstance(body, Refused) else None)
        if type(body) is Refused:
            self.counts.requests_refused += 1
        connection.send(write_reply(effect.id, body))

    def detach(self, session: SessionID) -> None:
        """No Move uses the session's memory any more: unmap it, then close the socket."""
        connection = self._connections.get(session)
        if connection is not None:
            self._finish(connection)

    # ------------------------------------------------------------ messages

    def _attempt(
        self, connection: Connection, number: int, step: Callable[..., None], *arguments: object
    ) -> None:
        """The request boundary: whatever goes wrong within is one refused request, but for a bug of
        the core, which stops the daemon."""
        guarded(
            lambda: step(connection, *arguments),
            lambda error: self._fail(connection, number, error),
        )

    def _fail(self, connection: Connection, number: int, error: BaseException) -> None:
        """Answer a request that can't be carried out, or whose handling has a bug; raises what is a
        bug of the core."""
        if isinstance(error, InvariantError):
            raise error
        if isinstance(error, KVStoreError):
            self._refuse(connection, number, refused_as(error))
            return
        self.counts.internal_errors += 1
        name = _name(connection)
        _log.error("session %d of engine %s: a request failed", *name, exc_info=error)
        self._refuse(connection, number, Refused(f"internal error: {type(error).__name__}"))

    def _refuse(self, connection: Connection, number: int, refused: Refused) -> None:
        self.counts.requests_refused += 1
        connection.send(write_reply(number, refused))

    def _route(self, connection: Connection, message: pb.ClientMessage) -> None:
        kind = message.kind
        if connection.phase is Phase.ACTIVE and kind > pb.ClientMessage.ATTACH:
            stoppable = kind not in (pb.ClientMessage.CANCEL, pb.ClientMessage.RELEASE)
            if self._stopping and stoppable:
                raise KVStoreError(self._stopping)
            self._drive(Request(connection.session, message.id, read_request(message)))
            return
        if kind == pb.ClientMessage.HELLO and connection.phase is Phase.GREETING:
            self._greet(connection, message)
            return
        if connection.phase is Phase.GREETED and not self._stopping:
            if kind == pb.ClientMessage.REGISTER:
                self._register(connection, message)
                return
            if kind == pb.ClientMessage.ATTACH:
                self._attach(connection, message)
                return
        raise ProtocolError(self._stopping or _out_of_place(connection.phase, kind))

    def _greet(self, connection: Connection, message: pb.ClientMessage) -> None:
        ours = hello()
        connection.send(write_hello(message.id, ours))
        mismatch = hello_mismatch(message.hello, ours)
        if mismatch:
            self._refusals.note(f"process {connection.process}", mismatch)
            self.broken(connection, mismatch)
        else:
            connection.phase = Phase.GREETED

    def _attach(self, connection: Connection, message: pb.ClientMessage) -> None:
        engine = read_engine(message)
        connection.tenant = self._tenants(message.credential, connection.user)
        connection.engine = engine
        connection.role = "scheduler"
        self._join(connection, message.id, Attach(engine, connection.tenant))

    def _register(self, connection: Connection, message: pb.ClientMessage) -> None:
        """Have the memory mapped in a thread; the descriptor is closed there, come what may."""
        check_memory(message.register)
        connection.tenant = self._tenants(message.credential, connection.user)
        fd = connection.take_descriptor()
        if fd is None:
            self._out_of_descriptors(connection)
            return
        connection.phase = Phase.OPENING
        connection.opening = self._threads.submit(self._open, message.register, fd)
        connection.opening.add_done_callback(_soon(self._opened, connection, message.id))

    def _open(self, message: pb.Register, fd: int) -> tuple[Registration, EnginePages]:
        """In a thread: validate a registration and map its memory."""
        try:
            registration = read_registration(message)
            registration.validate()
            return registration, self._open_pages(fd, registration.nbytes, registration.layout)
        except OSError as error:
            raise LayoutMismatchError(f"memory: {error.strerror or error}") from error
        finally:
            os.close(fd)

    def _opened(self, connection: Connection, number: int, opening: Opening) -> None:
        """Back on the loop: register at the core, or undo it all where the peer has gone."""
        connection.opening = None
        error = opening.exception()
        if error is None:
            registration, connection.pages = opening.result()
        if connection.phase is Phase.CLOSING:
            self._finish(connection)
            return
        connection.phase = Phase.GREETED
        if error is None:
            self._attempt(connection, number, self._enter, number, registration)
        else:
            self._refusals.note(f"process {connection.process}", str(error))
            self._fail(connection, number, error)

    def _enter(self, connection: Connection, number: int, registration: Registration) -> None:
        assert connection.pages is not None, "the memory is mapped"
        connection.engine = registration.engine
        connection.role = "worker"
        self._mover.attach(connection.session, connection.pages)
        register = Register(
            registration.engine,
            connection.tenant,
            registration.namespace,
            registration.layout,
            registration.shard,
        )
        self._join(connection, number, register)

    def _join(self, connection: Connection, number: int, message: Register | Attach) -> None:
        connection.phase = Phase.JOINING
        connection.join_id = number
        self._drive(Request(connection.session, number, message))

    def _joined(self, connection: Connection, refused: Refused | None) -> None:
        """The core has answered: the session is active, or back to where it may try again."""
        if refused is None:
            if connection.phase is Phase.JOINING:
                connection.phase = Phase.ACTIVE
            self._refusals.forget(f"engine {connection.engine}")
            _log.info("session %d of engine %s began: %s", *_name(connection), connection.role)
            return
        self._refusals.note(f"engine {connection.engine}", refused.reason)
        if connection.phase is Phase.CLOSING:
            self._finish(connection)
            return
        connection.phase = Phase.GREETED
        connection.engine, connection.role = "", "none"
        pages, connection.pages = connection.pages, None
        if pages is not None:
            self._mover.detach(connection.session)
            self._threads.submit(pages.close)

    def _out_of_descriptors(self, connection: Connection) -> None:
        """Not the peer's fault, and not for ever: the end of the stream lets it try again."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason = f"the daemon is out of descriptors (RLIMIT_NOFILE {limit})"
        self.counts.connections_refused += 1
        self._refusals.note(f"process {connection.process}", reason)
        self.lost(connection, reason)

    # ------------------------------------------------------------ the end

    def _finish(self, connection: Connection) -> None:
        """Unmap in a thread, then close the socket. Idempotent."""
        if connection.phase is Phase.CLOSED:
            return
        connection.phase = Phase.CLOSED
        connection.stop_reading()
        if connection.pages is None:
            self._forget(connection)
            return
        if connection.role == "worker":
            self._mover.detach(connection.session)
        pages, connection.pages = connection.pages, None
        closing = self._threads.submit(pages.close)
        closing.add_done_callback(_soon(self._unmapped, connection))

    def _unmapped(self, connection: Connection, closing: Future[None]) -> None:
        error = closing.exception()
        if error is not None:
            _log.error("session %d of engine %s: unmapping failed: %s", *_name(connection), error)
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        connection.close()
        self._connections.pop(connection.session, None)


def _soon(step: Callable[..., None], *arguments: object) -> Callable[[Future[Any]], None]:
    """A callback that brings a thread's result to the loop, unless the loop has ended meanwhile."""
    loop = asyncio.get_running_loop()

    def bring(done: Future[Any]) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(functools.partial(step, *arguments, done))

    return bring


def _name(connection: Connection) -> tuple[int, str]:
    return connection.session, connection.engine or "(none)"


def _out_of_place(phase: Phase, kind: int) -> str:
    names = pb.ClientMessage.Kind.keys()
    name = names[kind] if 0 <= kind < len(names) else f"kind {kind}"
    return f"{name} is out of place: the session is {phase.value}"
