"""Codec, and the header that stands before every chunk at rest.

The header is 4096 bytes, all integers little-endian, everything not named here zero:

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
     0      8  magic ``kvchunk\\n``
     8      4  format version, 1
    12      4  kind: 1 a chunk follows, 2 erased (all fields from 16 to 4088 are zero)
    16      8  raw length: payload bytes before the codec
    24      8  stored length: payload bytes that follow the header
    32      8  xxh3-64 (seed 0) of the stored payload
    40      8  global write sequence
    48     32  chunk key
    80     32  parent key (zeros: a root)
   112     32  namespace digest
   144      8  epoch
   152      4  depth: chunks before this one in its chain
   156      4  tokens a chunk
   160      4  shard index
   164      4  shards of the chunk
   168      2  part (layout.Part)
   170      2  dtype code (layout.DTYPES)
   172      2  codec ID
   174      2  codec version
   176      2  tenant length
   178      6  zero
   184    128  tenant, UTF-8, zero-padded
   312   3776  zero: room for fields to come
  4088      8  xxh3-64 (seed 0) of bytes [0, 4088)
======  =====  ==================================================================================

This format is for ever. The header's checksum is over everything before it, the payload's checksum
included, so one flipped bit anywhere is seen, and a header can't be joined to another payload. A
later format gets another version, which this one refuses as corrupt, that is, as a miss.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.core.errors import ChunkCorruptError, LayoutMismatchError
from kvstore.core.keys import KEY_BYTES, NO_PARENT, ChunkKey
from kvstore.core.layout import DTYPES, Part
from kvstore.core.messages import ChunkHeader

HEADER_BYTES = 4096
FORMAT_VERSION = 1
TENANT_BYTES_MAX = 128
CODEC_IDS = {"identity": 0, "lz4": 1, "zstd": 2}
"""Codec IDs at rest: only ever append."""
OTHERS_ID_MIN = 1 << 15
"""Codecs that aren't ours (entry points of the group ``kvstore.codecs``) have IDs from here on."""
SHARDS_MAX = 1024
"""Of an engine: each is a session of its daemon, which has no more. A chunk has room for each."""
SEQUENCES_END = 1 << 63
"""No daemon counts so many writes; one that believed a higher number would soon have none left."""

_MAGIC = b"kvchunk\n"
_KIND_CHUNK, _KIND_ERASED = 1, 2
_PREFIX = struct.Struct("<8sII")
_BODY = struct.Struct("<QQQQ32s32s32sQIIIIHHHHH6x128s")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size
_DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


