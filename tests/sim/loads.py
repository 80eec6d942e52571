"""Loads: which of the hard ones a transfer is, counted as it is sent."""

from __future__ import annotations

from kvstore.core.messages import Retrieve, Store
from tests.sim.faults import Fault
from tests.sim.views import SessionView, places, split
from tests.sim.world import World


def note(world: World, view: SessionView, message: Store | Retrieve) -> None:
    """Count a transfer that the host tier has no room for, alone or with another one."""
    keys, room = split(message.keys), places(world.limits, view.shape.layout)
    if isinstance(message, Store):
        if len(keys) > room:
            world.saw(Fault.BURST)
        return
    if len(keys) > room:
        world.saw(Fault.PROMPT_LARGER_THAN_HOST)
    for ticket in world.model.tickets.values():
        same = isinstance(ticket.message, Retrieve) and ticket.space == view.space()
        if same and ticket.keys()[:1] == keys[:1] and len(ticket.keys()) + len(keys) > room:
            world.saw(Fault.RETRIEVES_FILL_HOST)
