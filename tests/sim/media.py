"""Media: engine memory, the host arena and the disk, byte-exact but tiny.

A block's bytes are modelled by a *cell* of two halves. What an engine writes for a chunk is the
same pattern in both halves; a Move carries the first halves when it starts and the second when it
ends, so whatever was changed in between shows as a cell of two different halves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.layout import LayerGroup, Layout
from kvstore.core.messages import ChunkHeader, Place

BlockID = tuple[int, int]
"""(group index, block ID) in an engine's memory."""


class Pattern(NamedTuple):
    """The one right content of a block: whose chunk, which shard, group and block of it, and after
    which clear it was stored."""

    tenant: str
    key: bytes
    shard: int
    group: int
    number: int
    clears: int


Half = Pattern | str
"""Half a block's bytes: a pattern, or junk."""


@dataclass(slots=True)
class EngineMemory:
    """One rank's paged memory. Blocks that are free hold junk, new each time. Moves of a sick rank
    take ``pace`` times as long, or fail at a rate of ``fails``."""

    layout: Layout
    pace: float = 1.0
    fails: float = 0.0
    cells: dict[BlockID, list[Half]] = field(default_factory=dict)
    free: dict[int, list[int]] = field(default_factory=dict)
    scribbles: int = 0

    @staticmethod
    def of(layout: Layout) -> EngineMemory:
        """Memory with all blocks free."""
        memory = EngineMemory(layout)
        for number, group in enumerate(layout.groups):
            memory.free[number] = list(range(group.num_blocks()))
            memory.scribble((number, block) for block in range(group.num_blocks()))
        return memory

    def scribble(self, blocks: Iterable[BlockID]) -> None:
        """The engine uses blocks for something else."""
        self.scribbles += 1
        for block in blocks:
            junk = f"junk {self.scribbles}"
            self.cells[block] = [junk, junk]

    def give_back(self, blocks: Iterable[BlockID]) -> None:
        """Blocks are free, and overwritten at once."""
        blocks = list(blocks)
        self.scribble(blocks)
        for group, block in blocks:
            self.free[group].append(block)

    def group(self, number: int) -> LayerGroup:
        """A group of the layout."""
        return self.layout.groups[number]


@dataclass(slots=True)
class Content:
    """What lies at a place: the halves of each block, in canonical order. ``whole``: its last Move
    went well. ``stored_s``: when an engine's STORE of it ended."""

    header: ChunkHeader
    first: list[Half]
    second: list[Half]
    whole: bool = False
    stored_s: float = 0.0


@dataclass(slots=True)
class Arena:
    """Host memory: what lies at each place. A write takes away whatever it overlaps."""

    slab_bytes: int
    contents: dict[Place, Content] = field(default_factory=dict)

    def put(self, place: Place, content: Content) -> None:
        """Lay content at a place."""
        for other in [p for p in self.contents if overlap(p, place)]:
            del self.contents[other]
        self.contents[place] = content


@dataclass(slots=True)
class Record:
    """A slot at rest. ``legible``: its header passes its own check. ``checksum`` stands for the
    header's checksum over the payload. ``stored_s``: as of the host slot that it was written
    from."""

    header: ChunkHeader
    slot_bytes: int
    first: list[Half]
    second: list[Half]
    checksum: tuple[tuple[Half, ...], tuple[Half, ...]] | None = None
    legible: bool = True
    stored_s: float = 0.0

    def intact(self) -> bool:
        """Whether the payload passes its check."""
        return self.checksum == (tuple(self.first), tuple(self.second))


@dataclass(slots=True)
class Disk:
    """The NVMe tier's files: what survives the daemon. Records lie at (slab, byte offset)."""

    records: dict[tuple[int, int], Record] = field(default_factory=dict)
    cuts: dict[int, int] = field(default_factory=dict)
    """Slot size of each slab that was ever written."""

    def put(self, place: Place, record: Record) -> None:
        """Overwrite a place; what else it overlaps is gone."""
        start, end = extent(place)
        for slab, offset in list(self.records):
            size = self.records[slab, offset].slot_bytes
            if slab == place.slab and start < offset + size and offset < end:
                del self.records[slab, offset]
        self.cuts[place.slab] = place.slot_bytes
        self.records[place.slab, start] = record

    def get(self, place: Place) -> Record | None:
        """The record that begins at a place."""
        return self.records.get((place.slab, extent(place)[0]))


def unpack(blocks: tuple[tuple[int, bytes], ...]) -> list[BlockID]:
    """Packed blocks as (group, block ID)."""
    found = []
    for group, packed in blocks:
        found += [(group, block) for block in memoryview(packed).cast("I")]
    return found


def extent(place: Place) -> tuple[int, int]:
    """First byte of a place within its slab, and the first byte behind it."""
    start = place.index * place.slot_bytes
    return start, start + place.slot_bytes


def overlap(one: Place, other: Place) -> bool:
    """Whether two places share a byte."""
    if one.tier is not other.tier or one.slab != other.slab:
        return False
    (start, end), (first, last) = extent(one), extent(other)
    return start < last and first < end
