"""Lane: a queue of Moves, the threads that serve it, and what is counted of them.

LOADs overtake STOREs, since an engine waits for them; otherwise Moves begin in order of arrival.

To report wakes the daemon's loop, which then wants the interpreter lock and a core, both of which
the copies want too. So a thread that has carried out one chunk of a transfer goes on with the next
of the same transfer, if that waits next, and reports both together (``take_next``): nobody can use
the end of the first before.

Each copy thread waits on a core of its own (tiers/priority.py), and a Move wakes two that wait: the
second helps, or stands in where the first one's core is busy. Left to itself the kernel wakes them
all on the core of the loop, one behind the other, while another core is idle. Threads of NVMe have
no such core: they wait for the device all the time, and to go there costs more than it saves.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvstore.core.messages import Move, MoveKind, MoveStatus, TierName
from kvstore.tiers.priority import Home, lower_priority
from kvstore.tiers.threads import start_thread


class LaneName(Enum):
    """Which Moves share a queue."""

    COPY = "copy"
    READ = "read"
    WRITE = "write"
    REDIS_READ = "redis-read"
    REDIS_WRITE = "redis-write"


LANES = {
    MoveKind.STORE: LaneName.COPY,
    MoveKind.LOAD: LaneName.COPY,
    MoveKind.READ: LaneName.READ,
    MoveKind.WRITE: LaneName.WRITE,
    MoveKind.ERASE: LaneName.WRITE,
}
"""Of Moves between engines, host and NVMe."""
REDIS_LANES = {
    MoveKind.READ: LaneName.REDIS_READ,
    MoveKind.WRITE: LaneName.REDIS_WRITE,
}
"""Of Moves from and to Redis: a sick server never occupies the threads of the others."""


def lane_of(move: Move) -> LaneName:
    """The lane that carries a Move out."""
    source, target, remote = move.source, move.target, TierName.REDIS
    if (source and source.tier is remote) or (target and target.tier is remote):
        return REDIS_LANES[move.kind]
    return LANES[move.kind]


@dataclass(frozen=True, slots=True)
class KindStats:
    """Moves of one kind that succeeded, and the payload bytes that they moved."""

    moves: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane: Moves waiting, being carried out and done so far, by status and by kind;
    ``busy_s`` sums over its threads."""

    lane: str
    threads: int
    threads_alive: int
    queued: int
    running: int
    done: dict[str, int]
    kinds: dict[MoveKind, KindStats]
    busy_s: float


_WOKEN = 2
"""Threads that a Move wakes."""
_HOMELESS = (LaneName.READ, LaneName.WRITE)
"""Lanes whose threads wait on any core."""


class Lane:
    """One lane of ``threads`` threads, which call ``run`` with it."""

    def __init__(self, name: LaneName, threads: int) -> None:
        self._name = name
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._loads: deque[Move] = deque()
        self._others: deque[Move] = deque()
        self._bells: list[threading.Lock] = []
        """Of the threads that wait: each is locked, and its thread wakes when it is released."""
        self._ending = False
        self._lock = threading.Lock()
        self._running = 0
        self._done = dict.fromkeys(MoveStatus, 0)
        kinds = [*LANES.items(), *REDIS_LANES.items()]
        self._kinds = {kind: KindStats() for kind, lane in kinds if lane is name}
        self._busy_s = 0.0

    def start(self, run: Callable[[Lane, Home | None], None]) -> None:
        """Start the threads. Raises TierUnavailableError where the system refuses one."""
        self._ending = False
        for number in range(self._count):
            name = f"{self._name.value}-{number}"
            self._threads.append(start_thread(name, functools.partial(self._serve, run, number)))

    def stop(self) -> None:
        """End the threads once everything that was put is done. Idempotent."""
        self._ending = True
        self._ring(self._count)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def put(self, *moves: Move) -> None:
        """Queue Moves. Takes no lock: a thread of low priority might hold it for long."""
        for move in moves:
            (self._loads if move.kind is MoveKind.LOAD else self._others).append(move)
        self._ring(max(_WOKEN, len(moves)))

    def take(self, home: Home | None) -> Move | None:
        """Wait for the Move to carry out next; None: the thread ends."""
        bell = threading.Lock()
        bell.acquire()
        while True:
            with self._lock:
                waiting = self._loads or self._others
                if waiting:
                    return waiting.popleft()
                if self._ending:
                    return None
            self._bells.append(bell)
            if self._loads or self._others or self._ending:
                self._ring(1)  # it came before the bell was there to ring
            if home is None:
                bell.acquire()
            else:
                home.stay()
                bell.acquire()
                home.leave()

    def take_next(self, move: Move) -> Move | None:
        """The Move after this one to carry out before this one's end is reported; None where it is
        to be reported now."""
        with self._lock:
            waiting = self._loads or self._others
            if not waiting or move.transfer is None:
                return None
            after = waiting[0]
            if (after.session, after.transfer) != (move.session, move.transfer):
                return None
            return waiting.popleft()

    def begin(self) -> float:
        """A Move begins; gives the time."""
        with self._lock:
            self._running += 1
        return time.perf_counter()

    def end(self, move: Move, status: MoveStatus, start_s: float) -> None:
        """Count a Move that has ended."""
        seconds = time.perf_counter() - start_s
        with self._lock:
            self._running -= 1
            self._done[status] += 1
            self._busy_s += seconds
            if status is MoveStatus.OK:
                before = self._kinds[move.kind]
                nbytes = before.nbytes + move.header.payload_bytes
                self._kinds[move.kind] = KindStats(before.moves + 1, nbytes)

    def stats(self) -> LaneStats:
        """A snapshot."""
        with self._lock:
            return LaneStats(
                lane=self._name.value,
                threads=len(self._threads),
                threads_alive=sum(thread.is_alive() for thread in self._threads),
                queued=len(self._loads) + len(self._others),
                running=self._running,
                done={status.value: count for status, count in self._done.items()},
                kinds=dict(self._kinds),
                busy_s=self._busy_s,
            )

    def _serve(self, run: Callable[[Lane, Home | None], None], number: int) -> None:
        lower_priority()
        run(self, None if self._name in _HOMELESS else Home(number))

    def _ring(self, threads: int) -> None:
        """Wake so many of the threads that wait."""
        for _ in range(threads):
            try:
                self._bells.pop().release()
            except IndexError:
                return
