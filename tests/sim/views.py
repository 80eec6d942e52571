"""Views: sessions, namespaces and transfers as the users of the core see them."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.keys import KEY_BYTES, Namespace
from kvstore.core.layout import NULL_BLOCK, Layout, Part
from kvstore.core.limits import Limits, slot_bytes
from kvstore.core.messages import Retrieve, SessionID, Store, TierName
from tests.sim.media import BlockID, EngineMemory, Pattern, unpack
from tests.sim.shapes import EngineShape

SpaceKey = tuple[str, bytes]
"""(tenant, namespace digest)."""


@dataclass(slots=True)
class SpaceView:
    """A namespace of a tenant as users see it. ``clears`` counts clears begun, ``cleared`` those
    acknowledged; nothing from before ``fleet_epoch`` may come from the remote tier."""

    namespace: Namespace
    clears: int = 0
    cleared: int = 0
    fleet_epoch: int = 0


@dataclass(slots=True)
class SessionView:
    """A session as its engine sees it. ``memory`` is None for a scheduler."""

    id: SessionID
    shape: EngineShape
    rank: int = 0
    memory: EngineMemory | None = None
    namespace: bytes = b""
    closed: bool = False
    joined: bool = False

    def shard(self) -> int:
        """The shard that it holds."""
        return self.shape.shards[self.rank].index()

    def engine(self) -> tuple[str, str]:
        """(tenant, engine)."""
        return self.shape.tenant, self.shape.engine

    def space(self) -> SpaceKey:
        """Where its chunks are."""
        return self.shape.tenant, self.namespace


@dataclass(slots=True)
class TicketView:
    """An open store or retrieve. ``clears`` is the count that its bytes carry, or must have at
    least; ``disturbances`` is the world's count when it was asked for."""

    message: Store | Retrieve
    session: SessionView
    space: SpaceKey
    clears: int
    disturbances: int
    fleet_epoch: int = 0

    def keys(self) -> list[bytes]:
        """One key a chunk."""
        return split(self.message.keys)

    def blocks(self) -> list[BlockID]:
        """All blocks that it lends."""
        return [b for b in unpack(tuple(enumerate(self.message.blocks))) if b[1] != NULL_BLOCK]

    def chunk_blocks(self, layout: Layout, chunk: int, part: Part) -> list[BlockID]:
        """The blocks of one chunk's part, nulls included, in canonical order."""
        found: list[BlockID] = []
        for group in layout.part_groups(part):
            size = layout.blocks_per_chunk(group)
            ids = memoryview(self.message.blocks[group]).cast("I")
            found += [(group, block) for block in ids[chunk * size : (chunk + 1) * size]]
        return found

    def leads(self, done: bytes) -> bool:
        """Whether a store's done chunks lead those that aren't; so it must be where each chunk has
        one part and a chain is what it says."""
        layout = self.session.shape.layout
        parts = sum(bool(layout.part_groups(part)) for part in Part)
        return parts > 1 or self.message.request == "tangled" or b"\0\1" not in done

    def patterns(self, key: bytes, layout: Layout, part: Part) -> list[Pattern]:
        """What the blocks of one chunk's part hold, in canonical order."""
        tenant, shard = self.space[0], self.session.shard()
        return [
            Pattern(tenant, key, shard, group, number, self.clears)
            for group in layout.part_groups(part)
            for number in range(layout.blocks_per_chunk(group))
        ]


def places(limits: Limits, layout: Layout) -> int:
    """Chunks of one shard that the whole host tier could keep: by their FULL parts, or WINDOW parts
    where they have no others."""
    part = Part.FULL if layout.part_groups(Part.FULL) else Part.WINDOW
    size = slot_bytes(TierName.HOST, layout.part_bytes(part))
    return limits.host.slabs * (limits.host.slab_bytes // size)


def split(keys: bytes) -> list[bytes]:
    """Consecutive keys, one by one."""
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def fits(message: Store | Retrieve, session: SessionView) -> bool:
    """Whether a transfer's blocks are what the session's layout calls for; if not, it must be
    refused."""
    layout = session.shape.layout
    if session.memory is None or len(message.blocks) != len(layout.groups):
        return False
    for number, packed in enumerate(message.blocks):
        needed = len(split(message.keys)) * layout.blocks_per_chunk(number)
        if len(packed) != 4 * needed:
            return False
        if any(NULL_BLOCK > block >= layout.groups[number].num_blocks() for block in ids(packed)):
            return False
    return True


def ids(packed: bytes) -> memoryview:
    """Packed block IDs as integers."""
    return memoryview(packed).cast("I")
