"""World: one daemon with its disk, its engines and a virtual clock, all from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count

from kvstore.core.errors import InvariantError, KVStoreError
from kvstore.core.limits import Limits
from kvstore.core.messages import (
    ADMIN,
    AllMoved,
    Clear,
    Cleared,
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
from kvstore.core.remote_messages import (
    Probe,
    RemoteClear,
    RemoteCleared,
    RemoteEnter,
    RemoteState,
)
from kvstore.core.service import Service
from tests.sim.device import Device
from tests.sim.duties import check_answered, check_room, check_write, refused_for_room
from tests.sim.errors import SimulationError
from tests.sim.faults import NONE, Fault
from tests.sim.fleet import Fleet
from tests.sim.hands import Hands
from tests.sim.inside import check_hit, clears_in_steps
from tests.sim.media import Disk, EngineMemory
from tests.sim.model import Model, is_pending
from tests.sim.node import Node, is_remote
from tests.sim.scan import scan
from tests.sim.setting import Setting
from tests.sim.shapes import EngineShape
from tests.sim.story import Story
from tests.sim.timeline import Alarm, Timeline
from tests.sim.views import SessionView, SpaceKey, TicketView, split

BUGS = (KVStoreError, InvariantError, AssertionError, ArithmeticError, AttributeError,
        LookupError, TypeError, ValueError, RuntimeError)  # fmt: skip
"""What a broken core may raise."""
DISTURBING = ("corrupt", "key_collision", "read_failed", "load_failed", "cleared", "redis_lost",
              "redis_read_failed", "redis_down")  # fmt: skip
"""Drops after which a chunk may be missing for a good reason."""

OnReply = Callable[[Reply], None]
OnEnd = Callable[[Completed | None], None]


class World:
    """Drives the core. ``deliver`` is the only way to it, and checks everything after each
    event."""

    def __init__(
        self,
        setting: Setting,
        seed: int,
        timeline: Timeline | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self.setting = setting
        self.limits = setting.limits
        self.rng = random.Random(seed)
        self.timeline = timeline or Timeline()
        self.fleet = fleet
        self.story = Story()
        self.faults = setting.faults
        self.disk = Disk()
        self.device = Device(self.rng, self.saw)
        self.manifest: tuple[SpaceRecord, ...] = ()
        remote = setting.limits.remote
        wait_s = 0.0 if remote is None else remote.probe_s + 0.001
        self.model = Model(setting.limits.lease_s, setting.roomy, wait_s)
        if fleet is not None:
            self.model.newest = fleet.newest
        self.events = 0
        self.life = 0
        self.scanned: set[Place] | None = None
        """What the scan has reported; None once it is done."""
        self._ids = count(1)
        self._sessions = count(1)
        self._on_reply: dict[tuple[SessionID, int], OnReply] = {}
        self._on_end: dict[tuple[SessionID, int], OnEnd] = {}
        self._on_close: dict[SessionID, Callable[[], None]] = {}
        self._persists: list[Persist] = []
        self._disturbances = 0
        self._counted: tuple[int, int] | None = None
        self.alarm = Alarm(self.timeline, self._tick)
        self.service: Service
        self.hands: Hands
        self.node: Node | None = None

    @property
    def now(self) -> float:
        """The time."""
        return self.timeline.now

    # ------------------------------------------------------------ time

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after a while, unless the daemon dies before."""
        life = self.life
        self.at(delay_s, lambda: act() if life == self.life else None)

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after a while, whatever happens to the daemon."""
        self.timeline.at(delay_s, act)

    def run_for(self, seconds: float) -> None:
        """Let this much time pass."""
        self.timeline.run_for(seconds)

    def run_until(self, ready: Callable[[], bool], most_s: float = 3600.0) -> None:
        """Let time pass until something is so; it is an error if that never comes."""
        end = self.now + most_s
        while not ready():
            if self.now > end or not self.timeline.step():
                raise SimulationError(f"nothing comes of it: {self.service.stats(self.now)}")

    # ------------------------------------------------------------ the daemon

    def start(self) -> None:
        """Start the daemon on what the disk holds."""
        self.service = Service(self.limits, self.manifest)
        self.hands = Hands(self, self.limits, self.disk, self.device)
        self.hands.faults = self.faults
        if self.fleet is not None:
            self.node = self.hands.node = Node(self, self.fleet)
            self.node.open()
        self._counted = None
        self.scanned = set() if self.limits.nvme else None
        if self.limits.nvme is not None:
            scan(self)
        self._tick()

    def crash(self, limits: Limits | None = None) -> None:
        """The daemon dies and comes back, perhaps with other limits."""
        self.alarm.stop()
        self.alarm = Alarm(self.timeline, self._tick)
        self.story.note(self.now, f"CRASH, after {self.events} events")
        self.tally()
        self.hands.crash()
        self.life += 1
        self._disturbances += 1
        if self._persists and self.rng.random() < 0.5:
            self.manifest = self.rng.choice(self._persists).spaces
            self.saw(Fault.MANIFEST_KEPT)
        elif self._persists:
            self.saw(Fault.MANIFEST_LOST)
        self._persists.clear()
        self.model.restart()
        ends, closes = list(self._on_end.values()), list(self._on_close.values())
        for mapping in (self._on_reply, self._on_end, self._on_close):
            mapping.clear()
        if limits is not None and limits != self.limits:
            self.saw(Fault.TIER_RESIZED)
        self.limits = limits or self.limits
        self.start()
        for end in ends:
            end(None)
        for close in closes:
            close()

    def is_delicate(self) -> bool:
        """Whether a crash now would cut something rare short: a manifest, or an erase."""
        kinds = {running.move.kind for running in self.hands.running.values()}
        return bool(self._persists) or MoveKind.ERASE in kinds

    def tally(self) -> None:
        """Note what this life of the daemon has counted itself."""
        stats = self.service.stats(self.now)
        self.model.counts.update(stats.drops)
        self.model.counts[Fault.SESSION_LIMIT.name] += stats.drops.get("session_limit", 0)
        if stats.remote is not None:
            self.model.counts[Fault.PROBE_LATE.name] += stats.remote.late
        self.model.counts["evictions"] += sum(tier.evictions for tier in stats.tiers)

    def saw(self, fault: Fault) -> None:
        """A fault occurs."""
        self.model.counts[fault.name] += 1

    def calm(self) -> None:
        """Nothing goes wrong from now on."""
        self.faults = NONE
        self.device.calm()
        self.hands.calm()
        if self.node is not None:
            self.node.calm()

    def deliver(self, event: Event) -> None:
        """Tell the core something, do what it wants, and check everything."""
        self.events += 1
        self.story.event(self.now, event)
        self._disturbances += clears_in_steps(self.service) or isinstance(
            event, RemoteState | RemoteCleared
        )
        effects = self.service.handle(event, self.now)
        self._counted = None
        idle = isinstance(event, Tick) and not effects
        self.model.counts["idle ticks" if idle else "events"] += 1
        for effect in effects:
            self.story.effect(self.now, effect)
            self._do(effect)
        if not idle or self.events % 5 == 0:
            self.service.check_invariants()
        if self.fleet is not None:
            self.alarm.set(self.service.next_tick_s(self.now))

    def moved(self, ended: Sequence[tuple[Move, Moved]]) -> None:
        """The ends of Moves arrive."""
        for move, event in ended:
            if move.kind is MoveKind.STORE and event.status is MoveStatus.OK and move.target:
                self.model.stored(move, self.hands.arena.contents[move.target].first[0])
            remote = "remote " if is_remote(move) else ""
            self.model.counts[f"{remote}{move.kind.value} {event.status.value}"] += 1
        self.deliver(ended[0][1] if len(ended) == 1 else AllMoved(tuple(e for _, e in ended)))

    def _tick(self) -> None:
        self.deliver(Tick())
        if self.fleet is None:
            self.later(self.service.next_tick_s(self.now), self._tick)

    # ------------------------------------------------------------ effects

    def _do(self, effect: Effect) -> None:
        match effect:
            case Move():
                self.model.move(effect)
                check_write(effect, self.manifest, self.scanned)
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
            case Probe() | RemoteEnter() | RemoteClear() if self.node is not None:
                self.node.effect(effect)
            case _:
                raise SimulationError(f"{effect} without a remote tier")

    def _check_hit(self, reply: Reply) -> None:
        message = self.model.open.get((reply.session, reply.id))
        if isinstance(reply.body, LookupReply) and isinstance(message, Lookup):
            keys = split(message.keys)[: reply.body.chunks]
            check_hit(self.service, self.model.sessions[reply.session], message.request, keys)

    def _tell(self, reply: Reply) -> None:
        name = (reply.session, reply.id)
        act = self._on_reply.get(name)
        if not is_pending(reply.body):
            self._on_reply.pop(name, None)
        if act is not None:
            act(reply)
        end = self._on_end.pop(name, None)
        if end is not None:
            end(reply.body if isinstance(reply.body, Completed) else None)

    def _persist(self) -> None:
        persist = self._persists.pop(0)
        if self.rng.random() < self.faults.persist_fails:
            self.saw(Fault.MANIFEST_FAILS)
            if self.rng.random() < 0.3:
                self.manifest = persist.spaces
            self.deliver(Persisted(persist.number, "no space left on device"))
            return
        self.manifest = persist.spaces
        self.deliver(Persisted(persist.number))

    # ------------------------------------------------------------ sessions

    def connect(self, shape: EngineShape, rank: int | None) -> SessionView:
        """A new connection: a worker's, with memory, or a scheduler's."""
        session = SessionID(next(self._sessions))
        view = SessionView(session, shape, rank or 0)
        if rank is not None:
            view.memory = EngineMemory.of(shape.layout)
            if self.rng.random() < self.faults.sick_rank and len(shape.shards) > 1:
                view.memory.pace = self.rng.choice((1.0, 30.0))
                view.memory.fails = 0.0 if view.memory.pace > 1.0 else 0.5
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
            if self.hands.running:
                self.saw(Fault.CLEARED_IN_TRANSFER)
        else:
            self.model.request(request, self)
        refused = refused_for_room(self.service)
        self.deliver(request)
        check_answered(self, (session, number), message)
        if session in self.model.sessions:
            check_room(self.service, self.model.sessions[session], message, refused)
        return number

    def clear(self, tenant: str | None, model: str | None) -> None:
        """The administrator clears."""
        self.request(ADMIN, Clear(tenant, model))

    def close(self, session: SessionID, on_close: Callable[[], None]) -> None:
        """A peer is gone; ``on_close`` follows when its memory has been let go."""
        self.saw(Fault.PEER_LOST)
        if self.hands.busy(session):
            self.saw(Fault.PEER_LOST_IN_TRANSFER)
        self.model.close(session)
        self._on_close[session] = on_close
        for name in [name for name in self._on_reply if name[0] == session]:
            del self._on_reply[name]
        self.deliver(SessionClosed(session))
        idle = not (self.hands.busy(session) or self.goes_on())
        if idle and session not in self.model.detached:
            raise SimulationError(f"s{session} isn't detached, though no Move uses its memory")

    def goes_on(self) -> bool:
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

    def raised(self, body: Cleared) -> dict[SpaceKey, int]:
        """The fleet's epochs that a clear has raised."""
        number = 0 if body.remote is None else body.remote.number
        return {} if self.node is None else self.node.raised.pop(number, {})

    def losses(self) -> int:
        """The same for reasons that a lease doesn't hold against: a loss, a clear, and where leases
        may end early, an eviction."""
        if self.fleet is not None and not self.setting.leases_hold():
            return self.events  # nothing but its lease keeps what a lookup was promised from there
        both, drops = self._counts()
        return self._disturbances + (drops if self.setting.leases_hold() else both)

    def _counts(self) -> tuple[int, int]:
        """Evictions and disturbing drops together, and the latter alone."""
        if self._counted is None:
            stats = self.service.stats(self.now)
            drops = sum(stats.drops.get(name, 0) for name in DISTURBING)
            self._counted = drops + sum(tier.evictions for tier in stats.tiers), drops
        return self._counted
