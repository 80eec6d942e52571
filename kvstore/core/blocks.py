"""Blocks of a request: checked, then cut into what each chunk's parts need.

A request may name millions. Those of its first chunks are checked before anything is begun, as far
as one event may; the others as their chunks are begun.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvstore.core.layout import NULL_BLOCK, Layout, Part

_ID_BYTES = 4
_NULL = NULL_BLOCK.to_bytes(_ID_BYTES, "little")
CHECK_IDS = 65_536
"""Block IDs checked in the event that brings a request, unless its first chunk has more."""


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """Per group of ``layout``, the packed block IDs of a request's chunks, in token order. Those
    of the first ``checked`` chunks are valid; ``has_null`` tells where any may be null."""

    layout: Layout
    packed: tuple[bytes, ...]
    has_null: tuple[bool, ...]
    checked: int

    def check(self, chunk: int) -> str:
        """What is wrong with a chunk's IDs, in one line; empty if nothing is."""
        if chunk < self.checked:
            return ""
        for number in range(len(self.packed)):
            largest = _largest(self._cut(number, chunk))
            reason = _beyond(self.layout, number, largest)
            if reason:
                return reason
        return ""

    def of(self, part: Part, chunk: int) -> tuple[tuple[int, bytes], ...]:
        """(group, packed IDs) of one chunk's part."""
        return tuple((group, self._cut(group, chunk)) for group in self.layout.part_groups(part))

    def any_null(self, part: Part, chunk: int) -> bool:
        """Whether a block of the chunk's part is null."""
        return any(
            self.has_null[group] and _NULL in _split(self._cut(group, chunk))
            for group in self.layout.part_groups(part)
        )

    def all_null(self, part: Part, chunk: int) -> bool:
        """Whether every block of the chunk's part is null (also where the part has no groups)."""
        for group in self.layout.part_groups(part):
            if not self.has_null[group]:
                return False
            cut = self._cut(group, chunk)
            if cut != _NULL * (len(cut) // _ID_BYTES):
                return False
        return True

    def _cut(self, group: int, chunk: int) -> bytes:
        size = self.layout.blocks_per_chunk(group) * _ID_BYTES
        return self.packed[group][chunk * size : (chunk + 1) * size]


def check_blocks(layout: Layout, chunks: int, blocks: tuple[bytes, ...]) -> ChunkBlocks | str:
    """The request's blocks, or one line that says what is wrong with them."""
    if len(blocks) != len(layout.groups):
        names = ", ".join(group.name for group in layout.groups)
        return f"blocks: {len(blocks)} groups given; the layout has {len(layout.groups)}: {names}"
    for number, packed in enumerate(blocks):
        expected = chunks * layout.blocks_per_chunk(number)
        if len(packed) != expected * _ID_BYTES:
            return (
                f"blocks: group {layout.groups[number].name!r} has {len(packed) / _ID_BYTES:g} "
                f"block IDs; {chunks} chunks need {expected}"
            )
    ids = sum(layout.blocks_per_chunk(number) for number in range(len(blocks)))
    checked = min(chunks, max(1, CHECK_IDS // ids))
    nulls = []
    for number, packed in enumerate(blocks):
        first = packed[: checked * layout.blocks_per_chunk(number) * _ID_BYTES]
        nulls.append(checked < chunks or _NULL in first)
        reason = _beyond(layout, number, _largest(first))
        if reason:
            return reason
    return ChunkBlocks(layout, blocks, tuple(nulls), checked)


def _largest(packed: bytes) -> int:
    """The largest ID that isn't null; 0 where there is none."""
    ids = array("I", packed)
    largest = max(ids, default=0)
    if largest == NULL_BLOCK:
        largest = max((block for block in ids if block != NULL_BLOCK), default=0)
    return largest


def _beyond(layout: Layout, number: int, largest: int) -> str:
    """Why a group has no block of this ID; empty if it has."""
    group = layout.groups[number]
    if largest < group.num_blocks():
        return ""
    return (
        f"blocks: group {group.name!r} has block ID {largest}; "
        f"valid are 0..{group.num_blocks() - 1}"
    )


def _split(packed: bytes) -> set[bytes]:
    return {packed[i : i + _ID_BYTES] for i in range(0, len(packed), _ID_BYTES)}