class Codec(Protocol):
    """A reversible transform of a chunk's payload, on its way to a lower tier and back.

    Guaranteed by the caller: arrays are contiguous uint8; ``out`` has exactly the raw length.

    The implementation is responsible for: deterministic output; working from several threads;
    holding no interpreter lock while it works; raising ChunkCorruptError for input that it didn't
    produce or that doesn't decode to exactly ``out.nbytes``, whatever the input.
    """

    id: int
    """Stands in headers at rest; one of CODEC_IDS, or another's own from OTHERS_ID_MIN on."""
    version: int

    def encode(self, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What to store for ``raw``: a new, shorter array; or ``raw`` itself where encoding doesn't
        pay, and then the header must name the identity. Doesn't mutate ``raw``."""

    def decode(self, stored: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Undo ``encode`` into ``out``, which may be ``stored`` itself only for the identity."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What a tier adds to a ChunkHeader at rest: codec, stored length and xxh3-64 of the stored
    bytes."""

    codec_id: int
    codec_version: int
    stored_bytes: int
    checksum: int


def payload_checksum(payload: NDArray[np.uint8]) -> int:
    """xxh3-64 of a contiguous payload; drops the interpreter lock."""
    return xxhash.xxh3_64_intdigest(payload.data)


def pack(header: ChunkHeader, payload: Payload) -> bytes:
    """The 4096 bytes at rest. Raises LayoutMismatchError for a field that the format can't hold."""
    tenant = header.tenant.encode("utf-8", "surrogatepass")
    if len(tenant) > TENANT_BYTES_MAX:
        raise LayoutMismatchError(
            f"header: tenant has {len(tenant)} bytes; valid are up to {TENANT_BYTES_MAX}"
        )
    for name in ("key", "parent", "namespace"):
        if len(getattr(header, name)) != KEY_BYTES:
            raise LayoutMismatchError(
                f"header: {name} has {len(getattr(header, name))} bytes; valid is {KEY_BYTES}"
            )
    if header.dtype not in DTYPES:
        raise LayoutMismatchError(f"header: dtype={header.dtype!r}; valid are {', '.join(DTYPES)}")
    try:
        body = _BODY.pack(
            header.payload_bytes, payload.stored_bytes, payload.checksum, header.sequence,
            header.key, header.parent, header.namespace, header.epoch, header.depth,
            header.tokens, header.shard, header.shards, header.part, DTYPES[header.dtype],
            payload.codec_id, payload.codec_version, len(tenant), tenant,
        )  # fmt: skip
    except struct.error as error:
        raise LayoutMismatchError(f"header: a number is out of range: {error}") from error
    return _seal(_KIND_CHUNK, body)


def unpack(block: bytes | memoryview | NDArray[np.uint8]) -> tuple[ChunkHeader, Payload]:
    """What the 4096 bytes say. Raises ChunkCorruptError, naming what is wrong, for anything but a
    whole chunk header of this format; an erased or never written block is one, too."""
    kind, data = _open(block)
    if kind != _KIND_CHUNK:
        raise ChunkCorruptError(f"header: kind={kind}, no chunk")
    (
        raw_bytes, stored_bytes, checksum, sequence, key, parent, namespace, epoch, depth, tokens,
        shard, shards, part, dtype, codec_id, codec_version, tenant_bytes, tenant,
    ) = _BODY.unpack_from(data, _PREFIX.size)  # fmt: skip
    if dtype not in _DTYPE_NAMES or part not in _PARTS:
        raise ChunkCorruptError(f"header: dtype={dtype} part={part} are unknown")
    try:
        name = tenant[:tenant_bytes].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ChunkCorruptError("header: tenant is no UTF-8") from error
    header = ChunkHeader(
        key=ChunkKey(key), parent=ChunkKey(parent), depth=depth, tenant=name, namespace=namespace,
        epoch=epoch, dtype=_DTYPE_NAMES[dtype], tokens=tokens, shard=shard, shards=shards,
        part=_PARTS[part], payload_bytes=raw_bytes, sequence=sequence,
    )  # fmt: skip
    return header, Payload(codec_id, codec_version, stored_bytes, checksum)


def is_possible(header: ChunkHeader, payload: Payload, room_bytes: int) -> bool:
    """Whether a whole header can be that of a chunk in so much room: whoever finds one and doesn't
    look for a certain chunk has nothing else to compare it to."""
    fits = 0 < payload.stored_bytes <= room_bytes and 0 < header.payload_bytes <= room_bytes
    counted = header.shard < header.shards <= SHARDS_MAX and header.sequence < SEQUENCES_END
    return fits and counted and (header.parent == NO_PARENT) == (header.depth == 0)


def erased() -> bytes:
    """The 4096 bytes that overwrite the header of a chunk which must never be found again."""
    return _seal(_KIND_ERASED, b"")


def is_free(block: bytes | memoryview | NDArray[np.uint8]) -> bool:
    """Whether the block was erased or never written (all zero), rather than damaged."""
    data = bytes(block)
    return data in (_ERASED, _NEVER_WRITTEN)


def differing_field(found: ChunkHeader, wanted: ChunkHeader) -> str | None:
    """The first field in which a whole header is another chunk's, so the read is FOREIGN; None if
    it is the chunk asked for. ``sequence`` doesn't count: it says when, not what."""
    for name in _COMPARED:
        if getattr(found, name) != getattr(wanted, name):
            return name
    return None


_COMPARED = tuple(field.name for field in fields(ChunkHeader) if field.name != "sequence")


def _seal(kind: int, body: bytes) -> bytes:
    data = (_PREFIX.pack(_MAGIC, FORMAT_VERSION, kind) + body).ljust(_CHECKED_BYTES, b"\0")
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def _open(block: bytes | memoryview | NDArray[np.uint8]) -> tuple[int, bytes]:
    """Kind and bytes of a block whose checksum, magic and version are right."""
    data = bytes(block)
    if len(data) != HEADER_BYTES:
        raise ChunkCorruptError(f"header: {len(data)} bytes of {HEADER_BYTES}")
    magic, version, kind = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise ChunkCorruptError("header: no magic, nothing was written here")
    (checksum,) = _CHECKSUM.unpack_from(data, _CHECKED_BYTES)
    if checksum != xxhash.xxh3_64_intdigest(data[:_CHECKED_BYTES]):
        raise ChunkCorruptError("header: checksum is wrong")
    if version != FORMAT_VERSION:
        raise ChunkCorruptError(f"header: format version {version}; this one reads 1")
    return kind, data


_PARTS = {int(part): part for part in Part}
_ERASED = erased()
_NEVER_WRITTEN = bytes(HEADER_BYTES)
