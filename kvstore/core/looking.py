"""Looking: the verb *lookup*. Directory only: nothing is read and nothing waits, but for a probe of
the remote tier, for which the engine is told to ask again."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.core.answers import Found
from kvstore.core.directory import Seen
from kvstore.core.engines import Engine, Session
from kvstore.core.keys import KEY_BYTES
from kvstore.core.leases import Lease, asked
from kvstore.core.limits import Partial
from kvstore.core.messages import HitStatus, Lookup, LookupReply
from kvstore.core.probing import Probing, Waiter
from kvstore.core.spaces import Space
from kvstore.core.state import State


class _Hit(NamedTuple):
    """A hit of ``chunks``: what local tiers have of it, and what the remote one does, if asked."""

    seen: Seen
    chunks: int
    found: Found | None

    def remote(self) -> Found | None:
        """What the remote tier has, where the hit needs it."""
        return self.found if self.chunks > self.seen.chunks else None


class Looking:
    """The verb *lookup*, and the leases that it takes."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.probing = Probing(state, self._answer_waiter)

    def lookup(self, session: Session, number: int, message: Lookup) -> None:
        """Answer a lookup, or say that its answer is pending."""
        state, engine = self._state, session.engine
        space, chunks = _space(state, engine), 0
        if state.remote_up:
            self.probing.finish(session, message.request)
        if space is not None and message.keys:
            lease = state.leases.renew(engine.key, message.request, message.keys, state.now)
            if lease is not None:
                chunks = self._renewed(engine, space, message, lease)
            else:
                seen = state.directory.see(space, message.keys, engine.window_chunks)
                found = None
                if state.remote_up and seen.chunks * KEY_BYTES < len(message.keys):
                    found = state.leases.early_found(engine.key, message.request, message.keys)
                    if found is None:
                        span = self.probing.range(engine, space, message.keys, seen.run())
                        found = self.probing.known(span)
                        self.probing.remembered += found is not None
                        if found is None and self.probing.ask(session, number, message, span):
                            state.reply(session.id, number, LookupReply(HitStatus.PENDING, 0))
                            return
                chunks = self._hit(engine, space, message, seen, found)
        state.reply(session.id, number, _reply(chunks))

    def _answer_waiter(self, waiter: Waiter) -> None:
        """Answer a lookup that has waited, with what is there and known by now."""
        state, message = self._state, waiter.message
        engine = waiter.session.engine
        space, chunks = _space(state, engine), 0
        if space is not None:
            seen = state.directory.see(space, message.keys, engine.window_chunks)
            found = None
            if state.remote_up:
                span = self.probing.range(engine, space, message.keys, seen.run())
                found = self.probing.known(span)
            chunks = self._hit(engine, space, message, seen, found)
        state.reply(waiter.session.id, waiter.number, _reply(chunks))

    def _hit(
        self, engine: Engine, space: Space, message: Lookup, seen: Seen, found: Found | None
    ) -> int:
        """Count the hit and lease it. A miss takes no lease, so that what is stored next is seen at
        once."""
        state, count = self._state, len(message.keys) // KEY_BYTES
        chunks = self._reach(engine, space, message.keys, seen, found)
        state.lookups += 1
        state.lookup_tokens += count * engine.tokens_per_chunk
        state.hit_tokens += chunks * engine.tokens_per_chunk
        state.directory.count(count, seen)
        if state.remote_up:
            self.probing.hits += chunks - seen.chunks
            self.probing.misses += count - chunks
        if chunks:
            self._take_lease(engine, space, message, _Hit(seen, chunks, found))
        else:
            state.leases.release(engine.key, message.request)
        return chunks

    def _reach(
        self, engine: Engine, space: Space, keys: bytes, seen: Seen, found: Found | None
    ) -> int:
        """How long the hit is: what local tiers have, or further where the remote one has the
        rest."""
        if found is None:
            return seen.chunks
        most, directory = len(keys) // KEY_BYTES, self._state.directory

        def window(depth: int) -> bool:
            return directory.has_window(space, keys[depth * KEY_BYTES : (depth + 1) * KEY_BYTES])

        return max(seen.chunks, found.reach(seen.run(), most, engine.window_chunks, window))

    def _renewed(self, engine: Engine, space: Space, message: Lookup, lease: Lease) -> int:
        """What a lease still promises, from the remote tier only while that is up. Where it is less
        than what it pins, it pins that much from now on: the window parts that a shorter hit needs
        are others. It never rises again."""
        directory, window_chunks = self._state.directory, engine.window_chunks
        if lease.found is None:
            chunks = directory.step_down(space, lease.keys, lease.chunks, window_chunks)
        else:
            keys = lease.keys[: lease.chunks * KEY_BYTES]
            seen = directory.see(space, keys, window_chunks)
            found = lease.found if self._state.remote_up else None
            chunks = self._reach(engine, space, keys, seen, found)
        lease.chunks = chunks
        keys = lease.keys[: chunks * KEY_BYTES]
        if not keys or len(keys) == len(lease.keys):
            return chunks
        seen = directory.see(space, keys, window_chunks)
        self._take_lease(engine, space, message, _Hit(seen, chunks, lease.found))
        return chunks

    def _take_lease(self, engine: Engine, space: Space, message: Lookup, hit: _Hit) -> None:
        leases, directory = self._state.leases, self._state.directory
        keys, deadline_s = message.keys, self._state.now + leases.lease_s
        held = keys[: hit.chunks * KEY_BYTES]
        pins = directory.pin(space, held, hit.seen, engine.window_chunks)
        lease = Lease(asked(keys), held, hit.chunks, pins, deadline_s, space)
        lease.found = hit.remote()
        lease.early = any(tree.scanning for tree in directory.trees())
        leases.take(engine.key, message.request, lease)


def _space(state: State, engine: Engine) -> Space | None:
    """Where an engine's lookups look, if anywhere."""
    missing = state.limits.partial is Partial.MISS and engine.uncached()
    return None if missing else engine.space


def _reply(chunks: int) -> LookupReply:
    return LookupReply(HitStatus.HIT if chunks else HitStatus.MISS, chunks)
