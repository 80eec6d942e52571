"""Probing: lookups ask the remote tier for what the local ones don't have.

A lookup whose local hit ends early is answered PENDING once, and again when its probe has ended or
``probe_s`` has passed: then its local answer stands. Lookups that ask for the same keys share one
probe, and what it found is remembered for the next ones, also when it came too late. Nothing waits
for a tier that is down, and whatever would pass a limit gets its local answer at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.core.answers import Answers, Found, Remote
from kvstore.core.engines import Engine, Session
from kvstore.core.errors import InvariantError
from kvstore.core.keys import KEY_BYTES
from kvstore.core.layout import Part
from kvstore.core.limits import RemoteLimits
from kvstore.core.messages import HitStatus, Lookup, LookupReply
from kvstore.core.remote_messages import Probe, Probed
from kvstore.core.spaces import Space
from kvstore.core.state import State

STEP_WAITERS = 32
"""Lookups that one event answers after they have waited."""
_EXPIRE_MAX = 200


@dataclass(frozen=True, slots=True)
class Range:
    """What a lookup would have probed: ``keys`` from depth ``first`` on, of whose chunks the first
    ``local`` are in local tiers."""

    space: Space
    first: int
    keys: bytes
    local: int
    parts: tuple[Part, ...]

    def name(self) -> tuple[Space, int, bytes]:
        """What is the same for the same keys."""
        return self.space, self.first, self.keys[-KEY_BYTES:]


@dataclass(slots=True, eq=False)
class _Out:
    """A probe, and who waits for it; ``late`` once somebody no longer does, ``ended`` once it was
    answered."""

    asked: Range
    waiters: list[Waiter] = field(default_factory=list)
    late: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A lookup that is pending, until the probe that is ``out`` for it ends."""

    session: Session
    number: int
    message: Lookup
    deadline_s: float
    out: _Out


