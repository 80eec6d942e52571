"""Mover: carries out Moves. The one place where engine memory, host arena and lower tiers meet.

Each kind of Move has a lane: a queue served by a few threads in the order of arrival. How deep a
lane gets and what goes first is the core's decision; the mover refuses nothing and reorders
nothing. A Move holds what it names and waits for nothing else, so lanes can't block one another.

Every Move that is submitted is reported exactly once, after the last access to its memory. Errors
that are expected become a MoveStatus here; anything else is a bug in the code below, which must
not cost the Move: it is reported as FAILED, logged with its trace, and marks the mover degraded.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvstore.core.errors import (
    CapacityError,
    ChunkCorruptError,
    InvariantError,
    KVStoreError,
    LayoutMismatchError,
    SessionLostError,
)
from kvstore.core.messages import (
    Move,
    Moved,
    MoveKind,
    MoveStatus,
    Place,
    SessionID,
    TierName,
)
from kvstore.device.base import Pages
from kvstore.tiers.base import ChunkForeignError, Tier
from kvstore.tiers.host import HostTier
from kvstore.tiers.priority import lower_priority
from kvstore.tiers.threads import start_thread

_log = logging.getLogger(__name__)

Hook = Callable[[str, Move], None]
"""A sequence point of tests: called with "begin" or "before report" and the Move."""


class Lane(Enum):
    """Threads that share a queue."""

    COPY = "copy"
    READ = "read"
    WRITE = "write"


_LANES = {
    MoveKind.STORE: Lane.COPY,
    MoveKind.LOAD: Lane.COPY,
    MoveKind.READ: Lane.READ,
    MoveKind.WRITE: Lane.WRITE,
    MoveKind.ERASE: Lane.WRITE,
}


@dataclass(frozen=True, slots=True)
class MoverThreads:
    """Threads of each lane. Two copy threads reach the memory's bandwidth; four readers overlap
    checksums with I/O (SPEED)."""

    copy: int = min(2, os.cpu_count() or 1)
    read: int = 4
    write: int = 2


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane: Moves waiting, being carried out and done so far, by status; ``busy_s`` sums over
    its threads."""

    lane: str
    threads: int
    threads_alive: int
    queued: int
    running: int
    done: dict[str, int]
    bytes_moved: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class MoverStats:
    """A snapshot of the mover. ``degraded`` says in one line what is wrong, empty if nothing
    is."""

    lanes: tuple[LaneStats, ...]
    sessions: int
    unexpected_errors: int
    degraded: str


