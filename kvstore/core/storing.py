"""Store: engine blocks -> host slots. What is there already costs nothing; what is on its way is
waited for; a place that can't be had ends the batch there, and the leading part is kept."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.batches import Batch, Step
from kvstore.core.blocks import ChunkBlocks, check_blocks
from kvstore.core.chunk import Chain
from kvstore.core.engines import Session
from kvstore.core.errors import InvariantError
from kvstore.core.keys import KEY_BYTES, NO_PARENT
from kvstore.core.layout import Layout, Part, Shard
from kvstore.core.messages import ChunkHeader, MoveKind, MoveStatus, Refused, Store
from kvstore.core.sharing import Sharing
from kvstore.core.slots import Handle, Slot, SlotState
from kvstore.core.state import State
from kvstore.core.stats import Drop
from kvstore.core.tickets import Ticket
from kvstore.core.transfers import Job
from kvstore.core.writing import Writing


@dataclass(slots=True)
class _Batch:
    """One store's facts. The FULL parts of the chunks before ``fulls`` are begun: that of one more
    than is begun in whole where room for its WINDOW part is still being made. ``windows``: whether
    chunks have such a part; ``nulls``: whether any block may be null."""

    ticket: Ticket
    chain: Chain
    blocks: ChunkBlocks
    layout: Layout
    shard: Shard
    windows: bool
    nulls: bool
    fulls: int = 0


class Storing:
    """The verb *store*, and the end of a STORE Move."""

    def __init__(self, state: State, writing: Writing, sharing: Sharing) -> None:
        self._state = state
        self._writing = writing
        self._sharing = sharing

    def store(self, session: Session, number: int, message: Store) -> None:
        """Begin a store; it completes when each chunk is committed, dropped or refused."""
        state = self._state
        layout, shard = session.layout, session.shard
        if layout is None or shard is None:
            state.reply(session.id, number, Refused("store: this session registered no memory"))
            return
        chunks = len(message.keys) // KEY_BYTES
        blocks = check_blocks(layout, chunks, message.blocks)
        if (message.first == 0) != (message.parent == NO_PARENT):
            blocks = f"first={message.first} goes with a parent key unless it is 0"
        if isinstance(blocks, str):
            state.reply(session.id, number, Refused(f"store: {blocks}"))
            return
        ticket = Ticket(session.id, number, "store", message.request)
        ticket.begin(message.keys, chunks, state.now)
        ticket.nbytes = chunks * sum(layout.part_bytes(part) for part in Part)
        session.tickets[number] = ticket
        refusal = self._refusal(session, ticket)
        session.store_bytes += ticket.nbytes
        space = session.engine.space
        if refusal or space is None:
            ticket.fail_all(0, refusal)
        else:
            chain = Chain(space, message.keys, message.first, message.parent)
            windows = bool(layout.part_groups(Part.WINDOW))
            nulls = any(blocks.has_null)
            self._store_batch(_Batch(ticket, chain, blocks, layout, shard, windows, nulls))
        state.finish_if_ended(ticket)

    def cancel(self, ticket: Ticket, reason: Drop, most: int) -> int:
        """Up to ``most`` slots of the ticket commit no more, from the tail, and as many of other
        sessions' are waited for no more; tells how many. What has committed stays."""
        done = 0
        while ticket.own_slots and done < most:
            handle = ticket.own_slots.pop()
            slot = handle.slot
            if not handle.is_stale() and slot.state is SlotState.RESERVED:
                self._state.directory.host.fail(slot, reason)
            done += 1
        while ticket.joined and done < most:
            handle, wait = ticket.joined.pop()
            if not handle.is_stale() and handle.slot.remove_wait(wait):
                ticket.settle(wait.chunk, ok=False)
            done += 1
        return done

    def moved(self, job: Job, status: MoveStatus) -> None:
        """A STORE Move has ended."""
        state, slot = self._state, job.target
        if slot is None:
            raise InvariantError(f"STORE {job.id} has no target")
        gone = job.wait is not None and job.wait.ticket.cancelled
        if status is MoveStatus.OK and not gone:
            state.directory.host.landed(slot)
        elif slot.state is SlotState.RESERVED:
            state.directory.host.fail(slot, Drop.CANCELLED if gone else Drop.STORE_FAILED)
        state.end_wait(job, status is MoveStatus.OK)
        state.let_go(job)

    def _refusal(self, session: Session, ticket: Ticket) -> str:
        """Why the whole store is refused at once; empty if it isn't."""
        chunks = len(ticket.failed)
        if session.engine.space is None:
            self._state.drop(Drop.ENGINE_NOT_READY, chunks)
            return "the engine isn't ready: not every rank is registered"
        limit = self._state.limits.session_bytes_max
        if session.store_bytes and session.store_bytes + ticket.nbytes > limit:
            self._state.drop(Drop.SESSION_LIMIT, chunks)
            return (
                f"{session.store_bytes} bytes of stores are in flight, {ticket.nbytes} more "
                f"would pass the session's limit of {limit}"
            )
        return ""

    def _store_batch(self, batch: _Batch) -> None:
        """Begin the chunks from the head; the first that can't be kept ends it."""
        chunks = len(batch.chain)
        refused = self._misplaced(batch.chain)

        def begin(chunk: int) -> Step:
            nonlocal refused
            if not batch.chain.space.alive:
                refused = Drop.CLEARED
            outcome = refused or self._store_chunk(batch, chunk)
            if isinstance(outcome, Drop):
                refused = outcome
                return Step.END
            return outcome

        def fail(first: int) -> None:
            reason = refused or Drop.CANCELLED
            batch.ticket.fail_all(first, f"not kept: {reason.value}")
            self._state.drop(reason, chunks - first)

        self._state.batches.add(Batch(batch.ticket, chunks, begin, fail, lambda: None))

    def _misplaced(self, chain: Chain) -> Drop | None:
        """Whether the first chunk isn't at its depth: below a parent that is kept, one deeper."""
        host = self._state.directory.host
        copy = host.find(chain.space, chain.key(0)) if len(chain) else None
        above = host.find(chain.space, chain.parent) if chain.first else None
        wrong = copy is not None and copy.depth != chain.first
        wrong = wrong or (above is not None and above.depth + 1 != chain.first)
        return Drop.PARENT_MISSING if wrong else None

    def _store_chunk(self, batch: _Batch, chunk: int) -> Drop | Step:
        """Keep one chunk; tells why it can't be, if so."""
        wrong = batch.blocks.check(chunk)
        if wrong:
            batch.ticket.fail(chunk, f"store: {wrong}")
            return Drop.BAD_BLOCK
        if batch.nulls and batch.blocks.any_null(Part.FULL, chunk):
            return Drop.NULL_BLOCK
        if chunk >= batch.fulls:
            outcome = self._store_part(batch, chunk, Part.FULL)
            if outcome is not Step.NEXT:
                return outcome
            batch.fulls = chunk + 1
        if not batch.windows or (batch.nulls and batch.blocks.any_null(Part.WINDOW, chunk)):
            return Step.NEXT
        return self._store_part(batch, chunk, Part.WINDOW)

    def _store_part(self, batch: _Batch, chunk: int, part: Part) -> Drop | Step:
        host, ticket = self._state.directory.host, batch.ticket
        header = batch.chain.header(chunk, part, batch.layout, batch.shard)
        slot = host.current(batch.chain.space, header)
        if slot is None:
            return self._reserve(batch, chunk, header)
        if slot.state is SlotState.RESERVED:
            wait = ticket.wait(chunk)
            slot.add_wait(wait)
            ticket.joined.append((Handle.of(slot), wait))
        else:
            self._again(batch, slot)
        return Step.NEXT

    def _reserve(self, batch: _Batch, chunk: int, header: ChunkHeader) -> Drop | Step:
        """Take a slot and queue the Move that fills it."""
        state, ticket = self._state, batch.ticket
        slot = state.directory.host.reserve(batch.chain.space, header)
        if slot is None:
            return Step.LATER
        if isinstance(slot, Drop):
            return slot
        if slot.owner is not None and header.part is Part.FULL:
            slot.owner.count_store(batch.shard.rank())
        wait = ticket.wait(chunk, 2)  # for the slot's commit, and for the Move's end
        slot.add_wait(wait)
        ticket.own_slots.append(Handle.of(slot))
        job = Job(
            state.transfers.next_id(),
            MoveKind.STORE,
            header,
            target=slot,
            session=ticket.session,
            blocks=batch.blocks.of(header.part, chunk),
            wait=wait,
        )
        ticket.moves.add(job.id)
        state.transfers.push(job)
        return Step.NEXT

    def _again(self, batch: _Batch, slot: Slot) -> None:
        """A chunk that is there is stored again: a use, and a reason to write it to lower tiers."""
        copy = slot.owner
        if copy is None:
            return
        if slot.part is Part.FULL:
            self._state.directory.host.touch(copy)
            self._state.directory.tell(copy.space, copy.key)
            copy.count_store(batch.shard.rank())
        admitted = copy.stores == self._state.limits.admit_after
        for other in copy.slots() if admitted else [slot]:
            if other.state is SlotState.READY:
                self._writing.consider(other)
                self._sharing.consider(other)
