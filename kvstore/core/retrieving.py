"""Retrieve: host slots -> engine blocks; what is only on NVMe or in the remote tier is read first
(see ``reads``)."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.answers import Remote
from kvstore.core.batches import Batch, Step
from kvstore.core.blocks import ChunkBlocks, check_blocks
from kvstore.core.chunk import Chain, slot_header
from kvstore.core.engines import Session
from kvstore.core.keys import KEY_BYTES, NO_PARENT
from kvstore.core.layout import Layout, Part, Shard
from kvstore.core.leases import Lease
from kvstore.core.messages import Refused, Retrieve
from kvstore.core.reads import Reads
from kvstore.core.slots import Slot
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.tickets import Ticket, Wait
from kvstore.core.transfers import Blocks

_PARTS = tuple(Part)


@dataclass(frozen=True, slots=True)
class _Batch:
    """One retrieve's facts. ``lease``: that of its lookup, where it promises chunks of the remote
    tier; it says which also when it has ended meanwhile. The first chunk is its ``first``."""

    ticket: Ticket
    space: Space
    blocks: ChunkBlocks
    layout: Layout
    shard: Shard
    lease: Lease | None
    first: int
    parts: tuple[Part, ...]
    """Those that chunks of the layout have."""
    number: int
    """The shard's."""

    def key(self, chunk: int) -> bytes:
        """A chunk's key."""
        return self.ticket.keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]


class Retrieving:
    """The verb *retrieve*."""

    def __init__(self, state: State, reads: Reads) -> None:
        self._state = state
        self._reads = reads

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
            lease = state.leases.of(session.engine.key, message.request)
            if lease is not None and (lease.found is None or lease.space is not space):
                lease = None
            first = 0 if lease is None else lease.depth(message.keys[:KEY_BYTES]) or 0
            parts = tuple([part for part in _PARTS if layout.part_groups(part)])
            batch = _Batch(ticket, space, blocks, layout, shard, lease, first, parts, shard.index())
            self._begin(batch, chunks)
        state.finish_if_ended(ticket)

    # ------------------------------------------------------------ private

    def _begin(self, batch: _Batch, chunks: int) -> None:
        """Begin the chunks from the head, up to the first that isn't there."""
        ticket = batch.ticket

        def end() -> None:
            if 1 in ticket.failed and not ticket.cancelled:
                self._reads.cut_leases(ticket)

        self._state.batches.add(
            Batch(ticket, chunks, lambda n: self._retrieve_chunk(batch, n), ticket.fail_all, end)
        )

    def _retrieve_chunk(self, batch: _Batch, chunk: int) -> Step:
        """Queue what one chunk needs; tells whether it is there. Nothing is queued where it
        isn't."""
        if not batch.space.alive:
            return Step.END
        wrong = batch.blocks.check(chunk)
        if wrong:
            batch.ticket.fail(chunk, f"retrieve: {wrong}")
            return Step.END
        found: list[tuple[Slot | Remote, Blocks]] = []
        key = batch.key(chunk)
        for part in batch.parts:
            if batch.blocks.all_null(part, chunk):
                continue
            source = self._find(batch, chunk, part, key)
            if source is None:
                return Step.END
            found.append((source, batch.blocks.of(part, chunk)))
        host = self._state.directory.host
        if host.watched:
            self._state.directory.tell(batch.space, key)
        for source, blocks in found:
            if isinstance(source, Slot):
                self._touch(source)
                if source.slab.tier is host.tier:
                    wait = Wait(batch.ticket, chunk)
                    self._reads.load(source, slot_header(source, 0), wait, blocks)
                    continue
            self._reads.read(source, batch.ticket.wait(chunk), blocks)
        return Step.NEXT

    def _find(self, batch: _Batch, chunk: int, part: Part, key: bytes) -> Slot | Remote | None:
        """Where a part is: in the fastest tier that has it."""
        for tree in self._state.directory.trees():
            slot = tree.ready(batch.space, key, part, batch.number)
            if slot is not None:
                return slot
        return None if batch.lease is None else self._find_remote(batch, batch.lease, chunk, part)

    def _find_remote(self, batch: _Batch, lease: Lease, chunk: int, part: Part) -> Remote | None:
        """A part that the lease promises from the remote tier."""
        found, depth = lease.found, lease.depth(batch.key(chunk), batch.first + chunk)
        if found is None or depth is None or depth >= lease.chunks:
            return None
        if not self._state.remote_up or not found.has(part, depth):
            return None
        chain = Chain(batch.space, lease.keys, 0, NO_PARENT)
        header = chain.header(depth, part, batch.layout, batch.shard)
        before = max(0, depth - batch.layout.window_chunks())
        return Remote(
            space=batch.space,
            header=header,
            epoch=found.epoch,
            start=chain.key(found.first),
            place=depth - found.first,
            chain=lease.keys[before * KEY_BYTES : (depth + 1) * KEY_BYTES],
        )

    def _touch(self, slot: Slot) -> None:
        tree = self._state.directory.tree(slot.tier)
        if tree is not None and slot.owner is not None:
            tree.touch(slot.owner)
