"""Retrieve: host slots -> engine blocks; what is only on a lower tier is read into a host slot
first, once for all who wait for it, verified there, and handed on."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.batches import Batch, Step
from kvstore.core.blocks import ChunkBlocks, check_blocks
from kvstore.core.chunk import slot_header
from kvstore.core.engines import Session
from kvstore.core.errors import InvariantError
from kvstore.core.keys import KEY_BYTES
from kvstore.core.layout import Part, Shard
from kvstore.core.messages import ChunkHeader, MoveKind, MoveStatus, Refused, Retrieve
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.stats import Drop
from kvstore.core.tickets import Ticket, Wait
from kvstore.core.transfers import Blocks, Job
from kvstore.core.tree_nodes import lands

_FAULTS = {
    MoveStatus.CORRUPT: Drop.CORRUPT,
    MoveStatus.FOREIGN: Drop.KEY_COLLISION,
    MoveStatus.FAILED: Drop.READ_FAILED,
    MoveStatus.NO_SPACE: Drop.READ_FAILED,
}


@dataclass(frozen=True, slots=True)
class _Batch:
    """One retrieve's facts."""

    ticket: Ticket
    space: Space
    blocks: ChunkBlocks
    shard: Shard


class Retrieving:
    """The verb *retrieve*, and the ends of LOAD, READ and ERASE Moves."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._reads: dict[Slot, Job] = {}

    def retrieve(self, session: Session, number: int, message: Retrieve) -> None:
        """Begin a retrieve. It stops at the first chunk that isn't there any more."""
        state, layout, shard = self._state, session.layout, session.shard
        if layout is None or shard is None:
            text = "retrieve: this session registered no memory"
            state.reply(session.id, number, Refused(text))
            return
        chunks = len(message.keys) // KEY_BYTES
        blocks = check_blocks(layout, chunks, message.blocks)
        if isinstance(blocks, str):
            state.reply(session.id, number, Refused(f"retrieve: {blocks}"))
            return
        ticket = Ticket(session.id, number, "retrieve", message.request)
        ticket.begin(message.keys, chunks, state.now)
        session.tickets[number] = ticket
        space = session.engine.space
        if space is None:
            ticket.fail_all(0)
        else:
            self._begin(_Batch(ticket, space, blocks, shard), chunks)
        state.finish_if_ended(ticket)

    def cancel(self, ticket: Ticket, most: int) -> int:
        """The ticket waits for up to ``most`` reads no more; tells how many. A queued read that
        nobody waits for is dropped."""
        done = 0
        while ticket.reads and done < most:
            job, waits = ticket.reads.popitem()
            for wait in waits:
                del job.readers[wait]
                ticket.settle(wait.chunk, ok=False)
            if not job.readers and not self._state.transfers.is_running(job.id):
                self._state.transfers.drop(job)
                self._forget(job)
                self._state.let_go(job)
            done += 1
        return done

    def land(self, job: Job) -> bool:
        """Find a READ's target: a host slot (that is promotion) or a staging slot."""
        header, state = job.header, self._state
        space = state.spaces.find(header.tenant, header.namespace)
        target: Slot | Drop | None = None
        if space is not None and space.epoch == header.epoch:
            target = state.directory.host.reserve(space, header)
        if not isinstance(target, Slot):
            target = state.directory.stage(header.part, header.shard, header.payload_bytes)
        if target is None:
            return False
        if target.owner is not None:
            target.owner.stores = max(target.owner.stores, state.limits.admit_after)
        target.hold(job.id)
        job.target = target
        return True

    def loaded(self, job: Job, status: MoveStatus) -> None:
        """A LOAD Move has ended."""
        if status is not MoveStatus.OK and job.wait is not None:
            self._state.drop(Drop.LOAD_FAILED)
            self._cut_leases(job.wait.ticket, job.header.key)
        self._state.end_wait(job, status is MoveStatus.OK)
        self._state.let_go(job)

    def read(self, job: Job, status: MoveStatus) -> None:
        """A READ Move has ended: hand the bytes on, or tell all who waited and give the chunk
        up."""
        source, target = job.source, job.target
        if source is None or target is None:
            raise InvariantError(f"READ {job.id} lacks a slot")
        self._forget(job)
        if status is MoveStatus.OK:
            for wait, blocks in job.readers.items():
                self._load(target, job.header, wait, blocks)
                wait.ticket.settle(wait.chunk, ok=True)
        else:
            self._state.drop(_FAULTS[status])
            for wait in job.readers:
                wait.ticket.settle(wait.chunk, ok=False)
                self._cut_leases(wait.ticket, job.header.key)
            self._give_up(source, status)
        self._settle_target(target, status)
        self._state.let_go(job)

    def erased(self, job: Job, status: MoveStatus) -> None:
        """An ERASE Move has ended, well or not: the slot is free."""
        if status is not MoveStatus.OK:
            self._state.drop(Drop.ERASE_FAILED)
        self._state.let_go(job)

    def reading(self) -> int:
        """Reads that are queued or running."""
        return len(self._reads)

    # ------------------------------------------------------------ private

    def _begin(self, batch: _Batch, chunks: int) -> None:
        """Begin the chunks from the head, up to the first that isn't there."""
        ticket = batch.ticket

        def end() -> None:
            if 1 in ticket.failed and not ticket.cancelled:
                self._cut_leases(ticket)

        self._state.batches.add(
            Batch(ticket, chunks, lambda n: self._retrieve_chunk(batch, n), ticket.fail_all, end)
        )

    def _retrieve_chunk(self, batch: _Batch, chunk: int) -> Step:
        """Queue what one chunk needs; tells whether it is there. Nothing is queued where it
        isn't."""
        if not batch.space.alive:
            return Step.END
        found: list[tuple[Slot, Blocks]] = []
        for part in Part:
            if batch.blocks.all_null(part, chunk):
                continue
            slot = self._find(batch, chunk, part)
            if slot is None:
                return Step.END
            found.append((slot, batch.blocks.of(part, chunk)))
        self._state.directory.tell(batch.space, self._key(batch, chunk))
        for slot, blocks in found:
            if slot.owner is not None:
                self._touch(slot)
            if slot.tier is self._state.directory.host.tier:
                self._load(slot, slot_header(slot, 0), Wait(batch.ticket, chunk), blocks)
            else:
                self._read(slot, batch.ticket.wait(chunk), blocks)
        return Step.NEXT

    def _find(self, batch: _Batch, chunk: int, part: Part) -> Slot | None:
        key = self._key(batch, chunk)
        for tree in self._state.directory.trees():
            slot = tree.ready(batch.space, key, part, batch.shard.index())
            if slot is not None:
                return slot
        return None

    @staticmethod
    def _key(batch: _Batch, chunk: int) -> bytes:
        return batch.ticket.keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]

    def _touch(self, slot: Slot) -> None:
        tree = self._state.directory.tree(slot.tier)
        if tree is not None and slot.owner is not None:
            tree.touch(slot.owner)

    def _load(self, source: Slot, header: ChunkHeader, wait: Wait, blocks: Blocks) -> None:
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

    def _read(self, source: Slot, wait: Wait, blocks: Blocks) -> None:
        """Wait for the read of a slot, which is queued unless it is already, or was just done: then
        its bytes lie in a host slot that waits for its parent's commit."""
        job = self._reads.get(source)
        if job is None:
            header, landed = slot_header(source, 0), self._landed(source)
            if landed is not None:
                self._load(landed, header, wait, blocks)
                wait.ticket.settle(wait.chunk, ok=True)
                return
            number = self._state.transfers.next_id()
            session = wait.ticket.session
            job = Job(number, MoveKind.READ, header, source=source, turn=session)
            self._reads[source] = job
            self._state.transfers.push(job)
        job.readers[wait] = blocks
        reads = wait.ticket.reads
        reads[job] = (*reads.get(job, ()), wait)

    def _landed(self, source: Slot) -> Slot | None:
        """The host slot that holds the same part already and isn't committed yet."""
        copy, host = source.owner, self._state.directory.host
        same = None if copy is None else host.find(copy.space, copy.key)
        slot = None if same is None else same.slot(source.part, source.shard)
        return slot if slot is not None and lands(slot) else None

    def _forget(self, job: Job) -> None:
        if job.source is not None:
            self._reads.pop(job.source, None)
        for wait in job.readers:
            wait.ticket.reads.pop(job, None)

    def _settle_target(self, target: Slot, status: MoveStatus) -> None:
        """Commit the promoted copy, or give the place up; Moves that hold it still read from it."""
        if self._state.directory.is_staging(target):
            target.cancel()
        elif status is MoveStatus.OK:
            self._state.directory.host.landed(target)
        elif target.state is SlotState.RESERVED:
            self._state.directory.host.fail(target, None)

    def _give_up(self, source: Slot, status: MoveStatus) -> None:
        """A read failed: the chunk leaves the tier. Where the bytes at rest are bad, the header is
        overwritten too, so that it doesn't come back with the next start."""
        tree = self._state.directory.tree(source.tier)
        copy = source.owner
        if tree is None or copy is None or not copy.live:
            return
        if status in (MoveStatus.CORRUPT, MoveStatus.FOREIGN):
            number, header = self._state.transfers.next_id(), slot_header(source, 0)
            self._state.transfers.push(Job(number, MoveKind.ERASE, header, target=source))
        tree.doom(copy)

    def _cut_leases(self, ticket: Ticket, key: bytes = b"") -> None:
        """The hit that this retrieve came from ends before the chunk that failed."""
        session = self._state.engines.session(ticket.session)
        if session is None:
            return
        if not key:
            place = ticket.failed.find(1)
            key = ticket.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
        self._state.leases.cut(session.engine.key, ticket.request, key)
