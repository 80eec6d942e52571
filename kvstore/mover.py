"""Mover: carries out Moves. The one place where engine memory, host arena and lower tiers meet.

Each kind of Move has a lane: a queue served by a few threads (mover_lanes.py). How deep a lane gets
is the core's decision; the mover refuses nothing. A Move holds what it names and waits for nothing
else, so lanes can't block one another. Redis has lanes of its own, and threads for what the core
asks of it beside Moves (mover_remote.py); they start when ``open_remote`` brings it.

Every Move that is submitted is reported exactly once, after the last access to its memory. Errors
that are expected become a MoveStatus here; anything else is a bug in the code below, which must
not cost the Move: it is reported as FAILED, logged with its trace, and marks the mover degraded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.core.errors import (
    CapacityError,
    ChunkCorruptError,
    KVStoreError,
    LayoutMismatchError,
    SessionLostError,
    TierUnavailableError,
)
from kvstore.core.guard import guarded
from kvstore.core.messages import (
    Move,
    Moved,
    MoveKind,
    MoveStatus,
    Place,
    SessionID,
    TierName,
)
from kvstore.core.remote_messages import RemoteEffect
from kvstore.device.base import Pages
from kvstore.mover_lanes import REDIS_LANES, Lane, LaneName, LaneStats, lane_of
from kvstore.mover_remote import NOT_OPEN, Answer, RemoteAsks
from kvstore.tiers.base import ChunkForeignError, Tier
from kvstore.tiers.host import HostTier
from kvstore.tiers.priority import Home
from kvstore.tiers.remote import RemoteTier

_log = logging.getLogger(__name__)

Hook = Callable[[str, Move], None]
"""A sequence point of tests: called with "begin" or "before report" and the Move."""
Report = Callable[[Sequence[Moved]], None]
"""Told, in the mover's threads, of Moves that have ended."""


@dataclass(frozen=True, slots=True)
class MoverThreads:
    """Threads of each lane. Two copy threads reach the memory's bandwidth; of six readers and
    writers four keep the device busy (tiers/block_io.py), while others compute checksums."""

    copy: int = min(2, os.cpu_count() or 1)
    read: int = 6
    write: int = 6
    redis_read: int = 4
    redis_write: int = 4
    redis_probe: int = 2


@dataclass(frozen=True, slots=True)
class MoverStats:
    """A snapshot of the mover. ``degraded`` says in one line what is wrong, empty if nothing
    is."""

    lanes: tuple[LaneStats, ...]
    sessions: int
    unexpected_errors: int
    degraded: str


