"""Hands: a fake mover. It does each Move in two halves, some time apart, and reports how it ended.

It also watches what the real hands rely on: that each Move lies within its tier, reads what is
whole, writes where no other Move is, and never touches a session that was detached.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from kvstore.core.keys import NO_PARENT
from kvstore.core.layout import NULL_BLOCK, Layout, Part
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
from tests.sim.errors import SimulationError
from tests.sim.faults import Faults
from tests.sim.media import (
    Arena,
    BlockID,
    Content,
    Disk,
    EngineMemory,
    Half,
    Record,
    extent,
    overlap,
    unpack,
)

ALIGN_BYTES = 4096
LANES = {
    MoveKind.STORE: "copies",
    MoveKind.LOAD: "copies",
    MoveKind.READ: "reads",
    MoveKind.WRITE: "writes",
    MoveKind.ERASE: "writes",
}


class Clock(Protocol):
    """What hands need of the world: its random numbers, later, and somewhere to report."""

    rng: random.Random

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after a while, unless the daemon dies before."""

    def moved(self, move: Move, event: Moved) -> None:
        """Take a Move's end."""


@dataclass(slots=True)
class Running:
    """A Move in the hands, and how far it is."""

    move: Move
    blocks: list[BlockID]
    status: MoveStatus
    begun: bool = False
    ended: bool = False
    old: Record | None = None


