"""RedisValues: putting a chunk's bytes into values and getting them back, verified."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.codecs import base as codecs
from kvstore.codecs.base import HEADER_BYTES, Payload
from kvstore.codecs.identity import IdentityCodec
from kvstore.codecs.registry import codec, codec_of
from kvstore.core.errors import ChunkCorruptError
from kvstore.core.messages import ChunkHeader
from kvstore.tiers.base import ChunkForeignError
from kvstore.tiers.redis_batch import ask_all
from kvstore.tiers.redis_lane import Landing, pack
from kvstore.tiers.redis_names import RedisNames
from kvstore.tiers.redis_servers import RedisServers
from kvstore.tiers.redis_value import MANIFEST_BYTES, Manifest, stored_in_one
from kvstore.tiers.redis_wire import Views

BLOCK_BYTES = 512 << 10
"""What is received before its checksum is computed: less than a core's own cache."""

_Bytes = NDArray[np.uint8]


class ChunkAbsentError(ChunkCorruptError):
    """There is no value under the name."""


class ChunkUnreadableError(ChunkCorruptError):
    """The chunk needs a codec that this node lacks; others may read it, so it stays."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a chunk became: bytes of all its values, and pieces beside the first."""

    value_bytes: int
    pieces: int


class RedisValues:
    """Chunks as values. Thread-safe."""

    def __init__(
        self, servers: RedisServers, codec_name: str, expiry_ms: int, split_bytes: int
    ) -> None:
        self._servers = servers
        self._codec_name = codec_name
        self._identity = IdentityCodec()
        self._expiry_ms = expiry_ms
        self._split_bytes = split_bytes
        self._scratch = threading.local()

    def put(self, name: bytes, header: ChunkHeader, payload: _Bytes) -> Written:
        """Write a chunk under ``name``. Raises CapacityError or TierUnavailableError; the name
        holds nothing new then, or nothing that a reader believes."""
        used = codec(self._codec_name, header.dtype)
        stored = used.encode(payload)
        if stored.nbytes >= payload.nbytes:
            used, stored = self._identity, payload
        head = codecs.pack(
            header,
            Payload(used.id, used.version, stored.nbytes, codecs.payload_checksum(stored)),
        )
        pieces = 0
        behind = stored.data
        if HEADER_BYTES + stored.nbytes > self._split_bytes:
            manifest = Manifest.of(stored.nbytes, self._split_bytes)
            for number, (start, end) in enumerate(manifest.ranges(stored.nbytes)):
                piece = RedisNames.piece(name, number)
                self._set(piece, [stored.data[start:end]])
            pieces, behind = manifest.pieces, memoryview(manifest.pack())
        self._set(name, [memoryview(head), behind])
        return Written(HEADER_BYTES + stored.nbytes, pieces)

    def get(self, name: bytes, header: ChunkHeader, out: _Bytes) -> None:
        """Fill ``out`` with the verified payload of ``header``. Raises ChunkAbsentError,
        ChunkCorruptError, ChunkForeignError or TierUnavailableError."""
        landing = _Landing(out, self._room)
        nbytes = self._get(name, landing)
        if nbytes is None:
            raise ChunkAbsentError("redis: the chunk isn't there")
        try:
            found, payload = codecs.unpack(landing.head)
        except ChunkCorruptError as error:
            raise ChunkCorruptError(f"redis: {error}") from error
        field = codecs.differing_field(found, header)
        if field is not None:
            raise ChunkForeignError(f"redis: the value is a chunk of another {field}")
        used = codec_of(payload.codec_id, payload.codec_version)
        if used is None:
            raise ChunkUnreadableError(
                f"redis: codec {payload.codec_id} isn't installed here (kvstore[redis])"
            )
        stored = landing.stored
        if not stored_in_one(nbytes, payload.stored_bytes):
            landing.checksum.reset()
            stored = self._joined(name, landing, payload.stored_bytes, out)
        if landing.checksum.intdigest() != payload.checksum:
            raise ChunkCorruptError("redis: the payload fails its checksum")
        if stored is out and used.id != self._identity.id:
            stored = stored.copy()
        used.decode(stored, out)

    def forget(self, name: bytes, pieces: int) -> None:
        """Delete a chunk as far as that is possible, so that the next writer heals it."""
        names = [name, *(RedisNames.piece(name, number) for number in range(pieces))]
        ask_all(self._servers, [(one, pack((b"UNLINK", one))) for one in names])

    def _joined(self, name: bytes, landing: _Landing, stored_bytes: int, out: _Bytes) -> _Bytes:
        """The payload from its pieces."""
        if landing.stored.nbytes != MANIFEST_BYTES or stored_bytes > out.nbytes:
            raise ChunkCorruptError("redis: the value is neither payload nor manifest")
        manifest = Manifest.unpack(landing.stored.tobytes(), stored_bytes)
        stored = out if stored_bytes == out.nbytes else self._room(stored_bytes)
        for number, (start, end) in enumerate(manifest.ranges(stored_bytes)):
            piece = _Piece(stored.data[start:end], landing.checksum)
            if self._get(RedisNames.piece(name, number), piece) is None:
                raise ChunkCorruptError(f"redis: piece {number} of the chunk is lost")
        return stored

    def _set(self, name: bytes, value: Views) -> None:
        self._servers.run(name, lambda lane: lane.set(name, value, self._expiry_ms))

    def _get(self, name: bytes, landing: Landing) -> int | None:
        return self._servers.run(name, lambda lane: lane.get(name, landing))

    def _room(self, nbytes: int) -> _Bytes:
        """Memory of this thread for bytes that don't go straight into a slot; valid until its
        next call."""
        room: _Bytes | None = getattr(self._scratch, "room", None)
        if room is None or room.nbytes < nbytes:
            room = self._scratch.room = np.empty(nbytes, np.uint8)
        return room[:nbytes]


