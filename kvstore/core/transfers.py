"""Transfers: which Move goes out next.

Moves wait in the core, where priorities hold, and few are in the hands at a time: copies (LOAD
before STORE), reads, and writes (WRITE and ERASE), each up to a depth; reads from and writes to the
remote tier have depths of their own, so that a slow one keeps nothing else back. No new write goes
out while a retrieve is queued or running, and for STORES_FIRST_S none while a STORE is, nor
shortly after it: its engine wants the blocks back, memory is busy with the copy, and then the
answer wants a core, whereas a write has time. Within a lane, sessions take turns by bytes: the next
job is that of the session that was served least.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.core.errors import InvariantError
from kvstore.core.limits import Limits, RemoteLimits
from kvstore.core.messages import ChunkHeader, Move, MoveID, MoveKind, Place, SessionID
from kvstore.core.slots import Slot
from kvstore.core.tickets import Wait
from kvstore.core.words import Word

Blocks = tuple[tuple[int, bytes], ...]

STORES_FIRST_S = 0.005
"""So long writes wait for STOREs: for those of a prompt, but not for engines that never stop."""


class Lane(Word):
    """What jobs queue and are counted by."""

    STORE = "store"
    LOAD = "load"
    READ = "read"
    WRITE = "write"
    ERASE = "erase"
    REMOTE_READ = "remote read"
    REMOTE_WRITE = "remote write"


_LANES = {
    MoveKind.STORE: Lane.STORE,
    MoveKind.LOAD: Lane.LOAD,
    MoveKind.READ: Lane.READ,
    MoveKind.WRITE: Lane.WRITE,
    MoveKind.ERASE: Lane.ERASE,
}
_REMOTE = {MoveKind.READ: Lane.REMOTE_READ, MoveKind.WRITE: Lane.REMOTE_WRITE}


@dataclass(slots=True, eq=False)
class Job:
    """A Move from when it is decided until its Moved; it holds the slots that it names.

    ``session`` owns the engine memory, if any; ``turn`` is whose turn it takes otherwise. ``wait``:
    the ticket whose Move it is (STORE, LOAD). ``readers``: who gets the bytes (READ), and the
    blocks that they are for. ``remote`` stands for the source of a READ from the remote tier, or
    the target of a WRITE to it.
    """

    id: MoveID
    kind: MoveKind
    header: ChunkHeader
    source: Slot | None = None
    target: Slot | None = None
    session: SessionID | None = None
    turn: SessionID | None = None
    blocks: Blocks = ()
    wait: Wait | None = None
    readers: dict[Wait, Blocks] = field(default_factory=dict)
    remote: Place | None = None

    def lane(self) -> Lane:
        """Where it queues."""
        return _LANES[self.kind] if self.remote is None else _REMOTE[self.kind]

    def move(self) -> Move:
        """The effect."""
        source = None if self.source is None else self.source.place
        target = None if self.target is None else self.target.place
        if self.remote is not None:
            source, target = source or self.remote, target or self.remote
        transfer = None if self.wait is None else self.wait.ticket.id
        return Move(
            self.id, self.kind, self.header, source, target, self.session, transfer, self.blocks
        )


class FairQueue:
    """Jobs of one lane, sessions in turn by bytes."""

    def __init__(self) -> None:
        self._queues: dict[SessionID | None, OrderedDict[MoveID, Job]] = {}
        self._served: dict[SessionID | None, int] = {}
        self._floor = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, job: Job) -> None:
        """Append a job to its session's queue."""
        turn = job.session or job.turn
        queue = self._queues.get(turn)
        if queue is None:
            queue = self._queues[turn] = OrderedDict()
            self._served[turn] = self._floor
        queue[job.id] = job
        self._count += 1

    def head(self) -> Job | None:
        """The job to go next; it stays."""
        while self._queues:
            session = min(self._served, key=self._served.__getitem__)
            queue = self._queues[session]
            if queue:
                return next(iter(queue.values()))
            del self._queues[session], self._served[session]
        return None

    def pop(self) -> Job | None:
        """Take the job to go next."""
        job = self.head()
        if job is None:
            return None
        turn = job.session or job.turn
        self._floor = self._served[turn]
        self._served[turn] += job.header.payload_bytes
        self.drop(job)
        return job

    def drop(self, job: Job) -> None:
        """Take out a job that is queued."""
        del self._queues[job.session or job.turn][job.id]
        self._count -= 1


@dataclass(frozen=True, slots=True)
class Depths:
    """How many Moves are in the hands at a time."""

    copies: int
    reads: int
    writes: int
    remote_reads: int
    remote_writes: int


def depths(limits: Limits) -> Depths:
    """Those that the limits say."""
    remote = limits.remote or RemoteLimits()
    return Depths(
        limits.copy_depth,
        limits.read_depth,
        limits.write_depth,
        remote.read_depth,
        remote.write_depth,
    )


@dataclass(frozen=True, slots=True)
class Sources:
    """Where what isn't queued comes from: ``land`` finds a READ's target or says that none is free;
    ``next_write`` and ``next_share`` make the next WRITE to NVMe and to the remote tier, its slots
    held."""

    land: Callable[[Job], bool]
    next_write: Callable[[], Job | None]
    next_share: Callable[[], Job | None]


