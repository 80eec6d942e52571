"""Reads: READ, LOAD and ERASE Moves, what waits for them, and how they end.

A READ brings one part of a chunk from NVMe or the remote tier into a host slot (that is promotion)
or a staging slot, once for all who wait for it, and it is verified there; LOADs hand it on. Both
tiers are read at a time. A host slot needs its parent's, so a read from the remote tier takes those
of the reads before it, too, that wait for NVMe: all stay in order, and neither tier waits for the
other. Thousands may wait for one read: it is handed on in steps, and until then holds its slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstore.core.answers import Remote
from kvstore.core.chunk import slot_header
from kvstore.core.errors import InvariantError
from kvstore.core.keys import KEY_BYTES
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, MoveKind, MoveStatus, Place, TierName
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.stats import Drop
from kvstore.core.tickets import Ticket, Wait
from kvstore.core.transfers import Blocks, Job, Lane
from kvstore.core.tree_nodes import lands

ABOVE_MAX = 1024
"""Reads before one from the remote tier whose slots it looks at; with more it is staged."""
STEP_READS = 64
"""Reads that one event takes slots for ahead of their turn, or gives up."""
STEP_READERS = 128
"""Waits that one event hands a read on to, or tells that it failed."""
_FAULTS = {
    MoveStatus.CORRUPT: Drop.CORRUPT,
    MoveStatus.FOREIGN: Drop.KEY_COLLISION,
    MoveStatus.FAILED: Drop.READ_FAILED,
    MoveStatus.NO_SPACE: Drop.READ_FAILED,
}
_REMOTE_FAULTS = {
    MoveStatus.CORRUPT: Drop.REDIS_LOST,
    MoveStatus.FOREIGN: Drop.KEY_COLLISION,
    MoveStatus.FAILED: Drop.REDIS_READ_FAILED,
    MoveStatus.NO_SPACE: Drop.REDIS_READ_FAILED,
}

Deny = Callable[[Remote], None]
"""What takes note that a part couldn't be read."""


class _Name(NamedTuple):
    """What names one part of one chunk shard."""

    space: Space
    key: bytes
    part: Part
    shard: int


