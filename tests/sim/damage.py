"""Damage at rest: bits that flip, and records that lie at another record's place."""

from __future__ import annotations

from kvstore.core.messages import MoveKind, Place, TierName
from tests.sim.faults import Fault
from tests.sim.media import Record
from tests.sim.world import World


def flip(world: World) -> None:
    """Flip a bit of some record at rest, in its header or in its payload."""
    record = _some_record(world)
    if record is None:
        return
    if world.rng.random() < 0.3:
        record.legible = False
        world.saw(Fault.BIT_FLIP_HEADER)
    else:
        world.saw(Fault.BIT_FLIP_PAYLOAD)
        record.second[world.rng.randrange(len(record.second))] = "flipped"
    world.story.note(world.now, f"flip in {record.header.key.hex()[:6]}")


def misplace(world: World) -> None:
    """Exchange two records of one size."""
    one, other = _some_record(world), _some_record(world)
    if one is None or other is None or one is other or one.slot_bytes != other.slot_bytes:
        return
    records = world.disk.records
    names = [name for name, record in records.items() if record is one or record is other]
    records[names[0]], records[names[1]] = records[names[1]], records[names[0]]
    world.saw(Fault.RECORD_MISPLACED)
    keys = one.header.key.hex()[:6], other.header.key.hex()[:6]
    world.story.note(world.now, f"exchange of {keys[0]} and {keys[1]}")


def _some_record(world: World) -> Record | None:
    """A whole record that no write is about to change."""
    busy: set[tuple[int, int]] = set()
    for running in world.hands.running.values():
        for place in (running.move.source, running.move.target):
            at_rest = isinstance(place, Place) and place.tier is TierName.NVME
            if place is not None and at_rest and running.move.kind is not MoveKind.READ:
                busy.add((place.slab, place.index * place.slot_bytes))
    quiet = [
        record
        for name, record in world.disk.records.items()
        if name not in busy and record.intact()
    ]
    return world.rng.choice(quiet) if quiet else None
