"""BytesModel: what lies where, as labels instead of bytes, and a detector of races between Moves.

Every Move that the core hands out is checked against it: its source must hold, byte for byte, what
its header names; and no two Moves at a time may touch the same bytes if one of them writes. What
lies in the remote tier is the fleet's business (fleet.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, Move, MoveID, MoveKind, MoveStatus, Place, TierName

Label = tuple[str, bytes, bytes, int, Part, int]
"""Tenant, namespace, key, shard, part and payload bytes: two that are equal are the same KV."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A slot's bytes."""

    tier: TierName
    slab: int
    start: int
    end: int

    @staticmethod
    def of(place: Place) -> Extent:
        """The bytes of a place."""
        start = place.index * place.slot_bytes
        return Extent(place.tier, place.slab, start, start + place.slot_bytes)

    def meets(self, other: Extent) -> bool:
        """Whether two extents share a byte."""
        same = (self.tier, self.slab) == (other.tier, other.slab)
        return same and self.start < other.end and other.start < self.end


def label(header: ChunkHeader) -> Label:
    """What a header's bytes are."""
    return (
        header.tenant,
        header.namespace,
        header.key,
        header.shard,
        header.part,
        header.payload_bytes,
    )


class BytesModel:
    """Labels by extent. ``begin`` when a Move is handed out, ``end`` when it has ended."""

    def __init__(self) -> None:
        self._labels: dict[Extent, Label] = {}
        self._reading: dict[MoveID, Extent] = {}
        self._writing: dict[MoveID, Extent] = {}

    def begin(self, move: Move) -> None:
        """Check a Move that goes out, and note what it touches."""
        if move.source is not None and move.source.tier is not TierName.REDIS:
            extent = Extent.of(move.source)
            assert self._labels.get(extent) == label(move.header), f"{move}: its source holds else"
            assert not self._used(extent, self._writing), f"{move}: reads what is being written"
            self._reading[move.id] = extent
        if move.target is not None and move.target.tier is not TierName.REDIS:
            extent = Extent.of(move.target)
            assert not self._used(extent, self._writing), f"{move}: two write to one place"
            assert not self._used(extent, self._reading), f"{move}: overwrites what is being read"
            self._forget(extent)
            self._writing[move.id] = extent

    def end(self, move: Move, status: MoveStatus) -> None:
        """A Move has ended."""
        source, target = self._reading.pop(move.id, None), self._writing.pop(move.id, None)
        if source is not None:
            assert self._labels.get(source) == label(move.header), f"{move}: its source changed"
        if target is not None and status is MoveStatus.OK and move.kind is not MoveKind.ERASE:
            self._labels[target] = label(move.header)

    def put(self, place: Place, header: ChunkHeader) -> None:
        """A slot that a scan found holds what its header says."""
        self._labels[Extent.of(place)] = label(header)

    def _used(self, extent: Extent, by: dict[MoveID, Extent]) -> bool:
        return any(extent.meets(other) for other in by.values())

    def _forget(self, extent: Extent) -> None:
        for other in [known for known in self._labels if known.meets(extent)]:
            del self._labels[other]
