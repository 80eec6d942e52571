"""A Service with fake hands, every event of which is timed.

No bytes move: the hands end each Move at once. Keys are random, as the core never hashes. Times are
the thread's CPU time, so that other work on the machine doesn't count.
"""

from __future__ import annotations

import random
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvstore.core.keys import KEY_BYTES, NO_PARENT, ChunkKey, Namespace
from kvstore.core.layout import LayerGroup, Layout, Part, Shard, TensorSpan
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import (
    Attach,
    ChunkHeader,
    EngineState,
    Event,
    Lookup,
    LookupReply,
    Message,
    Move,
    Moved,
    MoveStatus,
    Persist,
    Persisted,
    Place,
    Register,
    Release,
    Reply,
    Request,
    ScanDone,
    Scanned,
    ScannedSlot,
    SessionID,
    SpaceRecord,
    Store,
    Tick,
    TierName,
)
from kvstore.core.service import Service

BLOCK_BYTES = 4096
TOKENS = 16
PROMPT = 512
SLAB_SLOTS = 8192
SCAN_SLOTS = 200
MODEL = Namespace("org/model", "r1", "test/rows")
TENANT = "t"


def layout(pages: int = 1) -> Layout:
    """Chunks of ``pages`` blocks of 4 KiB."""
    span = TensorSpan(0, BLOCK_BYTES, BLOCK_BYTES, 1 << 20)
    return Layout("float32", TOKENS * pages, (LayerGroup("full", TOKENS, None, (span,)),))


