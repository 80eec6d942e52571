"""Driver: a Service with fake hands that a test moves step by step.

Moves that the core hands out wait in ``moves`` until the test ends them, one by one or all. Every
event is followed by check_invariants, every Move goes through the BytesModel, every Completed and
Detach may come once only. ``persists`` are made durable at once unless ``durable`` is off.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core.eviction import LeastRecentlyUsed, Policy
from kvstore.core.keys import ChunkKeys, Namespace, prefix_keys
from kvstore.core.layout import LayerGroup, Layout, Shard, TensorSpan
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import (
    ADMIN,
    Attach,
    Body,
    Cancel,
    Clear,
    Completed,
    Detach,
    EngineState,
    Event,
    Lookup,
    LookupReply,
    Message,
    Move,
    Moved,
    MoveKind,
    MoveStatus,
    Persist,
    Persisted,
    Register,
    Release,
    Reply,
    Request,
    Retrieve,
    ScanDone,
    Scanned,
    ScannedSlot,
    SessionClosed,
    SessionID,
    SpaceRecord,
    Store,
    Tick,
    TierName,
)
from kvstore.core.remote_messages import RemoteEffect
from kvstore.core.service import Service
from kvstore.core.stats import CoreStats, TierStats
from tests.core.bytes_model import BytesModel

CHUNK_TOKENS = 16
BLOCK_BYTES = 4096
BLOCKS = 4096
MODEL = Namespace("org/model", "r1", "test/rows")


def layout(blocks_per_chunk: int = 1, window: int | None = None, dtype: str = "float32") -> Layout:
    """A layout whose FULL part has ``blocks_per_chunk`` blocks of 4 KiB a chunk; with ``window``
    also a window group of one block of 4 KiB a chunk."""
    tokens = CHUNK_TOKENS * blocks_per_chunk
    groups = [LayerGroup("full", CHUNK_TOKENS, None, (_span(0),))]
    if window is not None:
        groups.append(LayerGroup("window", tokens, window, (_span(1),)))
    return Layout(dtype, tokens, tuple(groups))


def limits(host_slots: int = 4, nvme_slots: int = 0, **settings: Any) -> Limits:
    """One host slab of ``host_slots`` slots of 4 KiB, and one NVMe slab of ``nvme_slots`` slots for
    the same chunks (0: no NVMe tier)."""
    nvme = TierLimits(1, nvme_slots * 2 * BLOCK_BYTES) if nvme_slots else None
    host = TierLimits(1, host_slots * BLOCK_BYTES)
    return Limits(host=host, nvme=nvme, **settings)


def block_ids(count: int, start: int = 0) -> bytes:
    """Packed block IDs start, start + 1, ..."""
    return struct.pack(f"<{count}I", *range(start, start + count))


@dataclass(eq=False)
class Engine:
    """An engine of a test: its workers' sessions by rank, and its scheduler's."""

    driver: Driver
    name: str
    tenant: str
    layout: Layout
    workers: list[SessionID] = field(default_factory=list)
    scheduler: SessionID = ADMIN
    digest: bytes = b""

    def chain(self, chunks: int, seed: int = 0, shared: int = 0) -> ChunkKeys:
        """Keys of a prompt: ``shared`` chunks that all prompts share, then those of ``seed``."""
        size = self.layout.tokens_per_chunk
        tokens = [1] * (shared * size) + [2 + seed] * ((chunks - shared) * size)
        return prefix_keys(self.digest, size, tokens)

    def store(self, keys: ChunkKeys, rank: int = 0, request: str = "r", **options: bytes) -> int:
        """Send a store; ``options`` replaces the blocks of a group."""
        blocks = self._blocks(len(keys), options)
        return self.driver.send(
            self.workers[rank], Store(request, keys.data, keys.first, keys.parent, blocks)
        )

    def retrieve(self, keys: ChunkKeys, rank: int = 0, request: str = "r", **options: bytes) -> int:
        """Send a retrieve."""
        blocks = self._blocks(len(keys), options)
        return self.driver.send(self.workers[rank], Retrieve(request, keys.data, blocks))

    def put(self, keys: ChunkKeys) -> bytes:
        """Store on all ranks, carry everything out, and return the done mask of all."""
        numbers = [self.store(keys, rank) for rank in range(len(self.workers))]
        self.driver.run()
        masks = [
            self.driver.completed(session, number).done
            for session, number in zip(self.workers, numbers, strict=True)
        ]
        return bytes(map(min, zip(*masks, strict=True)))

    def get(self, keys: ChunkKeys, rank: int = 0, request: str = "r") -> bytes:
        """Retrieve, carry everything out, and return the done mask."""
        number = self.retrieve(keys, rank, request)
        self.driver.run()
        return self.driver.completed(self.workers[rank], number).done

    def lookup(self, keys: ChunkKeys, request: str = "r") -> int:
        """How many chunks a lookup reports."""
        number = self.driver.send(self.scheduler, Lookup(request, keys.data))
        body = self.driver.answer(self.scheduler, number)
        assert isinstance(body, LookupReply)
        assert (body.status.name == "HIT") == (body.chunks > 0)
        return body.chunks

    def peek(self, keys: ChunkKeys) -> int:
        """What a lookup reports, leaving no lease behind."""
        chunks = self.lookup(keys, "peek")
        self.release("peek")
        return chunks

    def release(self, request: str = "r") -> None:
        """End a request's lease."""
        self.driver.send(self.scheduler, Release(request))

    def cancel(self, transfer: int, rank: int = 0) -> None:
        """Ask for the end of a transfer."""
        self.driver.send(self.workers[rank], Cancel(transfer))

    def _blocks(self, chunks: int, options: dict[str, bytes]) -> tuple[bytes, ...]:
        return tuple(
            options.get(group.name, block_ids(chunks * self.layout.blocks_per_chunk(number)))
            for number, group in enumerate(self.layout.groups)
        )


