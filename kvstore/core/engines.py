"""Engines and their sessions: who may ask for what.

An engine is several processes. Workers register a shard of its memory each; schedulers attach
without memory. The engine is ready once every rank is registered under one namespace: then its
namespace digest is known and every session of it is told. Losing a worker makes it unready.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.keys import Namespace, namespace_digest
from kvstore.core.layout import Layout, Shard
from kvstore.core.leases import EngineKey
from kvstore.core.messages import (
    Attach,
    Cause,
    EngineState,
    Persist,
    Refused,
    Register,
    SessionID,
    SetRevision,
    SpaceRecord,
)
from kvstore.core.spaces import Space, Spaces
from kvstore.core.stats import EngineStats
from kvstore.core.tickets import Ticket


@dataclass(slots=True, eq=False)
class Session:
    """One connection. ``layout`` and ``shard`` are those of a worker; a scheduler has neither.

    ``moves`` counts running Moves that use its memory: while there are any, it can't be detached.
    """

    id: SessionID
    engine: Engine
    layout: Layout | None = None
    shard: Shard | None = None
    tickets: dict[int, Ticket] = field(default_factory=dict)
    moves: int = 0
    store_bytes: int = 0
    closing: bool = False


@dataclass(slots=True, eq=False)
class Engine:
    """Processes that serve one model together. ``space`` is None until it is ready."""

    key: EngineKey
    namespace: Namespace | None = None
    shape: Shard | None = None
    workers: dict[int, Session] = field(default_factory=dict)
    schedulers: dict[SessionID, Session] = field(default_factory=dict)
    space: Space | None = None
    tokens_per_chunk: int = 0
    window_chunks: int = 0

    def sessions(self) -> list[Session]:
        """All sessions."""
        return [*self.workers.values(), *self.schedulers.values()]

    def state(self) -> EngineState:
        """What sessions are told."""
        digest = b"" if self.space is None else self.space.namespace
        ready = self.space is not None
        return EngineState(self.key[1], ready, digest, self.tokens_per_chunk)

    def uncached(self) -> tuple[str, ...]:
        """What its workers keep and don't register."""
        layouts = [worker.layout for worker in self.workers.values() if worker.layout is not None]
        return tuple(sorted({name for layout in layouts for name in layout.uncached}))

    def stats(self) -> EngineStats:
        """A snapshot."""
        name = self.namespace or Namespace("", "", "")
        ranks = 0 if self.shape is None else self.shape.ranks()
        return EngineStats(
            engine=self.key[1],
            tenant=self.key[0],
            model=name.model,
            alias=name.alias,
            ready=self.space is not None,
            ranks_registered=len(self.workers),
            ranks=ranks,
            sessions=len(self.workers) + len(self.schedulers),
            namespace="" if self.space is None else self.space.namespace.hex(),
            uncached=self.uncached(),
        )


