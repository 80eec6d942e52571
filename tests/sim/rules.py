"""Rules: what the real hands rely on, checked as each Move starts.

A Move lies within its tier, reads what is whole, writes where no other Move is, never touches a
session that was detached, and makes no slab file where there was no room a moment ago.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kvstore.core.keys import NO_PARENT
from kvstore.core.layout import NULL_BLOCK, Layout, Part
from kvstore.core.limits import ALIGN_BYTES, HEADER_BYTES, Limits, RemoteLimits
from kvstore.core.messages import (
    ChunkHeader,
    Move,
    MoveID,
    MoveKind,
    MoveStatus,
    Place,
    SessionID,
    TierName,
)
from tests.sim.errors import SimulationError
from tests.sim.media import Arena, BlockID, Disk, EngineMemory, Record, extent, overlap, unpack

LANES = {
    MoveKind.STORE: "copies",
    MoveKind.LOAD: "copies",
    MoveKind.READ: "reads",
    MoveKind.WRITE: "writes",
    MoveKind.ERASE: "writes",
}
ENDS = {
    MoveKind.STORE: (None, TierName.HOST),
    MoveKind.LOAD: (TierName.HOST, None),
    MoveKind.READ: (TierName.NVME, TierName.HOST),
    MoveKind.WRITE: (TierName.HOST, TierName.NVME),
    MoveKind.ERASE: (None, TierName.NVME),
}
"""The tiers of source and target; None: engine memory, or nothing."""
REMOTE = {
    MoveKind.READ: (TierName.REDIS, TierName.HOST),
    MoveKind.WRITE: (TierName.HOST, TierName.REDIS),
}
"""The same for the remote tier."""


@dataclass(slots=True)
class Running:
    """A Move in the hands, and how far it is. ``homeless``: a write whose slab file can't be
    made."""

    move: Move
    blocks: list[BlockID]
    status: MoveStatus
    begun: bool = False
    ended: bool = False
    homeless: bool = False
    old: Record | None = None


class Busy(Protocol):
    """What the rules need to know of the hands."""

    running: dict[MoveID, Running]
    memories: dict[SessionID, EngineMemory]
    arena: Arena
    disk: Disk
    limits: Limits
    no_growth_until: float
    growing: set[int]


def check_start(hands: Busy, move: Move, blocks: list[BlockID], now: float) -> None:
    """Raise SimulationError unless the Move may start beside all that run."""
    if move.id in hands.running:
        raise SimulationError(f"Move {move.id} was handed out twice")
    _check_ends(hands.limits, move)
    _check_depth(hands, move)
    for other in hands.running.values():
        _check_race(move, blocks, other)
    _check_source(hands.arena, move)
    if _grows(move) and move.target is not None and now < hands.no_growth_until:
        slab = move.target.slab
        if slab not in hands.disk.cuts and slab not in hands.growing:
            raise SimulationError(f"Move {move.id} needs a new slab, though the device is full")


def blocks_of(hands: Busy, move: Move) -> list[BlockID]:
    """The Move's blocks in canonical order, checked against the session's layout."""
    if move.kind not in (MoveKind.STORE, MoveKind.LOAD):
        if move.blocks or move.session is not None:
            raise SimulationError(f"Move {move.id} {move.kind.value} names engine memory")
        return []
    memory = None if move.session is None else hands.memories.get(move.session)
    if memory is None:
        raise SimulationError(f"Move {move.id} for s{move.session}, which isn't attached")
    blocks = unpack(move.blocks)
    if [group for group, _ in blocks] != expected_blocks(memory.layout, move.header.part):
        raise SimulationError(f"Move {move.id}: blocks don't fit the part's groups")
    if move.kind is MoveKind.STORE and any(block == NULL_BLOCK for _, block in blocks):
        raise SimulationError(f"Move {move.id}: STORE of a null block")
    return blocks


def expected_blocks(layout: Layout, part: Part) -> list[int]:
    """The group of each block of a part, in canonical order."""
    groups: list[int] = []
    for group in layout.part_groups(part):
        groups += [group] * layout.blocks_per_chunk(group)
    return groups


def _check_ends(limits: Limits, move: Move) -> None:
    ends = (move.source, move.target)
    tiers = tuple(end and end.tier for end in ends)
    if tiers != ENDS[move.kind] and (limits.remote is None or tiers != REMOTE.get(move.kind)):
        raise SimulationError(f"Move {move.id}: {move.kind.value} from and to wrong tiers")
    for place in ends:
        if place is not None:
            _check_place(limits, move, place)


def _check_place(limits: Limits, move: Move, place: Place) -> None:
    if place.tier is TierName.REDIS:
        if place.index or place.slot_bytes:
            raise SimulationError(f"Move {move.id}: {place} isn't a value's")
        return
    tier, slabs, header = limits.host, limits.host.slabs + limits.staging_slots, 0
    if place.tier is TierName.NVME:
        if limits.nvme is None:
            raise SimulationError(f"Move {move.id} names a tier that isn't there")
        tier, slabs, header = limits.nvme, limits.nvme.slabs, HEADER_BYTES
    start, end = extent(place)
    fits = 0 <= place.slab < slabs and place.index >= 0 and end <= tier.slab_bytes
    needed = header + move.header.payload_bytes
    if not fits or place.slot_bytes < needed or start % ALIGN_BYTES:
        raise SimulationError(f"Move {move.id}: {place} doesn't fit the tier or the payload")


def _check_depth(hands: Busy, move: Move) -> None:
    lane, limits = _lane(move), hands.limits
    remote = limits.remote or RemoteLimits()
    depths: Mapping[str, int] = {
        "copies": limits.copy_depth,
        "reads": limits.read_depth,
        "writes": limits.write_depth,
        "remote reads": remote.read_depth,
        "remote writes": remote.write_depth,
    }
    moves = [one.move for one in hands.running.values()]
    same = [other for other in moves if _lane(other) == lane]
    if move.kind is MoveKind.LOAD:  # STOREs never keep it waiting
        same = [other for other in same if other.kind is move.kind]
    if len(same) >= depths[lane]:
        raise SimulationError(f"more than {depths[lane]} {lane} at a time")
    if lane.startswith("remote") and any(_part(o) == _part(move) for o in same):
        raise SimulationError(f"Move {move.id}: another one does the same: {move.header}")


def _grows(move: Move) -> bool:
    """Whether a Move may need a slab file that isn't there yet."""
    return move.kind is MoveKind.WRITE and _lane(move) == "writes"


def _lane(move: Move) -> str:
    places = (move.source, move.target)
    remote = any(place is not None and place.tier is TierName.REDIS for place in places)
    return f"remote {LANES[move.kind]}" if remote else LANES[move.kind]


def _part(move: Move) -> tuple[str, bytes, bytes, int, Part, int]:
    """The part that a Move reads or writes, in its node's epoch."""
    head = move.header
    return head.tenant, head.namespace, head.key, head.shard, head.part, head.epoch


def _check_race(move: Move, blocks: list[BlockID], other: Running) -> None:
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


def _check_source(arena: Arena, move: Move) -> None:
    if move.source is None or move.kind not in (MoveKind.LOAD, MoveKind.WRITE):
        return
    content = arena.contents.get(move.source)
    if content is None or not content.whole:
        raise SimulationError(f"Move {move.id} reads {move.source}, which isn't whole")
    if _identity(move.header) != _identity(content.header):
        raise SimulationError(f"Move {move.id} of {move.header} reads {content.header} instead")


def _identity(header: ChunkHeader) -> ChunkHeader:
    """A header without what an engine may have said wrong about a chunk's place in its chain."""
    return replace(header, sequence=0, parent=NO_PARENT, depth=0)
