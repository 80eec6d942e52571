"""Duties: what the core owes at once, checked as each request is delivered and each effect done."""

from __future__ import annotations

from typing import Protocol

from kvstore.core.layout import Part
from kvstore.core.limits import slot_bytes
from kvstore.core.messages import (
    Cancel,
    Lookup,
    Message,
    Move,
    MoveKind,
    Place,
    Release,
    SessionID,
    SpaceRecord,
    Store,
    TierName,
)
from kvstore.core.service import Service
from kvstore.core.stats import Drop
from kvstore.core.tree_nodes import Copy
from tests.sim.errors import SimulationError
from tests.sim.hands import Hands
from tests.sim.model import Model
from tests.sim.views import SessionView, fits, split

INSTANT = (Lookup, Release, Cancel)
"""What is answered within its own event, whatever the tiers are doing."""


class Owing(Protocol):
    """What a judgement of duties needs of the world."""

    model: Model
    hands: Hands

    def goes_on(self) -> bool:
        """Whether the core has work that it does in steps."""


def check_answered(world: Owing, name: tuple[SessionID, int], sent: Message) -> None:
    """A lookup, a release and a cancel are answered at once; and a cancelled transfer ends at once,
    unless a Move still uses its blocks or steps are left."""
    model = world.model
    if isinstance(sent, INSTANT) and name in model.open and name not in model.pending:
        raise SimulationError(f"s{name[0]} #{name[1]}: {sent} isn't answered at once")
    if isinstance(sent, Cancel) and not world.goes_on():
        ticket = model.tickets.get((name[0], sent.transfer))
        if ticket is not None and world.hands.using(name[0], set(ticket.blocks())) is None:
            raise SimulationError(f"s{name[0]} #{sent.transfer} was cancelled, but isn't completed")


def refused_for_room(service: Service) -> int:
    """Chunk parts that weren't kept so far because the host tier, or a tenant's share, was
    full."""
    drops = service._state.drops
    return drops[Drop.HOST_FULL.value] + drops[Drop.HOST_QUOTA.value]


def check_room(service: Service, view: SessionView, sent: Message, before: int) -> None:
    """A store that was cut for want of room was so rightly: nothing else may leave, or nothing else
    of the tenant's own where its share is full. Only where all parts of a chunk need slots of one
    size, which then is the one that was wanted."""
    if refused_for_room(service) == before or not isinstance(sent, Store) or not fits(sent, view):
        return
    layout = view.shape.layout
    sizes = {slot_bytes(TierName.HOST, layout.part_bytes(part)) for part in Part} - {0}
    if len(sizes) > 1:
        return
    size = sizes.pop()
    state = service._state
    host, own = state.directory.host, {bytes(sent.parent), *split(sent.keys)}
    if host.candidates.looks_left < 0 or host.room._left <= 0:  # this event may look no further
        return
    limited = host.accounts.of(view.shape.tenant).lacks(size)
    for slab in host.slabs.cuts():
        if slab.slot_bytes == size and slab.has_room() and not limited:
            raise SimulationError(f"a chunk was refused, though slab {slab.number} has room")
    for space in state.spaces.all():
        if limited and space.tenant != view.shape.tenant:
            continue
        for copy in space.index[TierName.HOST]:
            if bytes(copy.key) not in own and _could_leave(service, copy, size):
                raise SimulationError(f"a chunk was refused, though {copy} may leave")


def check_write(move: Move, manifest: tuple[SpaceRecord, ...], scanned: set[Place] | None) -> None:
    """A WRITE is of an epoch that is durable, and goes where the scan has been."""
    if move.kind is not MoveKind.WRITE or move.target is None:
        return
    if move.target.tier is TierName.REDIS:
        return
    head = move.header
    durable = {(s.tenant, s.namespace): s.epoch for s in manifest}
    if durable.get((head.tenant, head.namespace)) != head.epoch:
        raise SimulationError(f"Move {move.id} writes for an epoch that isn't durable")
    if scanned is not None and move.target not in scanned:
        raise SimulationError(f"Move {move.id} writes where the scan hasn't been")


def _could_leave(service: Service, copy: Copy, size: int) -> bool:
    candidates = service._state.directory.host.candidates
    if candidates.evictable(copy):
        return any(slot.slab.slot_bytes == size for slot in copy.slots())
    windows = [slot for slot in copy.part(Part.WINDOW) if slot is not None]
    return candidates.window_evictable(copy) and any(s.slab.slot_bytes == size for s in windows)