class _Landing:
    """Where a chunk's value lands: the header beside, a payload of its full length straight in
    ``out``, anything else in a room. The checksum is computed block by block: each is still in the
    cache, and the server goes on meanwhile."""

    def __init__(self, out: _Bytes, room: Callable[[int], _Bytes]) -> None:
        self.head = memoryview(bytearray(HEADER_BYTES))
        self.stored = out
        self.checksum = xxhash.xxh3_64()
        self._out = out
        self._room = room

    def place(self, nbytes: int) -> Views:
        """Raises ChunkCorruptError for a length that no chunk of this size has."""
        body_bytes = nbytes - HEADER_BYTES
        if not 0 < body_bytes <= max(self._out.nbytes, MANIFEST_BYTES):
            raise ChunkCorruptError(f"redis: a value of {nbytes} bytes is no chunk of this size")
        is_whole = body_bytes == self._out.nbytes
        self.stored = self._out if is_whole else self._room(body_bytes)
        return [self.head, *_blocks(self.stored.data)]

    def landed(self, view: memoryview) -> None:
        """All but the header counts."""
        if view is not self.head:
            self.checksum.update(view)


class _Piece:
    """Where a piece lands; counts in ``checksum``."""

    def __init__(self, view: memoryview, checksum: xxhash.xxh3_64) -> None:
        self._view = view
        self._checksum = checksum

    def place(self, nbytes: int) -> Views:
        """Raises ChunkCorruptError for a piece of another length."""
        if nbytes != self._view.nbytes:
            raise ChunkCorruptError(
                f"redis: a piece of {nbytes} bytes; {self._view.nbytes} are due"
            )
        return _blocks(self._view)

    def landed(self, view: memoryview) -> None:
        """All of it counts."""
        self._checksum.update(view)


def _blocks(view: memoryview) -> list[memoryview]:
    return [view[at : at + BLOCK_BYTES] for at in range(0, view.nbytes, BLOCK_BYTES)]
