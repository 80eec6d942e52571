"""Node: one world's way to the remote tier that worlds share: its probes, reads and writes, its
circuit breaker, and how they fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from kvstore.core.limits import Limits
from kvstore.core.messages import Event, Move, MoveKind, MoveStatus, Place, TierName
from kvstore.core.remote_messages import (
    Probe,
    Probed,
    RemoteClear,
    RemoteCleared,
    RemoteEffect,
    RemoteEnter,
    RemoteState,
)
from kvstore.core.service import Service
from tests.sim.errors import SimulationError
from tests.sim.faults import Fault
from tests.sim.fleet import Fleet, name_of
from tests.sim.media import Arena, Content, Record
from tests.sim.rules import Running
from tests.sim.views import SpaceKey


class Daemon(Protocol):
    """What a node needs of its world."""

    rng: random.Random
    now: float
    limits: Limits
    service: Service

    def saw(self, fault: Fault) -> None:
        """A fault occurs."""

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after a while, unless the daemon dies before."""

    def deliver(self, event: Event) -> None:
        """Tell the core something."""


class Node:
    """One daemon's life at the remote tier. ``up`` is what the core was told last."""

    def __init__(self, world: Daemon, fleet: Fleet) -> None:
        self.fleet = fleet
        self.up = False
        self.raised: dict[int, dict[SpaceKey, int]] = {}
        """What each clear raised, by its number."""
        self.out = 0
        """Probes and clears that aren't answered yet."""
        self._told: dict[SpaceKey, list[tuple[int, float]]] = {}
        """The epochs of a namespace that the core was told, and when."""
        self._world = world
        self._down_until = 0.0

    def open(self) -> None:
        """The daemon has started: it is connected soon."""
        self._world.later(self._world.rng.uniform(0.0, 0.2), self._look)

    def go_down(self, seconds: float) -> None:
        """The servers can't be reached from here for a while."""
        self._down_until = self._world.now + seconds
        self._world.later(self._world.rng.uniform(0.0, 0.3), self._look)
        self._world.later(seconds + self._world.rng.uniform(0.001, 0.3), self._look)

    def calm(self) -> None:
        """It is up from now on."""
        self._down_until = 0.0
        self._look()

    def effect(self, effect: RemoteEffect) -> None:
        """Do what the core wants."""
        if not self.up:
            raise SimulationError(f"{effect} while the remote tier is down")
        world, rng = self._world, self._world.rng
        if isinstance(effect, RemoteEnter):
            self.fleet.entered[effect.tenant, effect.namespace] = effect
            return
        self.out += 1
        if isinstance(effect, Probe):
            self._check_probe(effect)
            space = self._space(effect)
            world.later(self._pause(), lambda: self._probe(effect, space))
        elif isinstance(effect, RemoteClear):
            world.later(rng.uniform(0.001, 0.05), lambda: self._clear(effect))

    # ------------------------------------------------------------ Moves

    def fate(self, move: Move) -> MoveStatus:
        """How a Move will end, as far as chance has it."""
        if not self.up:
            raise SimulationError(f"Move {move.id} while the remote tier is down")
        rng, faults = self._world.rng, self.fleet.faults
        if self._is_down() or rng.random() < faults.move_fails:
            read = move.kind is MoveKind.READ
            self._world.saw(Fault.REDIS_READ_FAILS if read else Fault.REDIS_WRITE_FAILS)
            return MoveStatus.FAILED
        if move.kind is MoveKind.WRITE and self._world.now < self.fleet.full_until:
            self._world.saw(Fault.REDIS_FULL)
            return MoveStatus.NO_SPACE
        return MoveStatus.OK

    def pause(self) -> float:
        """How long a step of a Move takes."""
        return self._pause()

    def begin_read(self, running: Running, arena: Arena) -> None:
        """The value is on its way, as it is now."""
        move = running.move
        running.old = self.fleet.values.get(name_of(move.header, _end(move)))
        if running.old is not None:
            old = running.old
            running.old = Record(
                old.header, 0, list(old.first), list(old.second), old.checksum, old.legible
            )
        halves = [] if running.old is None else list(running.old.first)
        target = move.target
        if target is None:
            raise SimulationError(f"Move {move.id} lacks a target")
        head, epoch = move.header, _end(move).slab
        told = self._told.get((head.tenant, head.namespace), [])
        content = Content(head, halves, ["half done"] * len(halves))
        if all(epoch >= other for other, _ in told):  # else it has been cleared since
            content.stored_s = self._world.now
        arena.put(target, content)

    def end_write(self, running: Running, arena: Arena) -> None:
        """The value is stored; also where the answer was lost."""
        move = running.move
        stored = running.status is MoveStatus.OK
        if running.status is MoveStatus.FAILED and not self._is_down():
            stored = self._world.rng.random() < 0.3
        if not stored or move.source is None:
            return
        content = arena.contents[move.source]
        first, second = list(content.first), list(content.second)
        record = Record(move.header, 0, first, second, (tuple(first), tuple(second)))
        self.fleet.put(name_of(move.header, _end(move)), record)

    def check_write(self, move: Move, arena: Arena) -> None:
        """What was here when the core was told an older epoch has been cleared since, by some node:
        it must not be written under the new one."""
        head, source = move.header, move.source
        if source is None:
            return
        told = self._told.get((head.tenant, head.namespace), [])
        new_s = min((at_s for epoch, at_s in told if epoch >= _end(move).slab), default=0.0)
        older_s = [min(at_s, new_s) for epoch, at_s in told if epoch < _end(move).slab]
        if older_s and arena.contents[source].stored_s < max(older_s):
            raise SimulationError(f"Move {move.id} shares what another node has cleared")

    # ------------------------------------------------------------ private

    def _is_down(self) -> bool:
        return self._world.now < self._down_until

    def _look(self) -> None:
        """The circuit breaker notices how things are."""
        up = not self._is_down()
        if up is not self.up:
            self.up = up
            self._world.saw(Fault.REDIS_UP if up else Fault.REDIS_DOWN)
            self._world.deliver(RemoteState(up))

    def _pause(self) -> float:
        rng, world = self._world.rng, self._world
        pause_s = rng.uniform(0.0002, self.fleet.pause_s)
        if world.now < self.fleet.slow_until:
            world.saw(Fault.REDIS_SLOW)
            pause_s *= rng.uniform(5, 200)
        return pause_s

    def _probe(self, probe: Probe, space: object) -> None:
        """A probe arrives at the servers; its answer takes as long again."""
        epoch, found = self.fleet.probe(probe)
        error = ""
        if self._is_down() or self._world.rng.random() < self.fleet.faults.probe_fails:
            self._world.saw(Fault.PROBE_FAILS)
            epoch, found, error = 0, (), "connection reset"
        answer = Probed(probe.id, epoch, found, error)
        self._world.later(self._pause(), lambda: self._probed(answer, probe, space))

    def _probed(self, event: Probed, probe: Probe, space: object) -> None:
        self.out -= 1
        if not event.error and self._space(probe) is space:
            told = self._told.setdefault((probe.tenant, probe.namespace), [])
            told.append((event.epoch, self._world.now))
        self._world.deliver(event)

    def _space(self, probe: Probe) -> object:
        """The core's namespace of this name, which a clear replaces."""
        return self._world.service._state.spaces.find(probe.tenant, probe.namespace)

    def _clear(self, clear: RemoteClear) -> None:
        rng = self._world.rng
        fails = self._is_down() or rng.random() < self.fleet.faults.clear_fails
        raised = self.fleet.clear(clear) if not fails or rng.random() < 0.3 else {}
        if fails:
            self._world.saw(Fault.REDIS_CLEAR_FAILS)
        else:
            self.raised[clear.number] = raised

        def ended() -> None:
            self.out -= 1
            error = "timed out" if fails else ""
            self._world.deliver(RemoteCleared(clear.number, len(raised), error))

        self._world.later(self._pause(), ended)

    def _check_probe(self, probe: Probe) -> None:
        remote = self._world.limits.remote
        names = len(probe.keys) // 32 * len(probe.shards) * len(probe.parts)
        least = len(probe.shards) * len(probe.parts)
        if remote is None or names > max(remote.probe_names_max, least, 128) or not names:
            raise SimulationError(f"probe {probe.id} asks for {names} values")


def is_remote(move: Move) -> bool:
    """Whether a Move is from or to the remote tier."""
    return any(end is not None and end.tier is TierName.REDIS for end in (move.source, move.target))


def _end(move: Move) -> Place:
    place = move.source if move.kind is MoveKind.READ else move.target
    if place is None:
        raise SimulationError(f"Move {move.id} lacks a place")
    return place
