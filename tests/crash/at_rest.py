"""The chunks of an NVMe folder as bytes at rest, to look at them or to damage them behind the
daemon's back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.codecs.base import HEADER_BYTES, unpack
from kvstore.core.errors import ChunkCorruptError
from kvstore.core.messages import ChunkHeader


@dataclass(frozen=True, slots=True)
class ChunkAtRest:
    """One slot that holds a chunk."""

    file: Path
    offset: int
    header: ChunkHeader

    def flip(self, byte: int) -> None:
        """Turn over one bit of this byte, counted from the header on."""
        with open(self.file, "r+b") as file:
            file.seek(self.offset + byte)
            (found,) = file.read(1)
            file.seek(self.offset + byte)
            file.write(bytes([found ^ 0x10]))


def chunks_at_rest(folder: Path, namespace: bytes) -> dict[int, ChunkAtRest]:
    """The chunks of one namespace that has one prompt, by their depth."""
    return {c.header.depth: c for c in _chunks(folder) if c.header.namespace == namespace}


def _chunks(folder: Path) -> Iterator[ChunkAtRest]:
    for path in sorted(folder.glob("slab_*.kv")):
        slot_bytes = int(path.stem.split("_")[2])
        with open(path, "rb") as file:
            for offset in range(0, path.stat().st_size, slot_bytes):
                file.seek(offset)
                try:
                    header, _ = unpack(file.read(HEADER_BYTES))
                except ChunkCorruptError:
                    continue
                yield ChunkAtRest(path, offset, header)
