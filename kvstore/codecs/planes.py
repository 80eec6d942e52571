"""PlaneCodec: compresses the bytes of equal significance of all elements together.

A floating-point number's sign and exponent repeat from element to element, its mantissa is noise.
Where they alternate, a compressor finds next to nothing; split into *planes* (the first bytes of
all elements, the second ones, ...), one plane shrinks to a third and the others are left as they
are, at the price of a copy. So elements are cut into blocks, each block into its planes, and each
plane is stored compressed, or as it is where a sample of it doesn't shrink. A block's planes stay
within a core's cache, and bound what is allocated beside the result.

What is stored, all integers little-endian::

    1 byte       bytes an element: 1, 2 or 4
    7 bytes      zero
    4 bytes each stored length of every plane, block by block, the least significant byte first;
                 the plane's own length means that it is stored as it is
    ...          the planes in this order
    0 to 3 bytes what is left behind the last whole element

All work on planes is done by numpy and the compressor, which hold no interpreter lock meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ChunkCorruptError

BLOCK_ELEMENTS = 1 << 19
"""Elements of a block, and so bytes of a plane: part of the format."""

_HEAD_BYTES = 8
_ITEM_BYTES = (1, 2, 4)
_SAMPLE_BYTES = 4 << 10
_PAYS = 15 / 16
"""The share that must be left at most: less of a gain isn't worth the time to undo it."""

Bytes = NDArray[np.uint8]


class PlaneCodec(ABC):
    """A Codec over split byte planes of elements of ``item_bytes`` bytes, 1, 2 or 4.

    ``item_bytes`` concerns ``encode`` alone: what is stored says how it was split, so any instance
    decodes what another one encoded.
    """

    id: int
    version = 1

    def __init__(self, item_bytes: int = 1) -> None:
        assert item_bytes in _ITEM_BYTES, f"elements of {item_bytes} bytes"
        self._item_bytes = item_bytes

    @abstractmethod
    def _compress(self, plane: Bytes) -> bytes:
        """A plane's bytes, compressed."""

    @abstractmethod
    def _expand(self, stored: Bytes, plane_bytes: int) -> bytes:
        """Undo ``_compress``; raises ChunkCorruptError for anything but ``plane_bytes`` bytes, and
        allocates no more than about that."""

    def encode(self, raw: Bytes) -> Bytes:
        """A new array of at most 15/16 of ``raw``, or ``raw`` itself."""
        size = self._item_bytes
        blocks = _blocks(raw.nbytes // size)
        lengths = np.zeros(len(blocks) * size, "<u4")
        stored = np.empty(int(raw.nbytes * _PAYS), np.uint8)
        used, number = _HEAD_BYTES + lengths.nbytes, 0
        for block in blocks:
            for plane in _split(raw, block, size):
                part = self._smaller(plane)
                if used + part.nbytes > stored.nbytes:
                    return raw
                stored[used : used + part.nbytes] = part
                lengths[number] = part.nbytes
                used, number = used + part.nbytes, number + 1
        rest = raw[raw.nbytes - raw.nbytes % size :]
        if used + rest.nbytes > stored.nbytes:
            return raw
        stored[used : used + rest.nbytes] = rest
        stored[:_HEAD_BYTES] = (size, *bytes(_HEAD_BYTES - 1))
        stored[_HEAD_BYTES : _HEAD_BYTES + lengths.nbytes] = lengths.view(np.uint8)
        return stored[: used + rest.nbytes]

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """Undo ``encode`` into ``out``, which shares no byte with ``stored``; after an error its
        content is undefined."""
        size, lengths = _head(stored, out.nbytes)
        start, parts = _HEAD_BYTES + lengths.nbytes, iter(lengths.tolist())
        for block in _blocks(out.nbytes // size):
            planes = []
            for length in (next(parts) for _ in range(size)):
                planes.append(self._plane(stored[start : start + length], len(block)))
                start += length
            _join(planes, out, block)
        rest = out.nbytes % size
        out[out.nbytes - rest :] = stored[start:]

    def _smaller(self, plane: Bytes) -> Bytes:
        """The plane compressed, or as it is where that doesn't pay."""
        sample = plane[:_SAMPLE_BYTES]
        found = self._compress(sample)
        if len(found) > sample.nbytes * _PAYS:
            return plane
        if sample.nbytes < plane.nbytes:
            found = self._compress(plane)
        return np.frombuffer(found, np.uint8) if len(found) <= plane.nbytes * _PAYS else plane

    def _plane(self, part: Bytes, plane_bytes: int) -> Bytes:
        """A plane from what is stored of it."""
        if part.nbytes == plane_bytes:
            return part
        return np.frombuffer(self._expand(part, plane_bytes), np.uint8)


def _blocks(elements: int) -> list[range]:
    """The elements of each block."""
    starts = range(0, elements, BLOCK_ELEMENTS)
    return [range(start, min(start + BLOCK_ELEMENTS, elements)) for start in starts]


def _words(array: Bytes, block: range, size: int) -> NDArray[np.unsignedinteger]:
    """A block's elements as numbers, in place."""
    return array[block.start * size : block.stop * size].view(f"<u{size}")


def _split(raw: Bytes, block: range, size: int) -> Iterator[Bytes]:
    """A block's planes, the least significant first; each is good until the next."""
    words = _words(raw, block, size)
    plane = np.empty(len(block), np.uint8)
    for number in range(size):
        np.right_shift(words, 8 * number, out=plane, casting="unsafe")
        yield plane


def _join(planes: list[Bytes], out: Bytes, block: range) -> None:
    """Put a block's planes together again."""
    words = _words(out, block, len(planes))
    np.copyto(words, planes[0])
    shifted = np.empty_like(words)
    for number, plane in enumerate(planes[1:], 1):
        np.left_shift(plane, 8 * number, out=shifted, dtype=words.dtype, casting="unsafe")
        np.bitwise_or(words, shifted, out=words)


def _head(stored: Bytes, raw_bytes: int) -> tuple[int, NDArray[np.uint32]]:
    """Bytes an element and the stored lengths; raises ChunkCorruptError unless they fit what is
    stored, byte for byte, and the raw length."""
    head = stored[:_HEAD_BYTES].tolist()
    if len(head) < _HEAD_BYTES or head[0] not in _ITEM_BYTES or any(head[1:]):
        raise ChunkCorruptError("planes: the first bytes are none of this format")
    size = int(head[0])
    elements = raw_bytes // size
    wanted = np.array([len(block) for block in _blocks(elements)], np.uint32).repeat(size)
    table = stored[_HEAD_BYTES : _HEAD_BYTES + wanted.nbytes]
    if table.nbytes < wanted.nbytes:
        raise ChunkCorruptError(f"planes: {stored.nbytes} bytes hold no table of lengths")
    lengths = table.view("<u4")
    total = _HEAD_BYTES + table.nbytes + int(lengths.sum(dtype=np.uint64)) + raw_bytes % size
    if total != stored.nbytes or bool((lengths > wanted).any()):
        raise ChunkCorruptError(f"planes: {stored.nbytes} bytes stored, {total} by their lengths")
    return size, lengths
