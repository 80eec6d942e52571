"""Hands: a fake mover. It does each Move in two halves, some time apart, and reports how it ended.

What the real hands rely on is checked as each Move starts (rules.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvstore.core.layout import NULL_BLOCK
from kvstore.core.limits import Limits
from kvstore.core.messages import (
    ChunkHeader,
    Move,
    Moved,
    MoveID,
    MoveKind,
    MoveStatus,
    Place,
    SessionID,
    TierName,
)
from tests.sim.device import Device
from tests.sim.errors import SimulationError
from tests.sim.faults import NONE, Fault, Faults
from tests.sim.media import (
    Arena,
    BlockID,
    Content,
    Disk,
    EngineMemory,
    Half,
    Record,
    extent,
)
from tests.sim.node import Node, is_remote
from tests.sim.rules import Running, blocks_of, check_start

FAILURES = {
    MoveKind.STORE: Fault.STORE_FAILS,
    MoveKind.LOAD: Fault.LOAD_FAILS,
    MoveKind.READ: Fault.READ_FAILS,
    MoveKind.WRITE: Fault.WRITE_FAILS,
    MoveKind.ERASE: Fault.ERASE_FAILS,
}


class Clock(Protocol):
    """What hands need of the world: its time and random numbers, and somewhere to report."""

    rng: random.Random
    now: float

    def saw(self, fault: Fault) -> None:
        """A fault occurs."""

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after a while, unless the daemon dies before."""

    def moved(self, ended: Sequence[tuple[Move, Moved]]) -> None:
        """Take the ends of Moves, which come together."""


