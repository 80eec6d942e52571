"""World: one daemon with its disk, its engines and a virtual clock, all from one seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from kvstore.core.errors import KVStoreError
from kvstore.core.layout import Part
from kvstore.core.limits import Limits
from kvstore.core.messages import (
    ADMIN,
    Cancel,
    Clear,
    Completed,
    Detach,
    Effect,
    Event,
    Lookup,
    LookupReply,
    Message,
    Move,
    Moved,
    MoveKind,
    MoveStatus,
    Persist,
    Persisted,
    Place,
    Reply,
    Request,
    SessionClosed,
    SessionID,
    SpaceRecord,
    Tick,
)
from kvstore.core.service import Service
from tests.sim.errors import SimulationError
from tests.sim.faults import Faults
from tests.sim.hands import Hands
from tests.sim.inside import check_hit
from tests.sim.media import Disk, EngineMemory
from tests.sim.model import Model
from tests.sim.scan import scan
from tests.sim.shapes import EngineShape
from tests.sim.story import Story
from tests.sim.views import SessionView, TicketView, split

BUGS = (
    KVStoreError, AssertionError, ArithmeticError, AttributeError, LookupError, TypeError,
    ValueError, RuntimeError,
)  # fmt: skip
"""What a broken core may raise."""
DISTURBING = ("corrupt", "key_collision", "read_failed", "load_failed", "cleared")
"""Drops after which a chunk may be missing for a good reason."""

OnReply = Callable[[Reply], None]
OnEnd = Callable[[Completed | None], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a world is made of."""

    limits: Limits
    faults: Faults
    shapes: tuple[EngineShape, ...]
    roomy: bool = False

    def leases_hold(self) -> bool:
        """Whether a lease keeps its hit whatever else goes on: all slots have one size, so that no
        slab is ever taken for another, and leases don't end for want of room."""
        sizes = {
            -(-shape.layout.part_bytes(part) // 4096) for shape in self.shapes for part in Part
        }
        return len(sizes - {0}) == 1 and self.limits.leases_max > 1000


class World:
    """Drives the core. ``deliver`` is the only way to it, and checks everything after each
    event."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.limits = setting.limits
        self.rng = random.Random(seed)
        self.now = 0.0
        self.story = Story()
        self.disk = Disk()
        self.manifest: tuple[SpaceRecord, ...] = ()
        self.model = Model(setting.limits.lease_s, setting.roomy)
        self.events = 0
        self.life = 0
        self.scanned: set[Place] | None = None
        """What the scan has reported; None once it is done."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ids = count(1)
        self._sessions = count(1)
        self._on_reply: dict[tuple[SessionID, int], OnReply] = {}
        self._on_end: dict[tuple[SessionID, int], OnEnd] = {}
        self._on_close: dict[SessionID, Callable[[], None]] = {}
        self._persists: list[Persist] = []
        self._disturbances = 0
        self._counted: tuple[int, int] | None = None
        self.service: Service
        self.hands: Hands

    # ------------------------------------------------------------ time

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after a while, unless the daemon dies before."""
        life = self.life
        self.at(delay_s, lambda: act() if life == self.life else None)

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after a while, whatever happens to the daemon."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), act))

    def step(self) -> bool:
        """Let the next thing happen; tells whether there was one."""
        if not self._heap:
            return False
        self.now, _, act = heapq.heappop(self._heap)
        act()
        return True

    def run_for(self, seconds: float) -> None:
        """Let this much time pass."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.step()
        self.now = end

    def run_until(self, ready: Callable[[], bool], most_s: float = 3600.0) -> None:
        """Let time pass until something is so; it is an error if that never comes."""
        end = self.now + most_s
        while not ready():
            if self.now > end or not self.step():
                raise SimulationError(f"nothing comes of it: {self.service.stats(self.now)}")

    # ------------------------------------------------------------ the daemon

    def start(self) -> None:
        """Start the daemon on what the disk holds."""
        self.service = Service(self.limits, self.manifest)
        self.hands = Hands(self, self.limits, self.setting.faults, self.disk)
        self._counted = None
        self.scanned = set() if self.limits.nvme else None
        if self.limits.nvme is not None:
            scan(self)
        self._tick()

    def crash(self, limits: Limits | None = None) -> None:
        """The daemon dies and comes back, perhaps with other limits."""
        self.story.note(self.now, f"CRASH, after {self.events} events")
        self.tally()
        self.model.counts["crashes"] += 1
        self.hands.crash()
        self.life += 1
        self._disturbances += 1
        if self._persists and self.rng.random() < 0.5:
            self.manifest = self.rng.choice(self._persists).spaces
        self._persists.clear()
        self.model.restart()
        ends, closes = list(self._on_end.values()), list(self._on_close.values())
        for mapping in (self._on_reply, self._on_end, self._on_close):
            mapping.clear()
        self.limits = limits or self.limits
        self.start()
        for end in ends:
            end(None)
        for close in closes:
            close()

    def tally(self) -> None:
        """Note what this life of the daemon has counted itself."""
        stats = self.service.stats(self.now)
        self.model.counts.update(stats.drops)
        self.model.counts["evictions"] += sum(tier.evictions for tier in stats.tiers)

    def deliver(self, event: Event) -> None:
        """Tell the core something, do what it wants, and check everything."""
        self.events += 1
        self.story.event(self.now, event)
        self._counted = None
        effects = self.service.handle(event, self.now)
        self._counted = None
        for effect in effects:
            self.story.effect(self.now, effect)
            self._do(effect)
        self.service.check_invariants()

    def moved(self, move: Move, event: Moved) -> None:
        """A Move's end arrives."""
        if move.kind is MoveKind.STORE and event.status is MoveStatus.OK and move.target:
            self.model.stored(move, self.hands.arena.contents[move.target].first[0])
        self.model.counts[f"{move.kind.value} {event.status.value}"] += 1
        self.deliver(event)

    def _tick(self) -> None:
        self.deliver(Tick())
        self.later(self.service.next_tick_s(self.now), self._tick)

    # ------------------------------------------------------------ effects

    def _do(self, effect: Effect) -> None:
        match effect:
            case Move():
                self.model.move(effect)
                self._check_write(effect)
                self.hands.start(effect)
            case Reply():
                self._check_hit(effect)
                self.model.reply(effect, self)
                self._tell(effect)
            case Detach(session):
                self.hands.detach(session)
                for ticket in self.model.detach(session):
                    self.returned(ticket)
                for name in [name for name in self._on_end if name[0] == session]:
                    self._on_end.pop(name)(None)
                self._on_close.pop(session, lambda: None)()
            case Persist():
                self._persists.append(effect)
                self.later(self.rng.uniform(0.001, 0.05), self._persist)

    def _check_hit(self, reply: Reply) -> None:
        message = self.model.open.get((reply.session, reply.id))
        if isinstance(reply.body, LookupReply) and isinstance(message, Lookup):
            keys = split(message.keys)[: reply.body.chunks]
            check_hit(self.service, self.model.sessions[reply.session], keys)

    def _tell(self, reply: Reply) -> None:
        name = (reply.session, reply.id)
        act = self._on_reply.pop(name, None)
        if act is not None:
            act(reply)
        end = self._on_end.pop(name, None)
        if end is not None:
            end(reply.body if isinstance(reply.body, Completed) else None)

    def _persist(self) -> None:
        persist = self._persists.pop(0)
        if self.rng.random() < self.setting.faults.persist_fails:
            if self.rng.random() < 0.3:
                self.manifest = persist.spaces
            self.deliver(Persisted(persist.number, "no space left on device"))
            return
        self.manifest = persist.spaces
        self.deliver(Persisted(persist.number))

    def _check_write(self, move: Move) -> None:
        if move.kind is not MoveKind.WRITE or move.target is None:
            return
        head = move.header
        durable = {(s.tenant, s.namespace): s.epoch for s in self.manifest}
        if durable.get((head.tenant, head.namespace)) != head.epoch:
            raise SimulationError(f"Move {move.id} writes for an epoch that isn't durable")
        if self.scanned is not None and move.target not in self.scanned:
            raise SimulationError(f"Move {move.id} writes where the scan hasn't been")

    # ------------------------------------------------------------ sessions

    def connect(self, shape: EngineShape, rank: int | None) -> SessionView:
        """A new connection: a worker's, with memory, or a scheduler's."""
        session = SessionID(next(self._sessions))
        view = SessionView(session, shape, rank or 0)
        if rank is not None:
            view.memory = EngineMemory.of(shape.layout)
            self.hands.attach(session, view.memory)
        self.model.sessions[session] = view
        return view

    def request(
        self,
        session: SessionID,
        message: Message,
        on_reply: OnReply | None = None,
        on_end: OnEnd | None = None,
    ) -> int:
        """Send a request; ``on_end`` is for transfers: their Completed, or None if it was refused
        or the session ended."""
        number = next(self._ids)
        request = Request(session, number, message)
        if on_reply is not None:
            self._on_reply[session, number] = on_reply
        if on_end is not None:
            self._on_end[session, number] = on_end
        if isinstance(message, Clear):
            self.model.open[session, number] = message
            self.model.clear((session, number), message.tenant, message.model)
            self._disturbances += 1
        else:
            self.model.request(request, self)
        self.deliver(request)
        if isinstance(message, Cancel):
            self._check_cancelled(session, message.transfer)
        return number

    def clear(self, tenant: str | None, model: str | None) -> None:
        """The administrator clears."""
        self.request(ADMIN, Clear(tenant, model))

    def close(self, session: SessionID, on_close: Callable[[], None]) -> None:
        """A peer is gone; ``on_close`` follows when its memory has been let go."""
        self.model.close(session)
        self._on_close[session] = on_close
        for name in [name for name in self._on_reply if name[0] == session]:
            del self._on_reply[name]
        self.deliver(SessionClosed(session))
        idle = all(running.move.session != session for running in self.hands.running.values())
        if idle and session not in self.model.detached and not self._goes_on():
            raise SimulationError(f"s{session} isn't detached, though no Move uses its memory")

    def _check_cancelled(self, session: SessionID, transfer: int) -> None:
        """A cancel is acknowledged at once, unless a Move uses the blocks or steps are left."""
        ticket = self.model.tickets.get((session, transfer))
        if self._goes_on():
            return
        if ticket is not None and self.hands.using(session, set(ticket.blocks())) is None:
            raise SimulationError(f"s{session} #{transfer} was cancelled, but isn't completed")

    def _goes_on(self) -> bool:
        """Whether the core has work that it does in steps."""
        return self.service.next_tick_s(self.now) == 0.0

    def returned(self, ticket: TicketView) -> None:
        """A ticket's blocks are the engine's again, which overwrites them at once."""
        if ticket.session.memory is not None:
            ticket.session.memory.give_back(ticket.blocks())

    # ------------------------------------------------------------ what judges need

    def disturbances(self) -> int:
        """A number that changes whenever a chunk may have left for a good reason."""
        return self._counts()[0] + self._disturbances

    def losses(self) -> int:
        """The same for reasons that a lease doesn't hold against: a loss, a clear, and where leases
        may end early, an eviction."""
        both, drops = self._counts()
        return self._disturbances + (drops if self.setting.leases_hold() else both)

    def _counts(self) -> tuple[int, int]:
        """Evictions and disturbing drops together, and the latter alone."""
        if self._counted is None:
            stats = self.service.stats(self.now)
            drops = sum(stats.drops.get(name, 0) for name in DISTURBING)
            self._counted = drops + sum(tier.evictions for tier in stats.tiers), drops
        return self._counted


def shrunk(limits: Limits, rng: random.Random) -> Limits:
    """Limits of the next start: sometimes another size of either tier."""
    host, nvme = limits.host, limits.nvme
    if rng.random() < 0.3:
        host = replace(host, slabs=rng.randint(1, 7))
    if nvme is not None and rng.random() < 0.2:
        nvme = replace(nvme, slabs=rng.randint(1, 8))
    return replace(limits, host=host, nvme=nvme)
