"""Model: what must be true of every reply, whatever the core does inside.

* Each request gets exactly one reply, and none comes after Detach.
* A retrieve's chunk that is said to be done lies in the engine's blocks byte for byte.
* No block comes back while a Move uses it.
* A hit names chunks whose every shard's bytes have landed, in the asker's tenant and namespace, and
  not before the last acknowledged clear. With nothing evicted, lost or cleared since their stores
  began, all acknowledged chunks are named; and a repeated lookup names no fewer than before.
* A clear that was acknowledged is durable.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.core.layout import NULL_BLOCK, Part
from kvstore.core.messages import (
    Cleared,
    Completed,
    EngineState,
    HitStatus,
    Lookup,
    LookupReply,
    Message,
    Move,
    Refused,
    Release,
    Reply,
    Request,
    Retrieve,
    SessionID,
    SetRevision,
    SpaceRecord,
    Store,
)
from tests.sim.cells import PartKey, compare, fill
from tests.sim.errors import SimulationError
from tests.sim.hands import Hands
from tests.sim.media import Half, Pattern, unpack
from tests.sim.views import SessionView, SpaceKey, SpaceView, TicketView, fits, split

Name = tuple[SessionID, int]
"""A request: its session and its number."""
LeaseKey = tuple[str, str, str]
"""(tenant, engine, request)."""


class Surroundings(Protocol):
    """What a judgement needs of the world."""

    hands: Hands
    manifest: tuple[SpaceRecord, ...]
    now: float

    def disturbances(self) -> int:
        """A number that changes whenever a chunk may have left for a good reason."""

    def losses(self) -> int:
        """The same for reasons that a lease doesn't hold against."""

    def returned(self, ticket: TicketView) -> None:
        """A ticket's blocks are the engine's again."""

    def raised(self, body: Cleared) -> dict[SpaceKey, int]:
        """The fleet's epochs that a clear has raised."""


@dataclass(slots=True)
class Seen:
    """A lookup's answer, for the next one of the same request."""

    keys: bytes
    chunks: int
    losses: int
    until_s: float


