"""Cells: what an engine's blocks hold when it stores, and must hold when it is given chunks."""

from __future__ import annotations

from kvstore.core.layout import NULL_BLOCK, Part
from kvstore.core.messages import Completed
from tests.sim.errors import SimulationError
from tests.sim.media import BlockID, Half, Pattern
from tests.sim.views import TicketView

PartKey = tuple[str, bytes, bytes, int, Part]
"""(tenant, namespace digest, key, shard, part)."""


def compare(ticket: TicketView, body: Completed, newest: dict[PartKey, int]) -> None:
    """The blocks of each chunk that is done hold the chunk; where it may have come from the remote
    tier, also as another node stored it, which counts its own clears."""
    layout, memory = ticket.session.shape.layout, ticket.session.memory
    for chunk, key in enumerate(ticket.keys()):
        if not body.done[chunk] or memory is None:
            continue
        for part in Part:
            blocks = ticket.chunk_blocks(layout, chunk, part)
            name = (*ticket.space, key, ticket.session.shard(), part)
            shared = newest.get(name, -1) >= ticket.fleet_epoch
            for pattern, block in zip(ticket.patterns(key, layout, part), blocks, strict=True):
                if block[1] != NULL_BLOCK:
                    wanted = pattern._replace(clears=-1) if shared else pattern
                    _check_cell(wanted, memory.cells[block], block)


def fill(ticket: TicketView) -> None:
    """The engine has computed the chunks that it stores."""
    memory, layout = ticket.session.memory, ticket.session.shape.layout
    if memory is None:
        return
    for chunk, key in enumerate(ticket.keys()):
        for part in Part:
            blocks = ticket.chunk_blocks(layout, chunk, part)
            for pattern, block in zip(ticket.patterns(key, layout, part), blocks, strict=True):
                if block[1] != NULL_BLOCK:
                    memory.cells[block] = [pattern, pattern]


def _check_cell(wanted: Pattern, cell: list[Half], block: BlockID) -> None:
    """A block holds one pattern, the right one, and not from before a clear."""
    for half in cell:
        if not isinstance(half, Pattern) or half[:5] != wanted[:5] or half != cell[0]:
            raise SimulationError(f"wrong bytes in block {block}: {cell} instead of {wanted}")
        if half.clears < wanted.clears:
            raise SimulationError(f"block {block} holds bytes from before a clear: {cell}")