class Hands:
    """The mover of one daemon's life. ``memories`` are the sessions' as long as they are
    attached."""

    def __init__(self, clock: Clock, limits: Limits, disk: Disk, device: Device) -> None:
        self.disk = disk
        self.arena = Arena(limits.host.slab_bytes)
        self.memories: dict[SessionID, EngineMemory] = {}
        self.running: dict[MoveID, Running] = {}
        self.limits = limits
        self.faults: Faults = NONE
        self.no_growth_until = 0.0
        """No slab file may be made before, as there was no room; ``growing`` were begun by then."""
        self.growing: set[int] = set()
        self.node: Node | None = None
        self._clock = clock
        self._device = device
        self._cuts: dict[tuple[TierName, int], int] = {}
        self._ended: list[Running] = []

    def start(self, move: Move) -> None:
        """Check a Move against everything that runs, then begin it soon."""
        blocks = blocks_of(self, move)
        check_start(self, move, blocks, self._clock.now)
        running = Running(move, blocks, self._fate(move))
        full = running.status is MoveStatus.NO_SPACE and not is_remote(move)
        running.homeless = full and self._is_homeless(move)
        self._note_cut(move.target)
        if self.node is not None and is_remote(move) and move.kind is MoveKind.WRITE:
            self.node.check_write(move, self.arena)
        self.running[move.id] = running
        self._clock.later(self._pause(move) / 4, lambda: self._begin(running))

    def attach(self, session: SessionID, memory: EngineMemory) -> None:
        """Map a session's memory."""
        self.memories[session] = memory

    def detach(self, session: SessionID) -> None:
        """Unmap it: no Move may use it any more."""
        for running in self.running.values():
            if running.move.session == session:
                raise SimulationError(f"Detach s{session} while Move {running.move.id} uses it")
        self.memories.pop(session, None)

    def using(self, session: SessionID, blocks: set[BlockID]) -> Move | None:
        """A Move that still uses one of these blocks."""
        for running in (*self.running.values(), *self._ended):
            if running.move.session == session and not blocks.isdisjoint(running.blocks):
                return running.move
        return None

    def busy(self, session: SessionID) -> bool:
        """Whether a Move uses the session's memory, as far as the core knows."""
        unreported = (*self.running.values(), *self._ended)
        return any(running.move.session == session for running in unreported)

    def crash(self) -> None:
        """The daemon dies: what a write or an erase in flight leaves is up to chance."""
        for running in self.running.values():
            if is_remote(running.move):
                continue
            if running.move.kind is MoveKind.WRITE and not running.ended:
                if not running.begun and self._clock.rng.random() < 0.5:
                    self._begin_write(running)
                if running.begun and self._clock.rng.random() < 0.3:
                    self._end_write(running)
                self._clock.saw(Fault.WRITE_TORN)
            if running.move.kind is MoveKind.ERASE and not running.ended:
                self._clock.saw(Fault.ERASE_CUT_SHORT)
                if self._clock.rng.random() < 0.5:
                    self._erase(running.move)
        self.running.clear()

    def calm(self) -> None:
        """Nothing goes wrong from now on."""
        self.faults = NONE
        for memory in self.memories.values():
            memory.pace, memory.fails = 1.0, 0.0

    # ------------------------------------------------------------ how a Move goes

    def _begin(self, running: Running) -> None:
        running.begun = True
        move = running.move
        match move.kind:
            case MoveKind.STORE:
                memory = self.memories[_session(move)]
                halves = [memory.cells[block][0] for block in running.blocks]
                self.arena.put(_place(move.target), _content(move.header, halves))
            case MoveKind.LOAD:
                self._scatter(running, 0)
            case MoveKind.READ if self.node is not None and is_remote(move):
                self.node.begin_read(running, self.arena)
            case MoveKind.READ:
                record = self.disk.get(_place(move.source))
                halves = list(record.first) if record else []
                self.arena.put(_place(move.target), _content(move.header, halves))
            case MoveKind.WRITE if not is_remote(move):
                self._begin_write(running)
            case MoveKind.WRITE | MoveKind.ERASE:
                pass
        self._clock.later(self._pause(move), lambda: self._end(running))

    def _end(self, running: Running) -> None:
        running.ended = True
        move = running.move
        match move.kind:
            case MoveKind.STORE:
                memory = self.memories[_session(move)]
                content = self.arena.contents[_place(move.target)]
                if running.status is MoveStatus.OK:
                    content.second = [memory.cells[block][1] for block in running.blocks]
                    content.whole = True
                    content.stored_s = self._clock.now
            case MoveKind.LOAD:
                if running.status is MoveStatus.OK:
                    self._scatter(running, 1)
            case MoveKind.READ:
                self._end_read(running)
            case MoveKind.WRITE if self.node is not None and is_remote(move):
                self.node.end_write(running, self.arena)
            case MoveKind.WRITE:
                self._end_write(running)
            case MoveKind.ERASE:
                if running.status is MoveStatus.OK or self._clock.rng.random() < 0.3:
                    self._erase(move)
        self._clock.later(self._pause(move) / 4, lambda: self._report(running))

    def _report(self, running: Running) -> None:
        move = running.move
        del self.running[move.id]
        if any(o.move.kind is move.kind and o.move.id < move.id for o in self.running.values()):
            self._clock.saw(Fault.MOVES_OUT_OF_ORDER)
        if running.status is MoveStatus.NO_SPACE and not is_remote(move):
            self.no_growth_until = self._clock.now + self.limits.nvme_retry_s
            moves = [o.move for o in self.running.values() if not is_remote(o.move)]
            writes = [move for move in moves if move.kind is MoveKind.WRITE]
            self.growing = {_place(one.target).slab for one in writes}
        self._ended.append(running)
        if running.status is MoveStatus.OK and self._clock.rng.random() < 0.4:
            self._clock.later(self._pause(move) / 4, self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        """Report the Moves that have ended and aren't reported yet."""
        ended, self._ended = self._ended, []
        if ended:
            self._clock.moved([(one.move, Moved(one.move.id, one.status)) for one in ended])

    def _scatter(self, running: Running, half: int) -> None:
        move = running.move
        memory = self.memories[_session(move)]
        content = self.arena.contents[_place(move.source)]
        halves = content.first if half == 0 else content.second
        for block, value in zip(running.blocks, halves, strict=True):
            if block[1] != NULL_BLOCK:
                memory.cells[block][half] = value

    def _end_read(self, running: Running) -> None:
        move = running.move
        remote, sequence = is_remote(move), move.header.sequence
        record = running.old if remote else self.disk.get(_place(move.source))
        content = self.arena.contents[_place(move.target)]
        if running.status is MoveStatus.FAILED and remote:
            return
        epoch = move.header.epoch if remote else None if record is None else record.header.epoch
        if record is None or not record.legible or epoch is None:
            running.status = MoveStatus.CORRUPT
        elif replace(record.header, sequence=sequence, epoch=epoch) != move.header:
            running.status = MoveStatus.FOREIGN
            self._clock.saw(Fault.READ_FOREIGN)
        elif record.checksum != (tuple(content.first), tuple(record.second)):
            running.status = MoveStatus.CORRUPT
        if running.status is MoveStatus.CORRUPT and not remote:
            self._clock.saw(Fault.READ_CORRUPT)
        if running.status is MoveStatus.OK and record is not None:
            content.second = list(record.second)
            content.whole = True
            content.stored_s = content.stored_s if remote else record.stored_s

    def _begin_write(self, running: Running) -> None:
        running.begun = True
        move, rng = running.move, self._clock.rng
        running.old = self.disk.get(_place(move.target))
        if running.homeless or (running.status is not MoveStatus.OK and rng.random() < 0.5):
            return
        source = self.arena.contents[_place(move.source)]
        torn: list[Half] = ["torn"] * len(source.first)
        place = _place(move.target)
        record = Record(move.header, place.slot_bytes, list(source.first), torn)
        record.legible = rng.random() < 0.5
        self.disk.put(place, record)

    def _end_write(self, running: Running) -> None:
        move = running.move
        record = self.disk.get(_place(move.target))
        if running.homeless or record is None or record is running.old:
            return
        if running.status is MoveStatus.OK or self._clock.rng.random() < 0.1:
            source = self.arena.contents[_place(move.source)]
            record.second = list(source.second)
            record.stored_s = source.stored_s
            record.checksum = (tuple(record.first), tuple(record.second))
            record.legible = True

    def _erase(self, move: Move) -> None:
        place = _place(move.target)
        self.disk.records.pop((place.slab, extent(place)[0]), None)

    # ------------------------------------------------------------ chance

    def _fate(self, move: Move) -> MoveStatus:
        kind, clock, device = move.kind, self._clock, self._device
        if self.node is not None and is_remote(move):
            return self.node.fate(move)
        memory = None if move.session is None else self.memories.get(move.session)
        chance = self.faults.erase_fails if kind is MoveKind.ERASE else self.faults.move_fails
        if memory is not None and memory.fails:
            clock.saw(Fault.SHARD_FAILS)
            chance = memory.fails
        if clock.rng.random() < chance:
            clock.saw(FAILURES[kind])
            return MoveStatus.FAILED
        if kind is not MoveKind.WRITE:
            return MoveStatus.OK
        if self._is_homeless(move) and not device.has_room(clock.now):
            return MoveStatus.NO_SPACE
        if clock.rng.random() < self.faults.disk_full:
            clock.saw(Fault.WRITE_NO_SPACE)
            return MoveStatus.NO_SPACE
        return MoveStatus.OK

    def _is_homeless(self, move: Move) -> bool:
        """Whether a write needs a slab file that isn't there yet."""
        return _place(move.target).slab not in self.disk.cuts

    def _pause(self, move: Move) -> float:
        rng, clock = self._clock.rng, self._clock
        if self.node is not None and is_remote(move):
            return self.node.pause()
        memory = None if move.session is None else self.memories.get(move.session)
        pace = 1.0 if memory is None else memory.pace
        pause_s = rng.uniform(0.0001, 0.01) * pace
        if pace > 1.0:
            clock.saw(Fault.SHARD_LAGS)
        if rng.random() < self.faults.move_stuck:
            clock.saw(Fault.MOVE_STUCK)
            pause_s = 100.0
        elif rng.random() < self.faults.move_slow:
            clock.saw(Fault.MOVE_SLOW)
            pause_s = rng.uniform(0.1, 2.0)
        return self._device.delay(move.kind, pause_s, clock.now)

    def _note_cut(self, place: Place | None) -> None:
        if place is not None and place.tier is not TierName.REDIS:
            before = self._cuts.get((place.tier, place.slab), place.slot_bytes)
            self._cuts[place.tier, place.slab] = place.slot_bytes
            if before != place.slot_bytes:
                self._clock.saw(Fault.SLAB_CHANGES_OWNER)


def _content(header: ChunkHeader, halves: list[Half]) -> Content:
    return Content(header, halves, ["half done"] * len(halves))


def _place(place: Place | None) -> Place:
    if place is None:
        raise SimulationError("a Move lacks a place")
    return place


def _session(move: Move) -> SessionID:
    if move.session is None:
        raise SimulationError(f"Move {move.id} names no session")
    return move.session