@dataclass(slots=True)
class Model:
    """The oracle. ``spaces`` and ``landed`` survive restarts of the daemon."""

    lease_s: float
    windows_count: bool
    """Whether windows must be found too: only where nothing is ever evicted."""
    wait_s: float = 0.0
    """How long a lookup may be pending."""
    spaces: dict[SpaceKey, SpaceView] = field(default_factory=dict)
    sessions: dict[SessionID, SessionView] = field(default_factory=dict)
    open: dict[Name, Message] = field(default_factory=dict)
    pending: dict[Name, float] = field(default_factory=dict)
    """Lookups that were told to wait, and when."""
    newest: dict[PartKey, int] = field(default_factory=dict)
    """The fleet's epoch under which a part was last stored in the remote tier, by any node."""
    tickets: dict[Name, TicketView] = field(default_factory=dict)
    detached: set[SessionID] = field(default_factory=set)
    landed: dict[PartKey, int] = field(default_factory=dict)
    """The clears count of the newest bytes of a part that ever landed in a host slot."""
    acked: dict[PartKey, tuple[int, int]] = field(default_factory=dict)
    """(clears, disturbances) of the last store of a part that was acknowledged."""
    clearing: dict[Name, list[tuple[SpaceKey, int]]] = field(default_factory=dict)
    seen: dict[LeaseKey, Seen] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    # ------------------------------------------------------------ requests

    def request(self, request: Request, world: Surroundings) -> None:
        """A request is about to be delivered: stores get their bytes now."""
        name, message = (request.session, request.id), request.message
        self.open[name] = message
        self.counts[type(message).__name__] += 1
        session = self.sessions[request.session]
        if isinstance(message, (Store, Retrieve)) and fits(message, session):
            view = self.spaces.get(session.space())
            storing = isinstance(message, Store)
            clears = 0 if view is None else view.clears if storing else view.cleared
            ticket = TicketView(message, session, session.space(), clears, world.disturbances())
            ticket.fleet_epoch = 0 if view is None else view.fleet_epoch
            self.tickets[name] = ticket
            if storing:
                fill(ticket)
        if isinstance(message, Release):
            self.seen.pop((*session.engine(), message.request), None)
            self._abandon(request.session, message.request)

    def _abandon(self, session: SessionID, request: str) -> None:
        """A request whose lookup is pending is released: its answer may be anything."""
        for name in [name for name in self.pending if name[0] == session]:
            lookup = self.open[name]
            if isinstance(lookup, Lookup) and lookup.request == request:
                self.open[name] = Lookup(request, b"")

    def clear(self, name: Name, tenant: str | None, model: str | None) -> None:
        """A clear is about to be delivered."""
        self.clearing[name] = []
        for key, view in self.spaces.items():
            names = (None, view.namespace.model, view.namespace.alias)
            if tenant in (None, key[0]) and model in names:
                view.clears += 1
                self.clearing[name].append((key, view.clears))

    def reply(self, reply: Reply, world: Surroundings) -> None:
        """Judge a reply."""
        if reply.session in self.detached:
            raise SimulationError(f"a reply to s{reply.session} after its Detach")
        if reply.id == 0:
            if not isinstance(reply.body, EngineState):
                raise SimulationError(f"a push of {reply.body}")
            self._engine_state(reply.session, reply.body)
            return
        name = (reply.session, reply.id)
        if is_pending(reply.body) and name in self.open and name not in self.pending:
            self.pending[name] = world.now
            self.counts["pending"] += 1
            return
        message = self.open.pop(name, None)
        if message is None or is_pending(reply.body):
            raise SimulationError(f"a second reply, or one to nothing: {reply}")
        if self.pending.pop(name, world.now) < world.now - self.wait_s:
            raise SimulationError(f"s{name[0]} #{name[1]} was pending for too long")
        self._judge(reply, message, world)

    def _judge(self, reply: Reply, message: Message, world: Surroundings) -> None:
        name, body = (reply.session, reply.id), reply.body
        ticket = self.tickets.pop(name, None)
        match body:
            case Completed() if ticket is not None:
                self._completed(name, ticket, body, world)
            case LookupReply() if isinstance(message, Lookup):
                self._hit(self.sessions[reply.session], message, body, world)
            case EngineState():
                if isinstance(message, SetRevision):
                    self._forget_leases(self.sessions[reply.session])
                self._engine_state(reply.session, body)
            case Cleared():
                self._cleared(name, body, world)
            case Refused():
                self.counts["refused " + type(message).__name__] += 1
                if ticket is not None:
                    world.returned(ticket)
            case Completed() | LookupReply():
                raise SimulationError(f"{body} for {message}")

    # ------------------------------------------------------------ transfers

    def _completed(
        self, name: Name, ticket: TicketView, body: Completed, world: Surroundings
    ) -> None:
        if len(body.done) != len(ticket.keys()) or set(body.done) - {0, 1}:
            raise SimulationError(f"{body} for {len(ticket.keys())} chunks")
        move = world.hands.using(name[0], set(ticket.blocks()))
        if move is not None:
            raise SimulationError(f"s{name[0]} #{name[1]} completed while Move {move.id} runs")
        what = "stored" if isinstance(ticket.message, Store) else "retrieved"
        self.counts[what] += sum(body.done)
        self.counts[f"not {what}"] += body.done.count(0)
        self.counts["cancelled"] += body.cancelled
        if isinstance(ticket.message, Store):
            if not ticket.leads(self._fill_gaps(ticket, body.done)):
                raise SimulationError(f"s{name[0]} #{name[1]} isn't kept from its head: {body}")
            self._acknowledge(ticket, body)
        else:
            compare(ticket, body, self.newest)
        world.returned(ticket)

    def _fill_gaps(self, ticket: TicketView, done: bytes) -> bytes:
        """``done``, with 1 before its last 1 where another store of the shard brought the chunk: a
        store may have waited for one that failed, and a third came in time for what follows."""
        shard, filled = ticket.session.shard(), bytearray(done)
        for chunk, key in enumerate(ticket.keys()[: done.rfind(1)] if 1 in done else ()):
            names = [(*ticket.space, key, shard, part) for part in Part]
            filled[chunk] |= any(self.landed.get(name, -1) >= ticket.clears for name in names)
        return bytes(filled)

    def _acknowledge(self, ticket: TicketView, body: Completed) -> None:
        layout = ticket.session.shape.layout
        for chunk, key in enumerate(ticket.keys()):
            for part in Part:
                blocks = ticket.chunk_blocks(layout, chunk, part)
                whole = blocks and all(block != NULL_BLOCK for _, block in blocks)
                if not body.done[chunk] or not whole:
                    continue
                name = (*ticket.space, key, ticket.session.shard(), part)
                if name not in self.landed and name not in self.newest:
                    raise SimulationError(f"{key.hex()[:6]} {part.name} acknowledged unwritten")
                self.acked[name] = (ticket.clears, ticket.disturbances)

    def move(self, move: Move) -> None:
        """A Move with engine memory must be for a ticket that is open and lends these blocks."""
        if move.session is None:
            return
        wanted, part = unpack(move.blocks), move.header.part
        for ticket in self.tickets.values():
            session = ticket.session
            if session.id != move.session or session.space()[0] != move.header.tenant:
                continue
            layout = session.shape.layout
            for chunk, key in enumerate(ticket.keys()):
                same = key == move.header.key and session.shard() == move.header.shard
                if same and ticket.chunk_blocks(layout, chunk, part) == wanted:
                    return
        raise SimulationError(f"Move {move.id} uses blocks that s{move.session} doesn't lend")

    def stored(self, move: Move, first: Half) -> None:
        """A STORE has ended well."""
        head = move.header
        if not isinstance(first, Pattern):
            raise SimulationError(f"Move {move.id} stored {first}")
        name = (head.tenant, head.namespace, bytes(head.key), head.shard, head.part)
        self.landed[name] = max(self.landed.get(name, 0), first.clears)

    # ------------------------------------------------------------ hits

    def _hit(
        self, session: SessionView, message: Lookup, body: LookupReply, world: Surroundings
    ) -> None:
        keys = split(message.keys)
        if not 0 <= body.chunks <= len(keys) or (body.status is HitStatus.HIT) != (body.chunks > 0):
            raise SimulationError(f"{body} for {len(keys)} keys")
        self.counts["hit chunks"] += body.chunks
        self._check_present(session, keys[: body.chunks])
        name = (*session.engine(), message.request)
        seen = self.seen.get(name)
        if seen is None or seen.keys != message.keys or seen.until_s < world.now:
            expected = 0 if seen else self._expected(session, keys, world.disturbances())
        else:
            expected = seen.chunks if seen.losses == world.losses() else 0
            self.counts["leases that had to hold"] += expected > 0
        if body.chunks < expected and session.namespace:
            raise SimulationError(f"a hit of {body.chunks}, but {expected} chunks must be there")
        self.counts["hits that had to be"] += expected
        until_s = world.now + self.lease_s
        if body.chunks or seen is not None:
            self.seen[name] = Seen(message.keys, body.chunks, world.losses(), until_s)

    def _check_present(self, session: SessionView, keys: list[bytes]) -> None:
        """Every part that a hit needs has landed since the last acknowledged clear."""
        view = self.spaces.get(session.space())
        layout = session.shape.layout
        windows_from = len(keys) - layout.window_chunks()
        for chunk, key in enumerate(keys):
            for shard in range(session.shape.shards[0].count()):
                for part in Part if chunk >= windows_from else (Part.FULL,):
                    if not layout.part_groups(part):
                        continue
                    name = (*session.space(), key, shard, part)
                    there = view is not None and self.newest.get(name, -1) >= view.fleet_epoch
                    if view is None or (self.landed.get(name, -1) < view.cleared and not there):
                        what = f"{key.hex()[:6]} shard {shard} {part.name}"
                        raise SimulationError(f"a hit on {what}, which isn't there")

    def _expected(self, session: SessionView, keys: list[bytes], count: int) -> int:
        """Leading chunks that must be found: acknowledged in all parts, and undisturbed since."""
        view = self.spaces.get(session.space())
        layout = session.shape.layout
        parts = [part for part in Part if layout.part_groups(part)]
        if view is None or (len(parts) > 1 and not self.windows_count):
            return 0
        for chunk, key in enumerate(keys):
            for shard in range(session.shape.shards[0].count()):
                for part in parts:
                    if self.acked.get((*session.space(), key, shard, part)) != (view.clears, count):
                        return chunk
        return len(keys)

    # ------------------------------------------------------------ clears, sessions, restarts

    def _cleared(self, name: Name, body: Cleared, world: Surroundings) -> None:
        self.counts["cleared"] += 1
        raised = world.raised(body)
        for key, epoch in raised.items():
            if key in self.spaces:
                self.spaces[key].fleet_epoch = max(epoch, self.spaces[key].fleet_epoch)
        durable = {(s.tenant, s.namespace): s.epoch for s in world.manifest}
        for key, clears in self.clearing.pop(name):
            view = self.spaces[key]
            view.cleared = max(view.cleared, clears)
            for record in world.hands.disk.records.values():
                head, old = record.header, record.first[0]
                if (head.tenant, head.namespace) != key or not isinstance(old, Pattern):
                    continue
                if old.clears < clears and head.epoch >= durable.get(key, -1):
                    raise SimulationError(f"{head.key.hex()[:6]} outlives a clear on the disk")

    def _engine_state(self, session: SessionID, state: EngineState) -> None:
        view = self.sessions[session]
        if state.ready != bool(state.namespace):
            raise SimulationError(f"{state}: ready and namespace disagree")
        if view.namespace not in (b"", state.namespace):
            self._forget_leases(view)
        view.namespace = state.namespace
        view.joined = True
        if state.ready:
            self.spaces.setdefault(view.space(), SpaceView(view.shape.namespace))

    def close(self, session: SessionID) -> None:
        """The peer is gone: nothing that it asked needs an answer, and a lost worker
        ends its engine's leases."""
        for name in [name for name in self.open if name[0] == session]:
            del self.open[name]
            self.pending.pop(name, None)
        view = self.sessions[session]
        if view.joined and view.memory is not None:
            self._forget_leases(view)

    def _forget_leases(self, view: SessionView) -> None:
        for lease in [lease for lease in self.seen if lease[:2] == view.engine()]:
            del self.seen[lease]

    def detach(self, session: SessionID) -> list[TicketView]:
        """EOF: the tickets that end with it."""
        if session in self.detached:
            raise SimulationError(f"a second Detach of s{session}")
        self.detached.add(session)
        names = [name for name in self.tickets if name[0] == session]
        return [self.tickets.pop(name) for name in names]

    def restart(self) -> None:
        """The daemon died: so did all sessions, and what they had asked."""
        self.detached.update(self.sessions)
        for mapping in (
            self.sessions, self.open, self.tickets, self.clearing, self.seen, self.acked
        ):  # fmt: skip
            mapping.clear()
        self.pending.clear()


def is_pending(body: object) -> bool:
    """Whether an answer says that another one follows."""
    return isinstance(body, LookupReply) and body.status is HitStatus.PENDING