class Transfers:
    """Queued and running jobs. ``finish`` is the only end of a running one."""

    def __init__(self, depths: Depths, answer_first_s: float = 0.0) -> None:
        self._depths = depths
        self._answer_first_s = answer_first_s
        self._queues = {lane: FairQueue() for lane in Lane}
        self._queued: dict[MoveID, Job] = {}
        self._handed: dict[MoveID, Job] = {}
        self._kept: dict[MoveID, Job] = {}
        self._running = dict.fromkeys(Lane, 0)
        self._storing_since: float | None = None
        self._stored_at = -answer_first_s
        self._storing = False
        self._last = 0

    def next_id(self) -> MoveID:
        """A number for a new Move."""
        self._last += 1
        return MoveID(self._last)

    def push(self, job: Job) -> None:
        """Queue a job, which holds its slots from now on."""
        for slot in (job.source, job.target):
            if slot is not None:
                slot.hold(job.id)
        self._queued[job.id] = job
        self._queues[job.lane()].push(job)

    def drop(self, job: Job) -> None:
        """Take out a job that was never handed out; the caller lets its slots go."""
        if self._queued.pop(job.id, None) is None:
            raise InvariantError(f"Move {job.id} can't be dropped: it isn't queued")
        self._queues[job.lane()].drop(job)

    def queued_job(self, move: MoveID) -> Job | None:
        """A job that waits."""
        return self._queued.get(move)

    def is_running(self, move: MoveID) -> bool:
        """Whether the hands have it."""
        return move in self._handed

    def keep(self, job: Job) -> None:
        """An ended or dropped job still holds its slots, until ``release``."""
        self._kept[job.id] = job

    def release(self, job: Job) -> None:
        """A job that was kept lets its slots go; the caller does."""
        del self._kept[job.id]

    def finish(self, move: MoveID) -> Job:
        """A running Move has ended; the caller lets its slots go."""
        job = self._handed.pop(move, None)
        if job is None:
            raise InvariantError(f"Move {move} ended, but isn't running")
        self._running[job.lane()] -= 1
        return job

    def dispatch(self, now: float, sources: Sources) -> list[Move]:
        """The Moves to hand out now."""
        self._note_stores(now)
        out: list[Move] = []
        self._copy(out)
        self._read(out, Lane.READ, self._depths.reads, sources)
        self._read(out, Lane.REMOTE_READ, self._depths.remote_reads, sources)
        may_write = self._may_write(now)
        self._write(out, sources if may_write else None)
        if may_write and not self._busy(Lane.REMOTE_READ):
            self._share(out, sources)
        return out

    def running(self) -> int:
        """Moves in the hands."""
        return len(self._handed)

    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._queued)

    def idle(self) -> bool:
        """Whether no job waits or runs."""
        return not (self._queued or self._handed or self._kept)

    def jobs(self) -> list[Job]:
        """All jobs, waiting and running."""
        return [*self._queued.values(), *self._handed.values(), *self._kept.values()]

    def head(self, lane: Lane) -> Job | None:
        """The job of a lane that is to go next."""
        return self._queues[lane].head()

    def waits(self, lane: Lane) -> bool:
        """Whether a job of a lane isn't handed out yet."""
        return len(self._queues[lane]) > 0

    def _copy(self, out: list[Move]) -> None:
        """STOREs never keep a LOAD from the hands, which carry LOADs out first."""
        while self._running[Lane.LOAD] < self._depths.copies:
            job = self._queues[Lane.LOAD].pop()
            if job is None:
                break
            out.append(self._start(job))
        while self._in_hands(Lane.LOAD, Lane.STORE) < self._depths.copies:
            job = self._queues[Lane.STORE].pop()
            if job is None:
                break
            out.append(self._start(job))

    def _read(self, out: list[Move], lane: Lane, depth: int, sources: Sources) -> None:
        reads = self._queues[lane]
        while self._running[lane] < depth:
            job = reads.head()
            if job is None or not sources.land(job):
                break
            reads.pop()
            out.append(self._start(job))

    def _write(self, out: list[Move], sources: Sources | None) -> None:
        while self._in_hands(Lane.WRITE, Lane.ERASE) < self._depths.writes:
            job = self._queues[Lane.ERASE].pop()
            if job is None and sources is not None:
                job = sources.next_write()
            if job is None:
                break
            out.append(self._start(job))

    def _share(self, out: list[Move], sources: Sources) -> None:
        while self._running[Lane.REMOTE_WRITE] < self._depths.remote_writes:
            job = sources.next_share()
            if job is None:
                break
            out.append(self._start(job))

    def _in_hands(self, one: Lane, other: Lane) -> int:
        return self._running[one] + self._running[other]

    def _may_write(self, now: float) -> bool:
        if self._busy(Lane.LOAD) or self._busy(Lane.READ):
            return False
        return self.held_until(now) is None

    def held_until(self, now: float) -> float | None:
        """When writes that wait for STOREs and their answers may go out; None if they don't. A
        dispatch at that very time hands them out: both compare the same sum."""
        if self._storing_since is None:
            return None
        until = self._storing_since + STORES_FIRST_S
        if not self._storing:
            until = min(until, self._stored_at + self._answer_first_s)
        return until if until > now else None

    def _note_stores(self, now: float) -> None:
        """Since when STOREs go on, with pauses shorter than ``answer_first_s``."""
        before, self._storing = self._storing, self._busy(Lane.STORE)
        if before or self._storing:
            self._stored_at = now
        if now >= self._stored_at + self._answer_first_s and not self._storing:
            self._storing_since = None
        elif self._storing_since is None:
            self._storing_since = now

    def _busy(self, lane: Lane) -> bool:
        return bool(self._running[lane] or len(self._queues[lane]))

    def _start(self, job: Job) -> Move:
        self._queued.pop(job.id, None)
        self._handed[job.id] = job
        self._running[job.lane()] += 1
        return job.move()