class Mover:
    """Carries out Moves in threads and reports each by ``report``, which is called there.

    Borrows the tiers, which are open before ``open`` and closed after ``close``; owns its threads.
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Mapping[TierName, Tier],
        report: Callable[[Moved], None],
        threads: MoverThreads | None = None,
        hook: Hook | None = None,
    ) -> None:
        self._host = host
        self._tiers = dict(tiers)
        self._report = report
        self._hook = hook
        self._pages: dict[SessionID, Pages] = {}
        counts = threads or MoverThreads()
        self._lanes = {lane: _Lane(lane, getattr(counts, lane.value)) for lane in Lane}
        self._unexpected = 0

    def open(self) -> None:
        """Start the threads; raises TierUnavailableError where the system refuses one, and
        ``close`` ends the others."""
        for lane in self._lanes.values():
            lane.start(self._run)

    def close(self) -> None:
        """Carry out what was submitted, then end the threads. Idempotent."""
        for lane in self._lanes.values():
            lane.stop()

    def attach(self, session: SessionID, pages: Pages) -> None:
        """Make a session's memory known, before its first Move."""
        self._pages[session] = pages

    def detach(self, session: SessionID) -> None:
        """Forget a session's memory; no Move of it may be running. Unknown sessions are fine."""
        self._pages.pop(session, None)

    def submit(self, move: Move) -> None:
        """Queue a Move; returns at once. Its Moved follows, whatever happens."""
        self._lanes[_LANES[move.kind]].queue.put(move)

    def stats(self) -> MoverStats:
        """A snapshot."""
        lanes = tuple(lane.stats() for lane in self._lanes.values())
        degraded = "; ".join(
            f"{lane.threads - lane.threads_alive} of {lane.threads} {lane.lane} threads have ended"
            for lane in lanes
            if lane.threads_alive < lane.threads
        )
        if self._unexpected:
            degraded = degraded or f"{self._unexpected} Moves failed by an unexpected error"
        return MoverStats(lanes, len(self._pages), self._unexpected, degraded)

    def _run(self, lane: _Lane) -> None:
        lower_priority()
        while (move := lane.queue.get()) is not None:
            start = lane.begin()
            status = self._carry_out(move)
            lane.end(move, status, time.perf_counter() - start)
            self._tell(move, status)

    def _carry_out(self, move: Move) -> MoveStatus:
        """How a Move ended: the outer boundary of everything below.

        The one broad ``except`` is here: whatever goes wrong, the thread lives on and the core
        learns that the Move has ended, or its slots and the engine's blocks would be lost.
        """
        try:
            return self._attempt(move)
        except Exception:  # noqa: BLE001
            self._unexpected += 1
            _log.exception("mover: %s of session %s failed", move.kind.value, move.session)
            return MoveStatus.FAILED

    def _tell(self, move: Move, status: MoveStatus) -> None:
        self._at("before report", move)
        try:
            self._report(Moved(move.id, status))
        except RuntimeError:
            self._unexpected += 1
            _log.exception("mover: the end of Move %d can't be reported", move.id)

    def _attempt(self, move: Move) -> MoveStatus:
        """Carry out a Move; every expected error becomes its status."""
        try:
            self._at("begin", move)
            _ACTIONS[move.kind](self, move)
        except ChunkForeignError as error:
            return _failed(move, MoveStatus.FOREIGN, error)
        except ChunkCorruptError as error:
            return _failed(move, MoveStatus.CORRUPT, error)
        except CapacityError as error:
            return _failed(move, MoveStatus.NO_SPACE, error)
        except InvariantError:
            raise
        except (KVStoreError, OSError) as error:
            return _failed(move, MoveStatus.FAILED, error)
        return MoveStatus.OK

    def _store(self, move: Move) -> None:
        slot = self._host.view(_place(move.target, move), move.header.payload_bytes)
        self._session_pages(move).gather(move.blocks, slot)

    def _load(self, move: Move) -> None:
        slot = self._host.view(_place(move.source, move), move.header.payload_bytes)
        self._session_pages(move).scatter(move.blocks, slot)

    def _read(self, move: Move) -> None:
        source = _place(move.source, move)
        slot = self._host.view(_place(move.target, move), move.header.payload_bytes)
        self._tiers[source.tier].read(source, move.header, slot)

    def _write(self, move: Move) -> None:
        target = _place(move.target, move)
        slot = self._host.view(_place(move.source, move), move.header.payload_bytes)
        self._tiers[target.tier].write(target, move.header, slot)

    def _erase(self, move: Move) -> None:
        place = _place(move.target or move.source, move)
        self._tiers[place.tier].erase(place)

    def _session_pages(self, move: Move) -> Pages:
        pages = None if move.session is None else self._pages.get(move.session)
        if pages is None:
            raise SessionLostError(f"mover: session {move.session} isn't attached")
        return pages

    def _at(self, point: str, move: Move) -> None:
        if self._hook is not None:
            self._hook(point, move)


_ACTIONS: dict[MoveKind, Callable[[Mover, Move], None]] = {
    MoveKind.STORE: Mover._store,
    MoveKind.LOAD: Mover._load,
    MoveKind.READ: Mover._read,
    MoveKind.WRITE: Mover._write,
    MoveKind.ERASE: Mover._erase,
}


class _Lane:
    """A queue, its threads and its counts."""

    def __init__(self, lane: Lane, threads: int) -> None:
        self.queue: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._lane = lane
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._running = 0
        self._done = dict.fromkeys(MoveStatus, 0)
        self._bytes = 0
        self._busy_s = 0.0

    def start(self, run: Callable[[_Lane], None]) -> None:
        for number in range(self._count):
            name = f"{self._lane.value}-{number}"
            self._threads.append(start_thread(name, functools.partial(run, self)))

    def stop(self) -> None:
        for _ in self._threads:
            self.queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def begin(self) -> float:
        with self._lock:
            self._running += 1
        return time.perf_counter()

    def end(self, move: Move, status: MoveStatus, seconds: float) -> None:
        with self._lock:
            self._running -= 1
            self._done[status] += 1
            self._busy_s += seconds
            if status is MoveStatus.OK and move.kind is not MoveKind.ERASE:
                self._bytes += move.header.payload_bytes

    def stats(self) -> LaneStats:
        with self._lock:
            return LaneStats(
                lane=self._lane.value,
                threads=len(self._threads),
                threads_alive=sum(thread.is_alive() for thread in self._threads),
                queued=self.queue.qsize(),
                running=self._running,
                done={status.value: count for status, count in self._done.items()},
                bytes_moved=self._bytes,
                busy_s=self._busy_s,
            )


def _place(place: Place | None, move: Move) -> Place:
    if place is None:
        raise LayoutMismatchError(f"mover: a {move.kind.value} names no place")
    return place


def _failed(move: Move, status: MoveStatus, error: Exception) -> MoveStatus:
    _log.info(
        "mover: %s ended as %s: key=%s session=%s: %s",
        move.kind.value, status.value, move.header.key.hex()[:16], move.session, error,
    )  # fmt: skip
    return status