class Hands:
    """The mover of one daemon's life. ``memories`` are the sessions' as long as they are
    attached."""

    def __init__(self, clock: Clock, limits: Limits, faults: Faults, disk: Disk) -> None:
        self.disk = disk
        self.arena = Arena(limits.host.slab_bytes)
        self.memories: dict[SessionID, EngineMemory] = {}
        self.running: dict[MoveID, Running] = {}
        self.faults = faults
        self._clock = clock
        self._limits = limits
        self._moves = 0

    def start(self, move: Move) -> None:
        """Check a Move against everything that runs, then begin it soon."""
        self._moves += 1
        if move.id in self.running:
            raise SimulationError(f"Move {move.id} was handed out twice")
        running = Running(move, self._blocks(move), self._fate(move.kind))
        self._check_shape(move)
        self._check_depth(move.kind)
        for other in self.running.values():
            self._check_race(move, running.blocks, other)
        self._check_source(move)
        self.running[move.id] = running
        self._clock.later(self._pause() / 4, lambda: self._begin(running))

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
        for running in self.running.values():
            if running.move.session == session and not blocks.isdisjoint(running.blocks):
                return running.move
        return None

    def crash(self) -> None:
        """The daemon dies: what a write or an erase in flight leaves is up to chance."""
        for running in self.running.values():
            if running.move.kind is MoveKind.WRITE and not running.ended:
                if not running.begun and self._clock.rng.random() < 0.5:
                    self._begin_write(running)
                if running.begun and self._clock.rng.random() < 0.3:
                    self._end_write(running)
            if running.move.kind is MoveKind.ERASE and self._clock.rng.random() < 0.5:
                self._erase(running.move)
        self.running.clear()

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
            case MoveKind.READ:
                record = self.disk.get(_place(move.source))
                halves = list(record.first) if record else []
                self.arena.put(_place(move.target), _content(move.header, halves))
            case MoveKind.WRITE:
                self._begin_write(running)
            case MoveKind.ERASE:
                pass
        self._clock.later(self._pause(), lambda: self._end(running))

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
            case MoveKind.LOAD:
                if running.status is MoveStatus.OK:
                    self._scatter(running, 1)
            case MoveKind.READ:
                self._end_read(running)
            case MoveKind.WRITE:
                self._end_write(running)
            case MoveKind.ERASE:
                if running.status is MoveStatus.OK or self._clock.rng.random() < 0.3:
                    self._erase(move)
        self._clock.later(self._pause() / 4, lambda: self._report(running))

    def _report(self, running: Running) -> None:
        del self.running[running.move.id]
        self._clock.moved(running.move, Moved(running.move.id, running.status))

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
        record = self.disk.get(_place(move.source))
        content = self.arena.contents[_place(move.target)]
        if record is None or not record.legible:
            running.status = MoveStatus.CORRUPT
        elif replace(record.header, sequence=move.header.sequence) != move.header:
            running.status = MoveStatus.FOREIGN
        elif record.checksum != (tuple(content.first), tuple(record.second)):
            running.status = MoveStatus.CORRUPT
        if running.status is MoveStatus.OK and record is not None:
            content.second = list(record.second)
            content.whole = True

    def _begin_write(self, running: Running) -> None:
        running.begun = True
        move, rng = running.move, self._clock.rng
        running.old = self.disk.get(_place(move.target))
        if running.status is not MoveStatus.OK and rng.random() < 0.5:
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
        if record is None or record is running.old:
            return
        if running.status is MoveStatus.OK or self._clock.rng.random() < 0.1:
            source = self.arena.contents[_place(move.source)]
            record.second = list(source.second)
            record.checksum = (tuple(record.first), tuple(record.second))
            record.legible = True

    def _erase(self, move: Move) -> None:
        place = _place(move.target)
        self.disk.records.pop((place.slab, extent(place)[0]), None)

    # ------------------------------------------------------------ chance

    def _fate(self, kind: MoveKind) -> MoveStatus:
        rng = self._clock.rng
        if kind is MoveKind.ERASE:
            return MoveStatus.FAILED if rng.random() < self.faults.erase_fails else MoveStatus.OK
        if rng.random() < self.faults.move_fails:
            return MoveStatus.FAILED
        if kind is MoveKind.WRITE and rng.random() < self.faults.disk_full:
            return MoveStatus.NO_SPACE
        return MoveStatus.OK

    def _pause(self) -> float:
        rng = self._clock.rng
        if rng.random() < self.faults.move_stuck:
            return 100.0
        if rng.random() < self.faults.move_slow:
            return rng.uniform(0.1, 2.0)
        return rng.uniform(0.0001, 0.01)

    # ------------------------------------------------------------ what hands rely on

    def _blocks(self, move: Move) -> list[BlockID]:
        """The Move's blocks in canonical order, checked against the session's layout."""
        if move.kind not in (MoveKind.STORE, MoveKind.LOAD):
            if move.blocks or move.session is not None:
                raise SimulationError(f"Move {move.id} {move.kind.value} names engine memory")
            return []
        session = _session(move)
        memory = self.memories.get(session)
        if memory is None:
            raise SimulationError(f"Move {move.id} for s{session}, which isn't attached")
        blocks = unpack(move.blocks)
        expected = expected_blocks(memory.layout, move.header.part)
        if [group for group, _ in blocks] != expected:
            raise SimulationError(f"Move {move.id}: blocks don't fit the part's groups")
        nulls = any(block == NULL_BLOCK for _, block in blocks)
        if nulls and move.kind is MoveKind.STORE:
            raise SimulationError(f"Move {move.id}: STORE of a null block")
        return blocks

    def _check_shape(self, move: Move) -> None:
        tiers = {
            MoveKind.STORE: (None, TierName.HOST),
            MoveKind.LOAD: (TierName.HOST, None),
            MoveKind.READ: (TierName.NVME, TierName.HOST),
            MoveKind.WRITE: (TierName.HOST, TierName.NVME),
            MoveKind.ERASE: (None, TierName.NVME),
        }
        ends = (move.source, move.target)
        if tuple(end and end.tier for end in ends) != tiers[move.kind]:
            raise SimulationError(f"Move {move.id}: {move.kind.value} from and to wrong tiers")
        for place in ends:
            if place is not None:
                self._check_place(move, place)

    def _check_place(self, move: Move, place: Place) -> None:
        limits = self._limits
        tier, slabs, header = limits.host, limits.host.slabs + limits.staging_slots, 0
        if place.tier is TierName.NVME:
            if limits.nvme is None:
                raise SimulationError(f"Move {move.id} names a tier that isn't there")
            tier, slabs, header = limits.nvme, limits.nvme.slabs, ALIGN_BYTES
        start, end = extent(place)
        fits = 0 <= place.slab < slabs and place.index >= 0 and end <= tier.slab_bytes
        needed = header + move.header.payload_bytes
        if not fits or place.slot_bytes < needed or start % ALIGN_BYTES:
            raise SimulationError(f"Move {move.id}: {place} doesn't fit the tier or the payload")

    def _check_depth(self, kind: MoveKind) -> None:
        lane = LANES[kind]
        depths = {
            "copies": self._limits.copy_depth,
            "reads": self._limits.read_depth,
            "writes": self._limits.write_depth,
        }
        kinds = [one.move.kind for one in self.running.values()]
        same = [other for other in kinds if LANES[other] == lane]
        if kind is MoveKind.LOAD:  # STOREs never keep it waiting
            same = [other for other in same if other is kind]
        if len(same) >= depths[lane]:
            raise SimulationError(f"more than {depths[lane]} {lane} at a time")

    def _check_race(self, move: Move, blocks: list[BlockID], other: Running) -> None:
        theirs = other.move
        for mine, clashing in (
            (move.target, (theirs.source, theirs.target)),
            (move.source, (theirs.target,)),
        ):
            for place in clashing:
                if mine is not None and place is not None and overlap(mine, place):
                    raise SimulationError(f"Moves {theirs.id} and {move.id} race for {mine}")
        if move.session is None or move.session != theirs.session:
            return
        shared = {b for b in blocks if b[1] != NULL_BLOCK} & set(other.blocks)
        if shared and MoveKind.LOAD in (move.kind, theirs.kind):
            raise SimulationError(f"Moves {theirs.id} and {move.id} race for blocks {shared}")

    def _check_source(self, move: Move) -> None:
        if move.kind not in (MoveKind.LOAD, MoveKind.WRITE):
            return
        content = self.arena.contents.get(_place(move.source))
        if content is None or not content.whole:
            raise SimulationError(f"Move {move.id} reads {move.source}, which isn't whole")
        if _identity(move.header) != _identity(content.header):
            raise SimulationError(f"Move {move.id} of {move.header} reads {content.header} instead")


def expected_blocks(layout: Layout, part: Part) -> list[int]:
    """The group of each block of a part, in canonical order."""
    groups: list[int] = []
    for group in layout.part_groups(part):
        groups += [group] * layout.blocks_per_chunk(group)
    return groups


def _identity(header: ChunkHeader) -> ChunkHeader:
    """A header without what an engine may have said wrong about a chunk's place in its chain."""
    return replace(header, sequence=0, parent=NO_PARENT, depth=0)


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
