"""Service: the pure brain. ``handle(event, now) -> effects``, and nothing else happens in it.

One thread drives it. Each event is handled to its end: what it settles settles tickets, what it
commits is considered for lower tiers, and the Moves that may go out now are handed out. Work whose
size isn't bounded by the event (sweeps, expiry) goes on in steps at Ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.core.cancelling import Cancelling
from kvstore.core.changes import Watch
from kvstore.core.clearing import Clearing
from kvstore.core.engines import Session
from kvstore.core.errors import InvariantError
from kvstore.core.eviction import LeastRecentlyUsed, Policy
from kvstore.core.invariants import check
from kvstore.core.joining import Joining
from kvstore.core.limits import Limits
from kvstore.core.looking import Looking
from kvstore.core.messages import (
    AllMoved,
    Attach,
    Cancel,
    Clear,
    Detach,
    Done,
    Effect,
    Event,
    Lookup,
    Message,
    Moved,
    MoveStatus,
    Persisted,
    Refused,
    Register,
    Release,
    Request,
    Retrieve,
    ScanDone,
    Scanned,
    SessionClosed,
    SetRevision,
    SpaceRecord,
    Store,
    Tick,
)
from kvstore.core.reads import Reads
from kvstore.core.remote_messages import Probed, RemoteCleared, RemoteState
from kvstore.core.remote_tier import RemoteTier
from kvstore.core.restoring import Restoring
from kvstore.core.retrieving import Retrieving
from kvstore.core.sharing import Sharing
from kvstore.core.state import State
from kvstore.core.stats import CoreStats, Drop, SpaceStats
from kvstore.core.storing import Storing
from kvstore.core.transfers import Job, Lane, Sources
from kvstore.core.tree import Tree
from kvstore.core.watching import Watching
from kvstore.core.writing import Writing

_TICK_S = 0.25
_SWEEP_TICK_S = 0.002
_WATCH_TICK_S = 0.02
"""For so long what watchers are told comes together."""
_EXPIRE_MAX = 200
_BURY_SLOTS = 2000
SPACES_PAGE = 1000
"""Namespaces told at a time."""


class Service:
    """The core of one daemon. Raises InvariantError on a bug, after which it must not go on."""

    def __init__(
        self,
        limits: Limits,
        spaces: tuple[SpaceRecord, ...] = (),
        policy: Callable[[], Policy] = LeastRecentlyUsed,
    ) -> None:
        self._state = State(limits, policy)
        self._state.spaces.restore(spaces)
        self._writing = Writing(self._state)
        self._sharing = Sharing(self._state)
        self._looking = Looking(self._state)
        self._probing = self._looking.probing
        self._reads = Reads(self._state, self._probing.deny)
        self._storing = Storing(self._state, self._writing, self._sharing)
        self._retrieving = Retrieving(self._state, self._reads)
        self._remote = RemoteTier(self._state, self._probing, self._sharing, self._reads)
        self._restoring = Restoring(self._state)
        self._joining = Joining(self._state)
        self._clearing = Clearing(self._state, self._writing)
        self._watching = Watching(self._state)
        self._cancelling = Cancelling(self._state, self._storing, self._reads)
        self._steps = deque(self._works())
        self._sources = Sources(
            self._reads.land, self._writing.next_write, self._sharing.next_write
        )
        self._endings = self._ends()
        self._events: dict[type[Event], Callable[[Any], None]] = self._handlers()
        self._verbs: dict[type[Message], Callable[[Session, int, Any], None]] = {
            Lookup: self._looking.lookup,
            Release: self._release,
            Store: self._storing.store,
            Retrieve: self._retrieving.retrieve,
            Cancel: self._cancel_request,
            SetRevision: self._joining.set_revision,
            Watch: self._watching.watch,
        }
        if self._state.directory.nvme is not None:
            self._state.directory.nvme.scanning = True

    def _works(self) -> Iterator[tuple[Callable[[], bool], Callable[[], None]]]:
        """What goes on in steps: whether it does, and a step of it."""
        yield self._state.batches.running, self._begin
        yield self._cancelling.running, self._cancelling.step
        yield self._state.leases.running, self._state.leases.step
        yield self._clearing.running, self._clearing.step
        yield self._restoring.running, self._restoring.step
        yield self._writing.running, self._writing.step
        yield self._probing.running, self._probing.step
        yield self._sharing.running, self._sharing.step
        yield self._reads.running, self._reads.step
        for tree in self._state.directory.trees():
            yield tree.stepping, tree.step

    def _ends(self) -> dict[Lane, Callable[[Job, MoveStatus], None]]:
        """What the end of a Move leads to."""
        return {
            Lane.STORE: self._storing.moved,
            Lane.LOAD: self._reads.loaded,
            Lane.READ: self._reads.ended,
            Lane.WRITE: self._writing.moved,
            Lane.ERASE: self._reads.erased,
            Lane.REMOTE_READ: self._reads.ended,
            Lane.REMOTE_WRITE: self._sharing.moved,
        }

    def _handlers(self) -> dict[type[Event], Callable[[Any], None]]:
        """What each event leads to."""
        return {
            Request: self._request,
            Moved: lambda event: self._moved([event]),
            AllMoved: lambda event: self._moved(event.moved),
            SessionClosed: self._closed,
            Tick: self._tick,
            Scanned: self._restoring.scanned,
            ScanDone: self._restoring.done,
            Persisted: self._clearing.persisted,
            Probed: self._remote.probed,
            RemoteState: self._remote.told,
            RemoteCleared: self._clearing.remote_cleared,
        }

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Carry out one event; the effects are to be done in order, or the Moves behind the
        others."""
        state = self._state
        state.now = now
        for tree in state.directory.trees():
            tree.begin()
        self._writing.begin()
        self._events[type(event)](event)
        self._settle()
        self._dispatch()
        effects, state.effects = state.effects, []
        return effects

    def idle(self) -> bool:
        """Whether no Move is queued or running and nothing waits for its write: a clean stop."""
        busy = self._stepping() or len(self._writing) or self._remote.busy()
        return self._state.transfers.idle() and not busy

    def next_tick_s(self, now: float) -> float:
        """How long until a Tick is useful."""
        if self._stepping():
            return 0.0
        wait_s = _WATCH_TICK_S if self._watching.due() else _TICK_S
        for tree in self._state.directory.trees():
            if tree.sweeping() or tree.slabs.burying():
                wait_s = _SWEEP_TICK_S
        writes = len(self._writing) or len(self._sharing)
        held = self._state.transfers.held_until(now) if writes else None
        for deadline_s in (self._probing.next_deadline_s(), held):
            if deadline_s is not None:
                wait_s = min(wait_s, max(0.0, deadline_s - now))
        return wait_s

    def spaces(self, first: int, most: int = SPACES_PAGE) -> tuple[SpaceStats, ...]:
        """Up to ``most`` namespaces from the ``first`` on, in the order in which they came."""
        return tuple(
            SpaceStats(s.tenant, s.model, s.alias, s.namespace.hex(), s.epoch, s.chunks())
            for s in self._state.spaces.some(first, most)
        )

    def stats(self, now: float) -> CoreStats:
        """A snapshot, of the first SPACES_PAGE namespaces; takes time in proportion to slabs,
        engines and sessions, not chunks."""
        state = self._state
        return CoreStats(
            tiers=state.directory.stats(),
            engines=tuple(engine.stats() for engine in state.engines.engines()),
            spaces=self.spaces(0),
            spaces_total=len(state.spaces),
            sessions=len(state.engines.sessions()),
            leases=len(state.leases),
            moves_in_flight=state.transfers.running(),
            moves_queued=state.transfers.queued(),
            write_backlog=len(self._writing),
            lookups=state.lookups,
            lookup_tokens=state.lookup_tokens,
            hit_tokens=state.hit_tokens,
            stored_chunks=state.chunks_done["store"],
            retrieved_chunks=state.chunks_done["retrieve"],
            store=state.latency["store"].summary(),
            retrieve=state.latency["retrieve"].summary(),
            drops=dict(state.drops),
            tenants=state.directory.tenants(),
            watchers=len(self._watching),
            changes_dropped=self._watching.dropped,
            remote=None if state.limits.remote is None else self._remote.stats(),
        )

    def check_invariants(self) -> None:
        """Raise InvariantError unless everything fits together; takes time in proportion to
        chunks."""
        check(self._state)
        self._remote.check()

    def _stepping(self) -> bool:
        """Whether something that was begun goes on at the next Tick, which is due at once."""
        return any(running() for running, _ in self._steps)

    # ------------------------------------------------------------ requests

    def _request(self, event: Request) -> None:
        message: Message = event.message
        state = self._state
        if isinstance(message, Clear):
            self._clearing.clear(event, message)
            return
        if isinstance(message, Register | Attach):
            self._joining.join(event.session, event.id, message)
            return
        session = state.engines.session(event.session)
        if session is None or session.closing:
            if session is None:
                text = "register or attach first"
                state.reply(event.session, event.id, Refused(text))
            return
        if event.id in session.tickets:
            text = f"request number {event.id} is a transfer in flight; use another"
            state.reply(session.id, event.id, Refused(text))
            return
        most = state.limits.transfers_max
        if isinstance(message, Store | Retrieve) and len(session.tickets) >= most:
            text = f"{most} transfers of this session are in flight, which is the limit"
            state.reply(session.id, event.id, Refused(text))
            return
        self._verbs[type(message)](session, event.id, message)

    def _release(self, session: Session, number: int, message: Release) -> None:
        self._probing.forget(session, message.request)
        self._state.leases.release(session.engine.key, message.request)
        self._state.reply(session.id, number, Done())

    def _cancel_request(self, session: Session, number: int, message: Cancel) -> None:
        self._state.reply(session.id, number, Done())
        ticket = session.tickets.get(message.transfer)
        if ticket is not None:
            self._cancelling.add([ticket], Drop.CANCELLED)

    # ------------------------------------------------------------ other events

    def _moved(self, events: Sequence[Moved]) -> None:
        state = self._state
        closing: list[Session] = []
        for event in events:
            job = state.transfers.finish(event.move)
            self._endings[job.lane()](job, event.status)
            if job.session is not None:
                session = state.engines.session(job.session)
                if session is None:
                    raise InvariantError(f"Move {job.id} outlived its session {job.session}")
                session.moves -= 1
                if session.closing:
                    closing.append(session)
            if job.wait is not None:
                state.finish_if_ended(job.wait.ticket)
        self._settle()
        for session in closing:
            state.detach_if_idle(session)

    def _closed(self, event: SessionClosed) -> None:
        state, number = self._state, event.session
        session = state.engines.session(number)
        if session is None:
            state.effects.append(Detach(number))
            return
        if session.closing:
            raise InvariantError(f"session {number} closed twice")
        session.closing = True
        self._watching.end(number)
        self._probing.close(session)
        engine = session.engine
        if session.shard is not None:
            before = engine.state()
            engine.space = None
            state.leases.end_engine(engine.key)
            self._joining.tell(engine, before, but=number)
        self._cancelling.add(list(session.tickets.values()), Drop.SESSION_LOST)
        self._settle()
        state.detach_if_idle(session)

    def _tick(self, _: Tick) -> None:
        """Deadlines, a step of one of the works that go on, and a sweep: half of one beside a
        step, so that a Tick takes no longer then."""
        state = self._state
        stepped = self._step()
        state.leases.expire(state.now, _EXPIRE_MAX)
        self._writing.tick()
        self._clearing.tick()
        self._watching.tick()
        self._probing.tick()
        entries = state.limits.sweep_entries // (2 if stepped else 1)
        for tree in state.directory.trees():
            tree.sweep(entries)
            tree.slabs.bury(_BURY_SLOTS)

    def _step(self) -> bool:
        """A step of the work whose turn it is, if any."""
        for _ in range(len(self._steps)):
            running, step = self._steps[0]
            self._steps.rotate(-1)
            if running():
                step()
                return True
        return False

    def _begin(self) -> None:
        begun = self._state.batches.step()
        if begun is not None:
            self._state.finish_if_ended(begun)
            self._state.detach_after(begun)

    # ------------------------------------------------------------ after each event

    def _settle(self) -> None:
        """Tell tickets what committed or failed, and consider what committed for lower tiers."""
        state = self._state
        trees = state.directory.trees()
        while any(map(_noted, trees)):
            for tree in trees:
                for reason, count in tree.lost.items():
                    state.drop(reason, count)
                tree.lost.clear()
                if tree.changed:
                    self._watching.note(tree)
                settled, tree.settled = tree.settled, []
                committed, tree.committed = tree.committed, []
                for wait, ok in settled:
                    wait.ticket.settle(wait.chunk, ok)
                for wait, _ in settled:
                    state.finish_if_ended(wait.ticket)
                    state.detach_after(wait.ticket)
                if tree is state.directory.host:
                    for slot in committed:
                        self._writing.consider(slot)
                        self._sharing.consider(slot)

    def _dispatch(self) -> None:
        state = self._state
        moves = state.transfers.dispatch(state.now, self._sources)
        for move in moves:
            if move.session is not None:
                session = state.engines.session(move.session)
                if session is None:
                    raise InvariantError(f"Move {move.id} names a session that is gone")
                session.moves += 1
        state.effects += moves
        self._settle()


def _noted(tree: Tree) -> bool:
    """Whether a tree has something that nobody has taken."""
    return bool(tree.settled or tree.committed or tree.lost or tree.changed)
