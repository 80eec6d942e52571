"""Chain: consecutive chunks of one sequence, each named by namespace, key, parent and depth; and
the headers that name them."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.errors import InvariantError
from kvstore.core.keys import KEY_BYTES, NO_PARENT, ChunkKey
from kvstore.core.layout import Layout, Part, Shard
from kvstore.core.messages import ChunkHeader
from kvstore.core.slots import Slot
from kvstore.core.spaces import Space


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive chunks: ``keys`` are n x 32 bytes, the first at depth ``first`` below
    ``parent``."""

    space: Space
    keys: bytes
    first: int
    parent: ChunkKey

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def header(self, place: int, part: Part, layout: Layout, shard: Shard) -> ChunkHeader:
        """The header of one shard's part of a chunk; its sequence is given when it is written."""
        space = self.space
        return ChunkHeader(
            key=self.key(place),
            parent=self.key(place - 1) if place else self.parent,
            depth=self.first + place,
            tenant=space.tenant,
            namespace=space.namespace,
            epoch=space.epoch,
            dtype=space.dtype,
            tokens=space.tokens,
            shard=shard.index(),
            shards=space.shards,
            part=part,
            payload_bytes=layout.part_bytes(part),
            sequence=0,
        )

    def key(self, place: int) -> ChunkKey:
        """Its key."""
        return ChunkKey(self.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES])


def slot_header(slot: Slot, sequence: int) -> ChunkHeader:
    """The header of a slot whose copy is live."""
    copy = slot.owner
    if copy is None or not copy.live:
        raise InvariantError(f"{slot!r} has no live copy, so it has no header")
    space = copy.space
    return ChunkHeader(
        key=copy.key,
        parent=NO_PARENT if copy.parent is None else copy.parent.key,
        depth=copy.depth,
        tenant=space.tenant,
        namespace=space.namespace,
        epoch=space.epoch,
        dtype=space.dtype,
        tokens=space.tokens,
        shard=slot.shard,
        shards=space.shards,
        part=slot.part,
        payload_bytes=slot.payload_bytes,
        sequence=sequence,
    )
