"""The public client: how an engine's processes reach the daemon.

``Client`` opens nothing by itself. Each session it gives out has a connection of its own, made at
once where the daemon is there and in the background where it isn't, and made anew when it is lost.
One daemon thread a client watches for hang-ups; answers are read by whoever waits for them. When
neither the client nor a session of it is left, the thread ends what they forgot to close.
"""

from __future__ import annotations

import time
import weakref
from types import TracebackType

from kvstore.client_joining import Attaching, Registering
from kvstore.client_line import Hold, Line, LineWatcher, watchers
from kvstore.client_session import SchedulerSession, WorkerSession, check_text
from kvstore.core.errors import SessionLostError
from kvstore.core.keys import Namespace
from kvstore.core.layout import Layout, Shard
from kvstore.memory import CudaMemory, HostMemory
from kvstore.wire import socket_path
from kvstore.wire_messages import Registration

LOOKUP_TIMEOUT_S = 0.25
CONNECT_TIMEOUT_S = 2.0
_CLOSE_S = 2.0


class Client:
    """A process's access to the daemon at ``address`` ("unix:/path/to/socket", or the path).

    ``lookup_timeout_s`` bounds a lookup's round trip, beyond which it is a miss;
    ``connect_timeout_s`` is how long ``register`` and ``attach`` try before they go on in the
    background; ``credential`` names the tenant (empty: the tenant of this process's user). Safe to
    use from several threads and in forked children. A context manager.
    """

    def __init__(
        self,
        address: str,
        *,
        credential: str = "",
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._path = socket_path(address)
        self._credential = credential
        self._lookup_timeout_s = lookup_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._watcher = LineWatcher()
        self._lines: list[Line] = []
        self._closed = False
        self._hold = Hold()
        weakref.finalize(self._hold, self._watcher.leave).atexit = False
        watchers().add(self._watcher)

    def register(
        self,
        engine_id: str,
        namespace: Namespace,
        layout: Layout,
        memory: HostMemory | CudaMemory,
        shard: Shard,
    ) -> WorkerSession:
        """Register one rank's shard of an engine's KV memory.

        The descriptor is duplicated, the memory stays the caller's. Raises LayoutMismatchError for
        a layout, shard or memory that doesn't fit, here or in the daemon's judgement, CapacityError
        where the daemon is at a limit, ConfigError for a credential that it doesn't know, and
        ProtocolError for a daemon of another version. Where the daemon is away the session
        registers as soon as it is there.
        """
        check_text("engine_id", engine_id)
        registration = Registration(engine_id, namespace, layout, shard, memory.nbytes)
        registering = Registering(registration, memory, self._credential)
        line = self._line(f"engine {engine_id}, rank {shard.rank()}", registering)
        registering.open()
        self._open(line)
        return WorkerSession(engine_id, line, self._lookup_timeout_s, self._hold, layout)

    def attach(self, engine_id: str) -> SchedulerSession:
        """Join an engine without memory, as its scheduler; the engine need not exist yet.

        Raises CapacityError, ConfigError and ProtocolError as ``register`` does.
        """
        check_text("engine_id", engine_id)
        attaching = Attaching(engine_id, self._credential)
        line = self._line(f"engine {engine_id}, scheduler", attaching)
        self._open(line)
        return SchedulerSession(engine_id, line, self._lookup_timeout_s, self._hold)

    def close(self) -> None:
        """End all sessions and the client's thread. Idempotent; waits for the daemon two seconds at
        most."""
        self._closed = True
        until_s = time.monotonic() + _CLOSE_S
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.close(until_s)
        self._watcher.close()
        for line in self._lines:
            line.close(until_s)  # a link that the thread was just making

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _line(self, name: str, joiner: Attaching | Registering) -> Line:
        if self._closed:
            raise SessionLostError("the client is closed; make another")
        return Line(self._path, name, joiner, self._watcher)

    def _open(self, line: Line) -> None:
        refusal = line.open(self._connect_timeout_s)
        if refusal is not None:
            raise refusal
        self._lines = [other for other in self._lines if not other.over()] + [line]
        self._watcher.add(line)