class Probing:
    """Probes for lookups, those that wait for one, and what is remembered of them. ``answer``
    answers a lookup that has waited."""

    def __init__(self, state: State, answer: Callable[[Waiter], None]) -> None:
        self.hits = self.misses = 0
        self.probes = self.failed = self.timed_out = self.late = self.remembered = 0
        self._state = state
        self._answer = answer
        self._limits = state.limits.remote or RemoteLimits()
        self._answers = Answers(self._limits)
        self._out: dict[int, _Out] = {}
        self._open: dict[tuple[Space, int, bytes], _Out] = {}
        self._waiting: OrderedDict[tuple[int, str], Waiter] = OrderedDict()
        self._waiting_bytes = 0
        self._due: deque[Waiter] = deque()

    # ------------------------------------------------------------ lookups

    def range(self, engine: Engine, space: Space, keys: bytes, local: int) -> Range:
        """What a lookup of ``keys``, of whose chunks the FULL parts of [0, ``local``) are in local
        tiers, would probe: what is missing, and the WINDOW parts that a hit from there on needs."""
        parts = (Part.FULL, Part.WINDOW) if engine.window_chunks else (Part.FULL,)
        first = max(0, local - engine.window_chunks)
        most = max(1, self._limits.probe_names_max // (space.shards * len(parts)))
        cut = keys[first * KEY_BYTES : (first + most) * KEY_BYTES]
        return Range(space, first, cut, local - first, parts)

    def known(self, asked: Range) -> Found | None:
        """What is remembered of it; None where nothing is, or not enough."""
        return self._answers.get(asked.space, asked.keys, asked.local, self._state.now)

    def ask(self, session: Session, number: int, message: Lookup, asked: Range) -> bool:
        """Have a lookup wait for its probe, which may be out already; False: it gets its local
        answer now."""
        limits, size = self._limits, len(message.keys)
        full = len(self._waiting) >= limits.waiters_max
        if full or self._waiting_bytes + size > limits.waiting_bytes_max:
            return False
        out = self._open.get(asked.name()) or self._probe(asked)
        if out is None or out.late:
            return False
        waiter = Waiter(session, number, message, self._state.now + limits.probe_s, out)
        self._waiting[session.id, message.request] = waiter
        self._waiting_bytes += size
        out.waiters.append(waiter)
        return True

    def finish(self, session: Session, request: str) -> None:
        """The session asks anew: a lookup of the request that is pending gets its answer now."""
        waiter = self._waiting.get((session.id, request))
        if waiter is not None:
            self._take(waiter)
            self._answer(waiter)

    def forget(self, session: Session, request: str) -> None:
        """The session doesn't want the answer any more; what it was promised is a miss."""
        waiter = self._waiting.get((session.id, request))
        if waiter is not None:
            self._take(waiter)
            miss = LookupReply(HitStatus.MISS, 0)
            self._state.reply(session.id, waiter.number, miss)

    def deny(self, part: Remote) -> None:
        """A part of what was found couldn't be read."""
        self._answers.deny(part, self._state.now)

    # ------------------------------------------------------------ what happens

    def probed(self, event: Probed) -> bool:
        """A probe has ended; False where it is none of a lookup's."""
        out = self._out.pop(event.id, None)
        if out is None:
            return False
        asked, out.ended = out.asked, True
        if self._open.get(asked.name()) is out:
            del self._open[asked.name()]
        self.failed += bool(event.error)
        self.late += out.late and not event.error
        if event.error:
            self._remember_nothing(asked)
        elif asked.space.alive:
            asked.space.saw_fleet_epoch(event.epoch)
            found = Found(asked.first, event.epoch, *event.found)
            self._answers.put(asked.space, asked.keys, found, asked.local, self._state.now)
        waiters, out.waiters = out.waiters, []  # they know it: no cycle may be left
        self._due.extend(waiters)
        self.step()
        return True

    def down(self) -> None:
        """The tier can't be used: all who wait get their local answers."""
        self._due.extend(self._waiting.values())
        self.step()

    def close(self, session: Session) -> None:
        """A session is lost: it is told nothing any more."""
        for waiter in [w for w in self._waiting.values() if w.session is session]:
            self._take(waiter)

    def running(self) -> bool:
        """Whether lookups are left to be answered, at the next Tick."""
        return bool(self._due)

    def step(self) -> None:
        """Answer some lookups that have waited."""
        for _ in range(min(STEP_WAITERS, len(self._due))):
            waiter = self._due.popleft()
            if self._is_waiting(waiter):
                self._take(waiter)
                self._answer(waiter)

    def next_deadline_s(self) -> float | None:
        """When the next lookup has waited long enough."""
        waiter = next(iter(self._waiting.values()), None)
        return None if waiter is None else waiter.deadline_s

    def tick(self) -> None:
        """Those who have waited long enough get their local answers."""
        now = self._state.now
        for _ in range(STEP_WAITERS):
            waiter = next(iter(self._waiting.values()), None)
            if waiter is None or now < waiter.deadline_s:
                break
            self._take(waiter)
            if not waiter.out.ended:
                self.timed_out += 1
                if not waiter.out.late:
                    waiter.out.late = True
                    self._remember_nothing(waiter.out.asked)
            self._answer(waiter)
        self._answers.expire(now, _EXPIRE_MAX)

    def waiting(self) -> int:
        """Lookups that are pending."""
        return len(self._waiting)

    def check(self) -> None:
        """Raise InvariantError unless all that wait can be answered, and their keys add up."""
        waiters = self._waiting.values()
        if sum(len(waiter.message.keys) for waiter in waiters) != self._waiting_bytes:
            raise InvariantError("keys of pending lookups don't add up")
        out = set(map(id, self._out.values()))
        for waiter in waiters:
            if waiter.session.closing or not (waiter.out.ended or id(waiter.out) in out):
                raise InvariantError(f"lookup {waiter.number} is pending for nothing")
        if not {id(one) for one in self._open.values()} <= out:
            raise InvariantError("a probe that has ended may still be joined")

    # ------------------------------------------------------------ private

    def _probe(self, asked: Range) -> _Out | None:
        """Send a probe; None where too many are out."""
        if len(self._out) >= self._limits.probes_max:
            return None
        out, number, space = _Out(asked), self._state.next_probe(), asked.space
        self._out[number] = self._open[asked.name()] = out
        self.probes += 1
        shards = tuple(range(space.shards))
        self._state.effects.append(
            Probe(number, space.tenant, space.namespace, asked.keys, shards, asked.parts)
        )
        return out

    def _remember_nothing(self, asked: Range) -> None:
        """No answer came in time, or none at all: for a moment that counts as none there."""
        if asked.space.alive:
            none = bytes(len(asked.keys) // KEY_BYTES)
            windows = none if Part.WINDOW in asked.parts else b""
            found = Found(asked.first, 0, none, windows)
            self._answers.put(asked.space, asked.keys, found, asked.local, self._state.now)

    def _is_waiting(self, waiter: Waiter) -> bool:
        return self._waiting.get((waiter.session.id, waiter.message.request)) is waiter

    def _take(self, waiter: Waiter) -> None:
        del self._waiting[waiter.session.id, waiter.message.request]
        self._waiting_bytes -= len(waiter.message.keys)