class Reads:
    """READs by what they read, and those from the remote tier that occupy staging slots."""

    def __init__(self, state: State, deny: Deny) -> None:
        self._state = state
        self._deny = deny
        self._reads: dict[_Name, Job] = {}
        self._names: dict[Job, _Name] = {}
        self._origins: dict[Job, Remote] = {}
        self._staged: set[Job] = set()
        self._ended: dict[Job, MoveStatus] = {}

    # ------------------------------------------------------------ begin

    def load(self, source: Slot, header: ChunkHeader, wait: Wait, blocks: Blocks) -> None:
        """Queue a LOAD from a host or staging slot."""
        ticket = wait.ticket
        job = Job(
            self._state.transfers.next_id(),
            MoveKind.LOAD,
            header,
            source=source,
            session=ticket.session,
            blocks=blocks,
            wait=ticket.wait(wait.chunk),
        )
        ticket.moves.add(job.id)
        self._state.transfers.push(job)

    def read(self, source: Slot | Remote, wait: Wait, blocks: Blocks) -> None:
        """Wait for the read of a part, which is queued unless it is already, or was just done: then
        its bytes lie in a host slot that waits for its parent's commit."""
        name = _name(source)
        job = self._reads.get(name)
        if job is None:
            header = slot_header(source, 0) if isinstance(source, Slot) else source.header
            landed = self._landed(name)
            if landed is not None:
                self.load(landed, header, wait, blocks)
                wait.ticket.settle(wait.chunk, ok=True)
                return
            job = self._queue(name, source, header, wait)
        job.readers[wait] = blocks
        reads = wait.ticket.reads
        reads[job] = (*reads.get(job, ()), wait)

    def land(self, job: Job) -> bool:
        """Find a READ's target: a host slot or a staging slot. Reads from the remote tier leave
        half of the staging slots to others, who may not wait for a slow server."""
        if job.target is not None:
            return True
        remote, directory = job.remote is not None, self._state.directory
        if remote and not (self._state.remote_up and self._land_above(job)):
            return False
        if self._promote(job):
            return True
        if remote and len(self._staged) >= directory.staging_for_remote():
            return False
        header = job.header
        target = directory.stage(header.part, header.shard, header.payload_bytes)
        if target is None:
            return False
        target.hold(job.id)
        job.target = target
        if remote:
            self._staged.add(job)
        return True

    # ------------------------------------------------------------ end

    def loaded(self, job: Job, status: MoveStatus) -> None:
        """A LOAD Move has ended."""
        if status is not MoveStatus.OK and job.wait is not None:
            self._state.drop(Drop.LOAD_FAILED)
            self.cut_leases(job.wait.ticket, job.header.key)
        self._state.end_wait(job, status is MoveStatus.OK)
        self._state.let_go(job)

    def ended(self, job: Job, status: MoveStatus) -> None:
        """A READ Move has ended: hand the bytes on, or tell all who waited and give the chunk
        up."""
        target = job.target
        if target is None:
            raise InvariantError(f"READ {job.id} lacks a target")
        origin = self._origins.get(job)
        self._forget(job)
        if status is not MoveStatus.OK:
            self._state.drop((_FAULTS if origin is None else _REMOTE_FAULTS)[status])
            if origin is not None:
                self._deny(origin)
            elif job.source is not None:
                self._give_up(job.source, status)
        self._settle_target(target, status)
        self._ended[job] = status
        self._state.transfers.keep(job)
        self._hand_on(job, STEP_READERS)

    def erased(self, job: Job, status: MoveStatus) -> None:
        """An ERASE Move has ended, well or not: the slot is free."""
        if status is not MoveStatus.OK:
            self._state.drop(Drop.ERASE_FAILED)
        self._state.let_go(job)

    def cancel(self, ticket: Ticket, most: int) -> int:
        """The ticket waits for up to ``most`` reads no more; tells how many. A queued read that
        nobody waits for is dropped."""
        done = 0
        while ticket.reads and done < most:
            job, waits = ticket.reads.popitem()
            for wait in waits:
                if job.readers.pop(wait, None) is not None:
                    ticket.settle(wait.chunk, ok=False)
            queued = job in self._names and not self._state.transfers.is_running(job.id)
            if queued and not job.readers:
                self._drop(job)
            done += 1
        return done

    def running(self) -> bool:
        """Whether reads are handed on, or given up as the remote tier is down, at Ticks."""
        down = not self._state.remote_up and self._state.transfers.waits(Lane.REMOTE_READ)
        return down or bool(self._ended)

    def step(self) -> None:
        """Hand one read on, or give up some from the remote tier that wait while it is down."""
        if self._ended:
            self._hand_on(next(iter(self._ended)), STEP_READERS)
            return
        left = STEP_READERS
        for _ in range(STEP_READS if not self._state.remote_up else 0):
            job = self._state.transfers.head(Lane.REMOTE_READ)
            if job is None or left <= 0:
                return
            self._state.drop(Drop.REDIS_DOWN)
            waits = len(job.readers)
            self._state.transfers.drop(job)
            self._forget(job)
            if job.target is not None:
                self._settle_target(job.target, MoveStatus.FAILED)
            self._ended[job] = MoveStatus.FAILED
            self._state.transfers.keep(job)
            self._hand_on(job, left)
            left -= waits

    def reading(self) -> int:
        """Reads that are queued or running."""
        return len(self._reads)

    def cut_leases(self, ticket: Ticket, key: bytes = b"") -> None:
        """The hit that this retrieve came from ends before the chunk that failed."""
        session = self._state.engines.session(ticket.session)
        if session is None:
            return
        if not key:
            place = ticket.failed.find(1)
            key = ticket.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
        self._state.leases.cut(session.engine.key, ticket.request, key)

    def check(self) -> None:
        """Raise InvariantError unless these are the READs that there are."""
        reads = {job for job in self._state.transfers.jobs() if job.kind is MoveKind.READ}
        reads -= self._ended.keys()
        if set(self._names) != reads or set(self._reads.values()) != reads:
            raise InvariantError("the READs that are waited for aren't those that there are")
        remote = {job for job in reads if job.remote is not None}
        if set(self._origins) != remote or not self._staged <= remote:
            raise InvariantError("READs from the remote tier don't add up")
        if len(self._staged) > self._state.directory.staging_for_remote():
            raise InvariantError("too many READs from the remote tier are staged")

    # ------------------------------------------------------------ private

    def _queue(self, name: _Name, source: Slot | Remote, header: ChunkHeader, wait: Wait) -> Job:
        number, turn = self._state.transfers.next_id(), wait.ticket.session
        if isinstance(source, Slot):
            job = Job(number, MoveKind.READ, header, source=source, turn=turn)
        else:
            place = Place(TierName.REDIS, source.epoch, 0, 0)
            job = Job(number, MoveKind.READ, header, turn=turn, remote=place)
            self._origins[job] = source
        self._reads[name] = job
        self._names[job] = name
        self._state.transfers.push(job)
        return job

    def _landed(self, name: _Name) -> Slot | None:
        """The host slot that holds the same part already and isn't committed yet."""
        same = self._state.directory.host.find(name.space, name.key)
        slot = None if same is None else same.slot(name.part, name.shard)
        return slot if slot is not None and lands(slot) else None

    def _land_above(self, job: Job) -> bool:
        """Take host slots for the reads that wait before one, from the head down; False where more
        of them are left to the next event."""
        above: list[Job] = []
        name, header = self._names[job], job.header
        key = header.key if header.part is Part.WINDOW else header.parent
        while len(above) < ABOVE_MAX:
            before = self._reads.get(_Name(name.space, key, Part.FULL, name.shard))
            if before is None or before.target is not None:
                break
            above.append(before)
            key = before.header.parent
        for before in reversed(above[-STEP_READS:]):
            if not self._promote(before):
                return True
        return len(above) <= STEP_READS

    def _promote(self, job: Job) -> bool:
        """Take a host slot for a READ, unless it can't have one."""
        header, state = job.header, self._state
        space = self._names[job].space
        if not space.alive:
            return False
        target = state.directory.host.reserve(space, header)
        if not isinstance(target, Slot):
            return False
        copy, remote = target.owner, job.remote is not None
        if copy is not None:
            copy.stores = max(copy.stores, 1 if remote else state.limits.admit_after)
        target.shared = remote
        if job.source is not None:
            target.age = job.source.age
        elif job.remote is not None and job.remote.slab < space.fleet_epoch:
            target.age = 0  # cleared since: it must not be shared by way of NVMe
        target.hold(job.id)
        job.target = target
        return True

    def _hand_on(self, job: Job, most: int) -> None:
        """Hand an ended read on to up to ``most`` of those who wait; with the last its slots are
        let go."""
        ok = self._ended[job] is MoveStatus.OK
        while job.readers and most > 0:
            most -= 1
            wait = next(iter(job.readers))
            blocks = job.readers.pop(wait)
            if wait.ticket.reads.get(job, ())[-1:] == (wait,):
                del wait.ticket.reads[job]
            if ok and job.target is not None:
                self.load(job.target, job.header, wait, blocks)
            else:
                self.cut_leases(wait.ticket, job.header.key)
            wait.ticket.settle(wait.chunk, ok)
            self._state.finish_if_ended(wait.ticket)
            self._state.detach_after(wait.ticket)
        if not job.readers:
            del self._ended[job]
            self._state.transfers.release(job)
            self._state.let_go(job)

    def _drop(self, job: Job) -> None:
        """A queued read isn't wanted any more, or can't be made."""
        self._state.transfers.drop(job)
        self._forget(job)
        if job.target is not None:
            self._settle_target(job.target, MoveStatus.FAILED)
        self._state.let_go(job)

    def _forget(self, job: Job) -> None:
        del self._reads[self._names.pop(job)]
        self._origins.pop(job, None)
        self._staged.discard(job)

    def _settle_target(self, target: Slot, status: MoveStatus) -> None:
        """Commit the promoted copy, or give the place up; Moves that hold it still read from it."""
        if self._state.directory.is_staging(target):
            target.cancel()
        elif status is MoveStatus.OK:
            self._state.directory.host.landed(target)
        elif target.state is SlotState.RESERVED:
            self._state.directory.host.fail(target, None)

    def _give_up(self, source: Slot, status: MoveStatus) -> None:
        """A read failed: the chunk leaves NVMe. Where the bytes at rest are bad, the header is
        overwritten too, so that it doesn't come back with the next start."""
        tree = self._state.directory.tree(source.tier)
        copy = source.owner
        if tree is None or copy is None or not copy.live:
            return
        if status in (MoveStatus.CORRUPT, MoveStatus.FOREIGN):
            number, header = self._state.transfers.next_id(), slot_header(source, 0)
            self._state.transfers.push(Job(number, MoveKind.ERASE, header, target=source))
        tree.doom(copy)


def _name(source: Slot | Remote) -> _Name:
    """What names the part; a slot's copy is live."""
    if isinstance(source, Remote):
        header = source.header
        return _Name(source.space, header.key, header.part, header.shard)
    copy = source.owner
    if copy is None:
        raise InvariantError(f"{source!r} has no copy, so it can't be read")
    return _Name(copy.space, copy.key, source.part, source.shard)
