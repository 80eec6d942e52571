"""Blocks of a request: checked once, then cut into what each chunk's parts need."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvstore.core.layout import NULL_BLOCK, Layout, Part

_ID_BYTES = 4
_NULL = NULL_BLOCK.to_bytes(_ID_BYTES, "little")


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """Per group of ``layout``, the packed block IDs of a request's chunks, in token order."""

    layout: Layout
    packed: tuple[bytes, ...]
    has_null: tuple[bool, ...]

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
            cut = self._cut(group, chunk)
            if not self.has_null[group] or cut != _NULL * (len(cut) // _ID_BYTES):
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
    nulls = []
    for number, packed in enumerate(blocks):
        group = layout.groups[number]
        expected = chunks * layout.blocks_per_chunk(number)
        if len(packed) != expected * _ID_BYTES:
            return (
                f"blocks: group {group.name!r} has {len(packed) / _ID_BYTES:g} block IDs; "
                f"{chunks} chunks need {expected}"
            )
        ids = array("I", packed)
        largest = max(ids, default=0)
        if largest == NULL_BLOCK:
            largest = max((block for block in ids if block != NULL_BLOCK), default=0)
            nulls.append(True)
        else:
            nulls.append(False)
        if largest >= group.num_blocks():
            return (
                f"blocks: group {group.name!r} has block ID {largest}; "
                f"valid are 0..{group.num_blocks() - 1}"
            )
    return ChunkBlocks(layout, blocks, tuple(nulls))


def _split(packed: bytes) -> set[bytes]:
    return {packed[i : i + _ID_BYTES] for i in range(0, len(packed), _ID_BYTES)}
