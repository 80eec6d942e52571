"""What tests do to the slots in a daemon's NVMe folder while no daemon uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kvstore.codecs import base as codecs
from kvstore.core.errors import ChunkCorruptError
from kvstore.core.messages import ChunkHeader


def damage(folder: Path, key: bytes) -> int:
    """Flip one byte of the payload of every slot that holds a chunk; how many there were."""
    found = 0
    for file, offset, _, payload in _slots(folder, key):
        place = offset + codecs.HEADER_BYTES + payload.stored_bytes // 2
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
        found += 1
    return found


def lose(folder: Path, key: bytes, shard: int) -> int:
    """Erase the slots of one rank's part of a chunk; how many there were."""
    found = 0
    for file, offset, header, _ in _slots(folder, key):
        if header.shard == shard:
            file.seek(offset)
            file.write(codecs.erased())
            found += 1
    return found


def _slots(folder: Path, key: bytes) -> Iterator[tuple[BinaryIO, int, ChunkHeader, codecs.Payload]]:
    for path in folder.glob("slab_*_*.kv"):
        slot_bytes = int(path.stem.split("_")[2])
        with path.open("r+b") as file:
            for offset in range(0, path.stat().st_size, slot_bytes):
                file.seek(offset)
                with suppress(ChunkCorruptError):
                    header, payload = codecs.unpack(file.read(codecs.HEADER_BYTES))
                    if header.key == key:
                        yield file, offset, header, payload