class Driver:
    """A Service under test, its virtual clock and what it has answered so far."""

    def __init__(
        self,
        limits: Limits,
        spaces: tuple[SpaceRecord, ...] = (),
        policy: Callable[[], Policy] = LeastRecentlyUsed,
    ) -> None:
        self.service = Service(limits, spaces, policy)
        self.now = 0.0
        self.durable = True
        self.moves: list[Move] = []
        self.handed_out: list[Move] = []
        self.replies: list[Reply] = []
        self.persists: list[Persist] = []
        self.remote: list[RemoteEffect] = []
        self.closed: set[SessionID] = set()
        self.detached: list[SessionID] = []
        self.media = BytesModel()
        self._requests = 0
        self._sessions = 0

    # ------------------------------------------------------------ events

    def event(self, event: Event) -> list[Reply]:
        """Let the core handle an event; returns the replies that it led to."""
        self.now += 0.001
        if isinstance(event, SessionClosed):
            self.closed.add(event.session)
        before = len(self.replies)
        effects = self.service.handle(event, self.now)
        self.service.check_invariants()
        for effect in effects:
            if isinstance(effect, Move):
                self.media.begin(effect)
                self.moves.append(effect)
                self.handed_out.append(effect)
            elif isinstance(effect, Reply):
                assert effect.session not in self.closed, f"{effect} to a session that is lost"
                self.replies.append(effect)
            elif isinstance(effect, Detach):
                self._detach(effect.session)
            elif isinstance(effect, Persist):
                self.persists.append(effect)
                if self.durable:
                    self.event(Persisted(effect.number))
            else:
                self.remote.append(effect)
        return self.replies[before:]

    def send(self, session: SessionID, message: Message) -> int:
        """Send a request; returns its number."""
        self._requests += 1
        self.event(Request(session, self._requests, message))
        return self._requests

    def end(self, move: Move, status: MoveStatus = MoveStatus.OK) -> list[Reply]:
        """The hands have done a Move."""
        self.moves.remove(move)
        self.media.end(move, status)
        return self.event(Moved(move.id, status))

    def run(self, *kinds: MoveKind) -> list[Move]:
        """End all Moves of these kinds (none given: of any), and those they lead to, in order."""
        done = []
        while move := next((m for m in self.moves if not kinds or m.kind in kinds), None):
            self.end(move)
            done.append(move)
        return done

    def tick(self, seconds: float = 0.0) -> None:
        """Time passes."""
        self.now += seconds
        self.event(Tick())

    def close(self, session: SessionID) -> None:
        """A session is lost."""
        self.event(SessionClosed(session))

    def clear(self, tenant: str | None = None, model: str | None = None) -> int:
        """The administrator clears; returns the request's number."""
        return self.send(ADMIN, Clear(tenant, model))

    def scanned(self, *batches: Iterable[ScannedSlot]) -> None:
        """The NVMe scan reports these batches and ends."""
        for batch in batches:
            self.scan_batch(batch)
        self.event(ScanDone(TierName.NVME))

    def scan_batch(self, batch: Iterable[ScannedSlot]) -> None:
        """The NVMe scan reports one batch."""
        slots = tuple(batch)
        for slot in slots:
            if slot.header is not None:
                self.media.put(slot.place, slot.header)
        self.event(Scanned(slots))

    # ------------------------------------------------------------ sessions

    def session(self) -> SessionID:
        """A new session's number."""
        self._sessions += 1
        return SessionID(self._sessions)

    def engine(
        self,
        name: str = "e1",
        tenant: str = "t1",
        shape: Layout | None = None,
        shards: Sequence[Shard] = (Shard(),),
        namespace: Namespace = MODEL,
    ) -> Engine:
        """An engine that is ready: a worker for each shard, and a scheduler."""
        engine = Engine(self, name, tenant, shape or layout())
        for shard in shards:
            session = self.session()
            engine.workers.append(session)
            state = self.ask(session, Register(name, tenant, namespace, engine.layout, shard))
            assert isinstance(state, EngineState), state
        engine.scheduler = self.session()
        state = self.ask(engine.scheduler, Attach(name, tenant))
        assert isinstance(state, EngineState)
        assert state.ready
        engine.digest = state.namespace
        return engine

    # ------------------------------------------------------------ what came out

    def ask(self, session: SessionID, message: Message) -> Body:
        """Send a request that is answered at once."""
        return self.answer(session, self.send(session, message))

    def answer(self, session: SessionID, number: int) -> Body:
        """The one reply to a request."""
        found = self.answers(session, number)
        assert len(found) == 1, f"{len(found)} replies to request {number} of session {session}"
        return found[0]

    def answers(self, session: SessionID, number: int) -> list[Body]:
        """All replies to a request, or with number 0 all pushes: never more than one is right."""
        return [r.body for r in self.replies if (r.session, r.id) == (session, number)]

    def completed(self, session: SessionID, number: int) -> Completed:
        """The Completed of a transfer."""
        body = self.answer(session, number)
        assert isinstance(body, Completed), body
        return body

    def is_open(self, session: SessionID, number: int) -> bool:
        """Whether a transfer has had no reply yet."""
        return not self.answers(session, number)

    def waiting(self, kind: MoveKind) -> list[Move]:
        """The Moves of a kind that are in the hands."""
        return [move for move in self.moves if move.kind is kind]

    def count(self, kind: MoveKind) -> int:
        """How many Moves of a kind have been handed out so far."""
        return sum(move.kind is kind for move in self.handed_out)

    def stats(self) -> CoreStats:
        """A snapshot."""
        return self.service.stats(self.now)

    def tier(self, name: TierName = TierName.HOST) -> TierStats:
        """A tier's snapshot."""
        return next(tier for tier in self.stats().tiers if tier.name == name.value)

    def drops(self, reason: str) -> int:
        """How many parts were dropped for a reason."""
        return self.stats().drops.get(reason, 0)

    def _detach(self, session: SessionID) -> None:
        assert session not in self.detached, f"session {session} detached twice"
        mine = [move for move in self.moves if move.session == session]
        assert not mine, f"session {session} detached while {mine} use its memory"
        self.detached.append(session)


def _span(place: int) -> TensorSpan:
    return TensorSpan(place * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)
