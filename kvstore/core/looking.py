"""Looking: the verb *lookup*. Directory only: nothing is read and nothing waits."""

from __future__ import annotations

from kvstore.core.engines import Engine, Session
from kvstore.core.keys import KEY_BYTES
from kvstore.core.leases import Lease, asked
from kvstore.core.limits import Partial
from kvstore.core.messages import HitStatus, Lookup, LookupReply
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy


class Looking:
    """The verb *lookup*, and the leases that it takes."""

    def __init__(self, state: State) -> None:
        self._state = state

    def lookup(self, session: Session, number: int, message: Lookup) -> None:
        """Answer a lookup."""
        state, engine = self._state, session.engine
        space, count = engine.space, len(message.keys) // KEY_BYTES
        chunks = 0
        if state.limits.partial is Partial.MISS and engine.uncached():
            space = None
        if space is not None and count:
            lease = state.leases.renew(engine.key, message.request, message.keys, state.now)
            if lease is None:
                chunks, pins = state.directory.hit(space, message.keys, engine.window_chunks)
                self._take_lease(engine, message, chunks, pins)
                state.lookups += 1
                state.lookup_tokens += count * engine.tokens_per_chunk
                state.hit_tokens += chunks * engine.tokens_per_chunk
            else:
                chunks = self._renewed(engine, space, message, lease)
        status = HitStatus.HIT if chunks else HitStatus.MISS
        state.reply(session.id, number, LookupReply(status, chunks))

    def _renewed(self, engine: Engine, space: Space, message: Lookup, lease: Lease) -> int:
        """What a lease still promises. Where that is less than what it pins, it pins that much from
        now on: the window parts that a shorter hit needs are others. It never rises again."""
        directory = self._state.directory
        lease.chunks = directory.step_down(space, lease.keys, lease.chunks, engine.window_chunks)
        keys = lease.keys[: lease.chunks * KEY_BYTES]
        if not keys or len(keys) == len(lease.keys):
            return lease.chunks
        chunks, pins = directory.hit(space, keys, engine.window_chunks)
        self._take_lease(engine, message, chunks, pins)
        return chunks

    def _take_lease(
        self, engine: Engine, message: Lookup, chunks: int, pins: list[tuple[Tree, Copy]]
    ) -> None:
        """Lease a hit. A miss takes none, so that what is stored next is seen at once."""
        leases = self._state.leases
        if not chunks:
            leases.release(engine.key, message.request)
            return
        keys, deadline_s = message.keys, self._state.now + leases.lease_s
        lease = Lease(asked(keys), keys[: chunks * KEY_BYTES], chunks, pins, deadline_s)
        lease.early = any(tree.scanning for tree in self._state.directory.trees())
        leases.take(engine.key, message.request, lease)