class Mover:
    """Carries out Moves in threads and reports each once by ``report``, which is called there.

    Borrows the tiers, which are open before ``open`` and closed after ``close``; owns its threads.
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Mapping[TierName, Tier],
        report: Report,
        threads: MoverThreads | None = None,
        hook: Hook | None = None,
        answer: Answer | None = None,
    ) -> None:
        self._host = host
        self._local = dict(tiers)
        self._tiers: dict[TierName, Tier | RemoteTier] = dict(tiers)
        self._report = report
        self._hook = hook
        self._pages: dict[SessionID, Pages] = {}
        counts = threads or MoverThreads()
        self._lanes = {
            LaneName.COPY: Lane(LaneName.COPY, counts.copy),
            LaneName.READ: Lane(LaneName.READ, counts.read),
            LaneName.WRITE: Lane(LaneName.WRITE, counts.write),
            LaneName.REDIS_READ: Lane(LaneName.REDIS_READ, counts.redis_read),
            LaneName.REDIS_WRITE: Lane(LaneName.REDIS_WRITE, counts.redis_write),
        }
        self._asks = RemoteAsks(answer or _ignore, counts.redis_probe)
        self._unexpected = 0

    def open(self) -> None:
        """Start the threads; raises TierUnavailableError where the system refuses one, and
        ``close`` ends the others."""
        for name in (LaneName.COPY, LaneName.READ, LaneName.WRITE):
            self._lanes[name].start(self._run)

    def open_remote(self, tier: RemoteTier) -> None:
        """Begin to use the remote tier, beside a mover that is open already. Raises
        TierUnavailableError as ``open`` does."""
        for name in REDIS_LANES.values():
            self._lanes[name].start(self._run)
        self._tiers[TierName.REDIS] = tier
        self._asks.open(tier)

    def close(self) -> None:
        """Carry out what was submitted, then end the threads. Idempotent. The remote tier is closed
        before, so that what waits for a server ends."""
        self._asks.close()
        for lane in self._lanes.values():
            lane.stop()

    def attach(self, session: SessionID, pages: Pages) -> None:
        """Make a session's memory known, before its first Move."""
        self._pages[session] = pages

    def detach(self, session: SessionID) -> None:
        """Forget a session's memory; no Move of it may be running. Unknown sessions are fine."""
        self._pages.pop(session, None)

    def submit(self, *moves: Move) -> None:
        """Queue Moves; returns at once. The Moved of each follows, whatever happens."""
        lanes: dict[LaneName, list[Move]] = {}
        for move in moves:
            lanes.setdefault(lane_of(move), []).append(move)
        for name, queued in lanes.items():
            if name in REDIS_LANES.values() and TierName.REDIS not in self._tiers:
                for move in queued:
                    _failed(move, MoveStatus.FAILED, TierUnavailableError(NOT_OPEN))
                self._tell([(move, MoveStatus.FAILED) for move in queued])
            else:
                self._lanes[name].put(*queued)

    def remote(self, effect: RemoteEffect) -> None:
        """Carry out what the core asks of the remote tier; returns at once. A Probe and a
        RemoteClear are answered, whatever happens."""
        self._asks.submit(effect)

    def stats(self) -> MoverStats:
        """A snapshot."""
        lanes = tuple(lane.stats() for lane in self._lanes.values())
        degraded = "; ".join(
            f"{lane.threads - lane.threads_alive} of {lane.threads} {lane.lane} threads have ended"
            for lane in lanes
            if lane.threads_alive < lane.threads
        )
        asks = self._asks.stats()
        if asks.threads_alive < asks.threads:
            degraded = degraded or "a thread that asks Redis has ended"
        unexpected = self._unexpected + asks.unexpected_errors
        if unexpected:
            degraded = degraded or f"{unexpected} Moves or probes failed by an unexpected error"
        return MoverStats(lanes, len(self._pages), unexpected, degraded)

    def _run(self, lane: Lane, home: Home | None) -> None:
        ended: list[tuple[Move, MoveStatus]] = []
        move = lane.take(home)
        while move is not None:
            start_s = lane.begin()
            status = self._carry_out(move)
            lane.end(move, status, start_s)
            ended.append((move, status))
            following = lane.take_next(move)
            if following is None:
                self._tell(ended)
                ended.clear()
                following = lane.take(home)
            move = following

    def _carry_out(self, move: Move) -> MoveStatus:
        """How a Move ended: the outer boundary of everything below.

        Whatever goes wrong, the thread lives on and the core learns that the Move has ended, or
        its slots and the engine's blocks would be lost.
        """
        return guarded(lambda: self._attempt(move), lambda error: self._failed(move, error))

    def _failed(self, move: Move, error: Exception) -> MoveStatus:
        """An error that nobody expected."""
        self._unexpected += 1
        _log.error("mover: %s of session %s failed", move.kind.value, move.session, exc_info=error)
        return MoveStatus.FAILED

    def _tell(self, ended: Sequence[tuple[Move, MoveStatus]]) -> None:
        for move, _ in ended:
            self._at("before report", move)
        try:
            self._report([Moved(move.id, status) for move, status in ended])
        except RuntimeError:
            self._unexpected += 1
            _log.exception("mover: the end of %d Moves can't be reported", len(ended))

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
        self._local[place.tier].erase(place)

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


def _ignore(answer: object) -> None:
    """Nobody asks where there is no remote tier."""


def _place(place: Place | None, move: Move) -> Place:
    if place is None:
        raise LayoutMismatchError(f"mover: a {move.kind.value} names no place")
    return place


def _failed(move: Move, status: MoveStatus, error: Exception) -> MoveStatus:
    remote = lane_of(move) in REDIS_LANES.values()
    _log.log(
        logging.DEBUG if remote else logging.INFO,
        "mover: %s ended as %s: key=%s session=%s: %s",
        move.kind.value, status.value, move.header.key.hex()[:16], move.session, error,
    )  # fmt: skip
    return status
