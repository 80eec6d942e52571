"""A server with the real core behind a real socket, whose Moves end at once, and a look into it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore import LayerGroup, Layout, Shard, TensorSpan
from kvstore.client_joining import Registering
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import (
    AllMoved,
    Move,
    Moved,
    MoveStatus,
    ScanDone,
    SessionID,
    TierName,
)
from kvstore.core.service import Service
from kvstore.daemon_hands import open_pages
from kvstore.memory import HostMemory
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.server import EngineServer
from kvstore.wire_messages import Registration
from tests.link_rig import BLOCK_BYTES, BLOCKS, CHUNK_TOKENS, SPACE, Peer, Rig, eventually, folder

MEMORY_BYTES = 2 * BLOCKS * BLOCK_BYTES
LIMITS = Limits(
    host=TierLimits(4, 1 << 18),
    nvme=TierLimits(4, 1 << 18),
    lease_s=1e9,
    session_bytes_max=1 << 20,
    transfers_max=64,
)
SETTLING = ("opening", "joining")
BYSTANDER = "bystander"
KEYS = b"".join(bytes([i]) * 32 for i in range(1, 4))
IDS = b"".join(i.to_bytes(4, "little") for i in range(12))


def layout() -> Layout:
    """A full and a window group, four blocks of 4 tokens each a chunk."""
    size = BLOCK_BYTES
    full = TensorSpan(0, size, size, BLOCKS)
    window = TensorSpan(BLOCKS * size, size, size, BLOCKS)
    groups = (LayerGroup("full", 4, None, (full,)), LayerGroup("window", 4, 17, (window,)))
    return Layout("float16", CHUNK_TOKENS, groups)


def register_message(engine: str) -> pb.ClientMessage:
    """A REGISTER of an engine's only rank."""
    registration = Registration(engine, SPACE, layout(), Shard(), MEMORY_BYTES)
    return Registering(registration, HostMemory(0, MEMORY_BYTES), "").join().message


class FuzzRig(Rig):
    """A Rig around the real core. ``service`` is looked at in the loop's thread only."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.service = Service(LIMITS)
        self.server = EngineServer(
            path, self.service, self, self._persist,
            functools.partial(open_pages, LIMITS), self._tenant,
        )  # fmt: skip

    def attach(self, session: SessionID, pages: object) -> None:
        """The mover's part: nothing is moved here."""

    def detach(self, session: SessionID) -> None:
        """Likewise."""

    def submit(self, *moves: Move) -> None:
        """Each Move ends well, soon."""
        self.server.post(AllMoved(tuple(Moved(move.id, MoveStatus.OK) for move in moves)))

    def look(self) -> dict[str, Any]:
        """The core's state, and the bystander's share of it, once everything has come to rest."""
        found: dict[str, Any] = {}

        def rests() -> bool:
            nonlocal found
            found = self.server.call(self._look).result(30)
            return bool(found["rests"])

        eventually(rests)
        return found

    def _look(self) -> dict[str, Any]:
        state, stats = self.service._state, self.service.stats(0.0)
        phases = [session.phase for session in self.server.stats().sessions]
        tickets = {s.id: (sorted(s.tickets), s.store_bytes) for s in state.engines.sessions()}
        engines = {(e.tenant, e.engine): e for e in stats.engines}
        every = state.leases._engines.items()
        pinned = [one for key, mine in every if key[1] == BYSTANDER for one in mine.values()]
        return {
            "rests": self.service.idle() and not set(phases) & set(SETTLING),
            "bystander": (
                [engine for key, engine in engines.items() if key[1] == BYSTANDER],
                [lease.holds() and lease.chunks for lease in pinned],
            ),
            "all": (
                [(t.slots_used, t.chunks, t.pinned, t.evictions) for t in stats.tiers],
                engines,
                [(s.tenant, s.namespace, s.epoch, s.chunks) for s in stats.spaces],
                (stats.leases, stats.lookups, stats.stored_chunks, stats.retrieved_chunks),
                (tickets, state.transfers._last, state.sequence, len(state.batches._batches)),
            ),
        }

    def check(self) -> None:
        """Nothing failed in the server, and the core's parts fit together."""
        assert self.failure is None
        self.server.call(self.service.check_invariants).result(30)
        assert self.server.call(self.server.stats).result(30).internal_errors == 0


@contextmanager
def fuzz_rig() -> Iterator[FuzzRig]:
    """A running one; it is checked at its end."""
    with folder() as path, FuzzRig(str(Path(path) / "d" / "s.sock")) as rig:
        rig.server.post(ScanDone(TierName.NVME))
        yield rig
        rig.check()


def joined(peer: Peer, engine: str, fd: int) -> None:
    """Shake hands and register an engine's only rank."""
    peer.greet()
    peer.send(register_message(engine), [fd])
    answer = peer.answer()
    assert answer.kind == pb.DaemonMessage.ENGINE, answer