class Engines:
    """All engines and sessions. Each verb returns what to answer, and what to persist, if
    anything."""

    def __init__(self, spaces: Spaces, sessions_max: int) -> None:
        self._spaces = spaces
        self._sessions_max = sessions_max
        self._engines: dict[EngineKey, Engine] = {}
        self._sessions: dict[SessionID, Session] = {}

    def session(self, session: SessionID) -> Session | None:
        """The session, once it has registered or attached."""
        return self._sessions.get(session)

    def sessions(self) -> list[Session]:
        """All sessions."""
        return list(self._sessions.values())

    def engines(self) -> list[Engine]:
        """All engines."""
        return list(self._engines.values())

    def register(self, session: SessionID, message: Register) -> Refused | Session:
        """Add a worker; refused, it leaves everything as it was."""
        key = (message.tenant, message.engine)
        engine = self._engines.get(key) or Engine(key)
        refused = self._full(session) or _unfit(engine, message)
        if refused is not None:
            return refused
        self._engines[key] = engine
        if not engine.workers:
            engine.namespace, engine.shape = message.namespace, message.shard
            engine.tokens_per_chunk = message.layout.tokens_per_chunk
            engine.window_chunks = message.layout.window_chunks()
        added = Session(session, engine, message.layout, message.shard)
        engine.workers[message.shard.rank()] = added
        self._sessions[session] = added
        return added

    def attach(self, session: SessionID, message: Attach) -> Refused | Session:
        """Add a scheduler."""
        refused = self._full(session)
        if refused is not None:
            return refused
        key = (message.tenant, message.engine)
        engine = self._engines.setdefault(key, Engine(key))
        added = Session(session, engine)
        engine.schedulers[session] = added
        self._sessions[session] = added
        return added

    def set_revision(self, engine: Engine, message: SetRevision) -> Refused | None:
        """Go on under another revision of the weights; the caller enters the new space."""
        old = engine.namespace
        if old is None:
            return Refused("set_revision: no worker of this engine is registered yet")
        engine.namespace = Namespace(old.model, message.revision, old.format, old.config, old.alias)
        return None

    def make_ready(self, engine: Engine) -> Persist | None:
        """Enter the engine's space if every rank is there, else leave it unready.

        Raises CapacityError when there are too many namespaces.
        """
        engine.space = None
        shape, namespace = engine.shape, engine.namespace
        if shape is None or namespace is None or len(engine.workers) < shape.ranks():
            return None
        if any(worker.closing for worker in engine.workers.values()):
            return None
        shards: dict[int, bytes] = {}
        for worker in engine.workers.values():
            if worker.shard is not None and worker.layout is not None:
                shards[worker.shard.index()] = worker.layout.fingerprint()
        layout = next(iter(engine.workers.values())).layout
        if layout is None:
            return None
        digest = namespace_digest(
            namespace,
            layout.dtype,
            engine.tokens_per_chunk,
            shape,
            [shards[i] for i in sorted(shards)],
        )
        record = SpaceRecord(engine.key[0], digest, namespace.model, namespace.alias, epoch=0)
        space, persist = self._spaces.enter(record, shape.count(), self._used)
        space.dtype, space.tokens = layout.dtype, layout.tokens_per_chunk
        engine.space = space
        return persist

    def _used(self) -> set[Space]:
        return {engine.space for engine in self._engines.values() if engine.space is not None}

    def remove(self, session: Session) -> None:
        """A session is lost: its engine forgets it, and is unready if it was a worker."""
        del self._sessions[session.id]
        engine = session.engine
        if session.shard is not None:
            del engine.workers[session.shard.rank()]
        else:
            del engine.schedulers[session.id]
        if not engine.workers and not engine.schedulers:
            del self._engines[engine.key]

    def replace_spaces(self, followers: dict[Space, Space]) -> None:
        """Namespaces were cleared: engines go on in their next epochs."""
        for engine in self._engines.values() if followers else ():
            if engine.space is not None:
                engine.space = followers.get(engine.space, engine.space)

    def _full(self, session: SessionID) -> Refused | None:
        if session in self._sessions:
            reason = "this session has registered or attached already; open another connection"
            return Refused(reason, Cause.PROTOCOL)
        if len(self._sessions) >= self._sessions_max:
            reason = f"{self._sessions_max} sessions are open, which is the limit"
            return Refused(reason, Cause.LIMIT)
        return None


def _unfit(engine: Engine, message: Register) -> Refused | None:
    """Why a worker can't join an engine; None if it can."""
    shard, layout = message.shard, message.layout
    where = f"engine {message.engine!r} rank {shard.rank()}"
    if not engine.workers or engine.shape is None or engine.namespace is None:
        return None
    holder = engine.workers.get(shard.rank())
    if holder is not None and holder.closing:
        reason = f"{where}: transfers of its former session still use its memory; try again"
        return Refused(reason, Cause.LIMIT)
    if holder is not None:
        return Refused(f"{where}: registered by a live session already", Cause.LAYOUT)
    pairs: list[tuple[str, object, object]] = [
        ("(tp_size, pp_size, replicas)", _shape(shard), _shape(engine.shape)),
        ("namespace", message.namespace, engine.namespace),
        ("tokens_per_chunk", layout.tokens_per_chunk, engine.tokens_per_chunk),
        ("window_chunks", layout.window_chunks(), engine.window_chunks),
    ]
    for worker in engine.workers.values():
        if worker.layout is None or worker.shard is None:
            continue
        pairs.append(("dtype", layout.dtype, worker.layout.dtype))
        if worker.shard.index() == shard.index():
            theirs = worker.layout.fingerprint().hex()
            pairs.append(("fingerprint of the same KV", layout.fingerprint().hex(), theirs))
    for name, mine, other in pairs:
        if mine != other:
            reason = f"{where}: {name}={mine}, but other ranks have {other}"
            return Refused(reason, Cause.LAYOUT)
    return None


def _shape(shard: Shard) -> tuple[int, int, int]:
    return shard.tp_size, shard.pp_size, shard.replicas
