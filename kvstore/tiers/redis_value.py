"""A chunk as a value: the header of codecs/base.py, then the payload as its codec stored it.

A payload of more than ``split_bytes`` is cut into pieces, each a value of its own; the chunk's own
value is then header and manifest, and is written last, so that it never names pieces that weren't
there. Manifest, little-endian: magic ``kvpieces``, u64 bytes a piece, u64 pieces, u64 xxh3-64 of
these 24 bytes. The header's checksum covers the payload as a whole, so pieces of different writings
can't be mixed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvstore.codecs.base import HEADER_BYTES
from kvstore.core.errors import ChunkCorruptError

PIECES_MAX = 4096

_MAGIC = b"kvpieces"
_FIELDS = struct.Struct("<8sQQ")
_CHECKSUM = struct.Struct("<Q")
MANIFEST_BYTES = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Manifest:
    """How a stored payload was cut: pieces of ``piece_bytes``, the last one the rest."""

    piece_bytes: int
    pieces: int

    @classmethod
    def of(cls, stored_bytes: int, piece_bytes: int) -> Manifest:
        """The cut of so many bytes."""
        return cls(piece_bytes, -(-stored_bytes // piece_bytes))

    def pack(self) -> bytes:
        """As it lies behind a header."""
        data = _FIELDS.pack(_MAGIC, self.piece_bytes, self.pieces)
        return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))

    @classmethod
    def unpack(cls, data: bytes, stored_bytes: int) -> Manifest:
        """What ``pack`` made for so many stored bytes. Raises ChunkCorruptError."""
        fields = data[: _FIELDS.size]
        magic, piece_bytes, pieces = _FIELDS.unpack(fields)
        (checksum,) = _CHECKSUM.unpack(data[_FIELDS.size :])
        if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(fields):
            raise ChunkCorruptError("manifest: magic or checksum is wrong")
        if not piece_bytes or not pieces <= PIECES_MAX:
            raise ChunkCorruptError(f"manifest: {pieces} pieces of {piece_bytes} bytes")
        found = cls(piece_bytes, pieces)
        if found != cls.of(stored_bytes, piece_bytes):
            raise ChunkCorruptError(f"manifest: {pieces} pieces for {stored_bytes} bytes")
        return found

    def ranges(self, stored_bytes: int) -> list[tuple[int, int]]:
        """Each piece's first byte and the one behind its last."""
        return [
            (start, min(start + self.piece_bytes, stored_bytes))
            for start in range(0, stored_bytes, self.piece_bytes)
        ]


def stored_in_one(value_bytes: int, stored_bytes: int) -> bool:
    """Whether a value of this length holds the payload, rather than a manifest."""
    return value_bytes == HEADER_BYTES + stored_bytes
