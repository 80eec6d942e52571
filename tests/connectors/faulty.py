"""FaultyDaemon: a daemon in this process that keeps chunks of real engine memory and fails on
order.

Only for faults that a real daemon can't be told to make: everything else is tested against the real
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.core.keys import ChunkKey, ChunkKeys, prefix_keys
from kvstore.core.layout import Layout
from kvstore.core.messages import HitStatus
from kvstore.memory import OwnedHostMemory


@dataclass(frozen=True)
class FakeOutcome:
    done: tuple[int, ...]

    @property
    def leading_chunks(self) -> int:
        return self.done.index(0) if 0 in self.done else len(self.done)


@dataclass(frozen=True)
class FakeFound:
    status: HitStatus
    chunks: int


@dataclass
class FakeTicket:
    """Ends at once, at a cancel, or never, and then keeps its blocks."""

    outcome: FakeOutcome
    ends: str = "at once"
    cancelled: bool = False

    def done(self) -> bool:
        return self.ends == "at once" or (self.ends == "at cancel" and self.cancelled)

    def wait(self, timeout_s: float) -> FakeOutcome | None:
        return self.outcome if self.done() else None

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FaultyDaemon:
    """Chunks by key, and what is to go wrong: ``corrupt`` chunk numbers fail to load, transfers of
    a kind in ``ends`` end late or never, verbs in ``raising`` raise."""

    chunks: dict[ChunkKey, list[bytes]] = field(default_factory=dict)
    corrupt: set[int] = field(default_factory=set)
    ends: dict[str, str] = field(default_factory=dict)
    raising: set[str] = field(default_factory=set)
    pending: int = 0
    tickets: list[FakeTicket] = field(default_factory=list)
    leases: set[str] = field(default_factory=set)
    stored: list[int] = field(default_factory=list)
    sessions: list[FaultySession] = field(default_factory=list)

    def connect(self, memory: OwnedHostMemory, layout: Layout) -> FaultySession:
        self.sessions.append(FaultySession(self, memory, layout))
        return self.sessions[-1]


@dataclass
class FaultySession:
    daemon: FaultyDaemon
    memory: OwnedHostMemory
    layout: Layout
    closed: bool = False

    def keys(self, token_ids: Sequence[int]) -> ChunkKeys:
        self._perhaps_raise("keys")
        return prefix_keys(b"n" * 32, self.layout.tokens_per_chunk, token_ids)

    def lookup(self, request: str, keys: ChunkKeys) -> FakeFound:
        self._perhaps_raise("lookup")
        self.daemon.leases.add(request)
        found = 0
        while found < len(keys) and keys[found] in self.daemon.chunks:
            found += 1
        if self.daemon.pending > 0:
            self.daemon.pending -= 1
            return FakeFound(HitStatus.PENDING, 0)
        return FakeFound(HitStatus.HIT if found else HitStatus.MISS, found)

    def release(self, request: str) -> None:
        self._perhaps_raise("release")
        self.daemon.leases.discard(request)

    def store(
        self, request: str, keys: ChunkKeys, blocks: Mapping[str, Sequence[int]]
    ) -> FakeTicket:
        self._perhaps_raise("store")
        self.daemon.stored.append(len(keys))
        if self._ends("store") == "at once":
            for number, key in enumerate(keys):
                self.daemon.chunks[key] = [bytes(view) for view in self._views(blocks, number)]
        return self._ticket("store", [1] * len(keys))

    def retrieve(
        self, request: str, keys: ChunkKeys, blocks: Mapping[str, Sequence[int]]
    ) -> FakeTicket:
        self._perhaps_raise("retrieve")
        done = []
        for number, key in enumerate(keys):
            broken = keys.first + number in self.daemon.corrupt
            done.append(int(not broken))
            for view, kept in zip(
                self._views(blocks, number), self.daemon.chunks[key], strict=True
            ):
                view[:] = b"\xff" * len(view) if broken else kept
        return self._ticket("retrieve", done)

    def wait_ready(self, timeout_s: float) -> bool:
        return not self.closed

    def close(self) -> None:
        self.closed = True

    def late_write(self, blocks: Sequence[int]) -> None:
        """What a stopped daemon does when it goes on: scribble over blocks it was never given
        back."""
        for view in self._views({"full": blocks}, 0):
            view[:] = b"\xee" * len(view)

    def _views(self, blocks: Mapping[str, Sequence[int]], number: int) -> list[memoryview]:
        """The memory of one chunk, span by span and block by block."""
        size = self.layout.blocks_per_chunk(0)
        ids = blocks["full"][number * size : (number + 1) * size]
        spans = self.layout.groups[0].tensors
        starts = [(s.offset_bytes + i * s.block_stride_bytes, s) for s in spans for i in ids]
        return [self.memory.buffer[start : start + s.block_bytes] for start, s in starts]

    def _ends(self, kind: str) -> str:
        return self.daemon.ends.get(kind, "at once")

    def _ticket(self, kind: str, done: list[int]) -> FakeTicket:
        ends = self._ends(kind)
        outcome = FakeOutcome(tuple(done) if ends == "at once" else (0,) * len(done))
        self.daemon.tickets.append(FakeTicket(outcome, ends))
        return self.daemon.tickets[-1]

    def _perhaps_raise(self, verb: str) -> None:
        if verb in self.daemon.raising:
            raise RuntimeError(f"{verb} is broken")