def limits(host_slots: int, nvme_slots: int = 0, pages: int = 1, **settings: Any) -> Limits:
    """Tiers of so many slots for chunks of ``pages`` blocks."""
    host = TierLimits(-(-host_slots // SLAB_SLOTS), SLAB_SLOTS * BLOCK_BYTES * pages)
    nvme = TierLimits(-(-nvme_slots // SLAB_SLOTS), SLAB_SLOTS * BLOCK_BYTES * (pages + 1))
    return Limits(host, nvme if nvme_slots else None, **settings)


def chain(chunks: int, seed: int) -> bytes:
    """Keys of a chain."""
    return random.Random(seed).randbytes(chunks * KEY_BYTES)


class Load:
    """A Service, its fake hands, and how long each event took, by label, in seconds."""

    def __init__(self, limits: Limits, spaces: tuple[SpaceRecord, ...] = ()) -> None:
        self.service = Service(limits, spaces)
        self.took: dict[str, list[float]] = {}
        self.moves: deque[Move] = deque()
        self.replies: dict[tuple[SessionID, int], object] = {}
        self.status: Callable[[Move], MoveStatus] = lambda move: MoveStatus.OK
        self.now = 0.0
        self._numbers = 0
        self._sessions = 0

    def event(self, label: str, event: Event) -> None:
        """Let the core handle an event, timed under ``label``."""
        self.now += 1e-5
        start_s = time.thread_time()
        effects = self.service.handle(event, self.now)
        self.note(label, time.thread_time() - start_s)
        for effect in effects:
            if isinstance(effect, Move):
                self.moves.append(effect)
            elif isinstance(effect, Reply):
                self.replies[effect.session, effect.id] = effect.body
            elif isinstance(effect, Persist):
                self.event(f"{label}: persisted", Persisted(effect.number))

    def note(self, label: str, took_s: float) -> None:
        """Count a time that was taken."""
        self.took.setdefault(label, []).append(took_s)

    def ask(self, label: str, session: SessionID, message: Message) -> int:
        """Send a request; returns its number."""
        self._numbers += 1
        self.event(label, Request(session, self._numbers, message))
        return self._numbers

    def join(self, message: Register | Attach) -> SessionID:
        """A new session."""
        self._sessions += 1
        session = SessionID(self._sessions)
        self.ask("join", session, message)
        return session

    def engine(self, name: str = "e", pages: int = 1, space: Namespace = MODEL) -> SessionID:
        """An engine of one worker, which is ready."""
        return self.join(Register(name, TENANT, space, layout(pages), Shard()))

    def end_move(self, label: str) -> None:
        """The oldest Move ends."""
        move = self.moves.popleft()
        self.event(f"{label}: {move.kind.value} ends", Moved(move.id, self.status(move)))

    def pump(self, label: str) -> None:
        """End all Moves, and begin all that waits for a Tick at once."""
        while self.moves or self.service.next_tick_s(self.now) == 0.0:
            while self.moves:
                self.end_move(label)
            if self.service.next_tick_s(self.now) == 0.0:
                self.event(f"{label}: tick", Tick())

    def settle(self, label: str) -> None:
        """Ticks until nothing is swept any more."""
        while self.service.next_tick_s(self.now) < 0.1:
            self.now += self.service.next_tick_s(self.now)
            self.event(f"{label}: tick", Tick())
            self.pump(label)

    def store(
        self, label: str, session: SessionID, keys: bytes, first: int = 0, parent: bytes = NO_PARENT
    ) -> None:
        """Store a chain, to its end."""
        blocks = blocks_of(len(keys) // KEY_BYTES)
        self.ask(label, session, Store("s", keys, first, ChunkKey(parent), (blocks,)))
        self.pump(label)

    def lookup(self, label: str, session: SessionID, keys: bytes, request: str = "r") -> int:
        """How many chunks hit."""
        number = self.ask(label, session, Lookup(request, keys))
        reply = self.replies.pop((session, number))
        assert isinstance(reply, LookupReply), reply
        return reply.chunks

    def hits(self, label: str, session: SessionID, prompts: list[bytes], rounds: int) -> None:
        """Lookups of random prompts, each released again; all must hit in whole."""
        for turn in range(rounds):
            keys = prompts[turn * 7919 % len(prompts)]
            found = self.lookup(label, session, keys, f"r{turn}")
            assert found == len(keys) // KEY_BYTES, found
            self.ask(f"{label}: release", session, Release(f"r{turn}"))

    def stats(self, label: str) -> None:
        """Take the statistics, timed."""
        start_s = time.thread_time()
        self.service.stats(self.now)
        self.note(label, time.thread_time() - start_s)


def blocks_of(chunks: int) -> bytes:
    """Packed block IDs."""
    return struct.pack(f"<{chunks}I", *range(chunks))


def fill(load: Load, session: SessionID, chunks: int, first_seed: int = 0) -> list[bytes]:
    """Store prompts of 512 chunks until there are ``chunks``; returns their keys."""
    prompts = [chain(PROMPT, first_seed + n) for n in range(-(-chunks // PROMPT))]
    for keys in prompts:
        load.store("fill: store", session, keys)
    return prompts


def records(chunks: int, depth: int, record: SpaceRecord) -> Iterator[ScannedSlot]:
    """NVMe slots of chains of ``depth`` chunks, head first."""
    for number in range(chunks):
        place, level = divmod(number, depth)
        keys = random.Random(place)
        if level == 0:
            parent = NO_PARENT
            data = keys.randbytes(depth * KEY_BYTES)
        key = ChunkKey(data[level * KEY_BYTES : (level + 1) * KEY_BYTES])
        header = ChunkHeader(
            key, parent, level, record.tenant, record.namespace, record.epoch, "float32", TOKENS,
            0, 1, Part.FULL, BLOCK_BYTES, number + 1,
        )  # fmt: skip
        parent = key
        slab, index = divmod(number, SLAB_SLOTS)
        yield ScannedSlot(Place(TierName.NVME, slab, index, 2 * BLOCK_BYTES), header)


def restored(label: str, slots: Iterable[ScannedSlot], chunks: int, host_slots: int) -> Load:
    """A Service that has taken in what a scan found; the batches come as the daemon sends them."""
    load = Load(limits(host_slots, chunks), (record(),))
    batch: list[ScannedSlot] = []
    started_s = time.thread_time()
    for slot in slots:
        batch.append(slot)
        if len(batch) == SCAN_SLOTS:
            load.event(f"{label}: scanned", Scanned(tuple(batch)))
            batch = []
            load.pump(label)
    load.event(f"{label}: scanned", Scanned(tuple(batch)))
    load.event(f"{label}: scan done", ScanDone(TierName.NVME))
    load.settle(label)
    load.note(f"{label}: in all, with the making of records", time.thread_time() - started_s)
    return load


def record() -> SpaceRecord:
    """The manifest's record of the one namespace."""
    load = Load(limits(4))
    session = load.engine()
    state = load.replies[session, 1]
    assert isinstance(state, EngineState)
    return SpaceRecord(TENANT, state.namespace, MODEL.model, MODEL.alias, 0)


def report(took: dict[str, list[float]], over_s: float) -> list[dict[str, Any]]:
    """One line a label, the longest event first."""
    lines = []
    for label, times in took.items():
        ordered = sorted(times)
        lines.append(
            {
                "event": label,
                "count": len(ordered),
                "p50_us": round(ordered[len(ordered) // 2] * 1e6, 1),
                "p99_us": round(ordered[len(ordered) * 99 // 100] * 1e6, 1),
                "max_ms": round(ordered[-1] * 1e3, 3),
                "over": sum(taken > over_s for taken in ordered),
            }
        )
    return sorted(lines, key=lambda line: -line["max_ms"])
