"""SlotVector: the buffers that one vectored read or write of a slot goes through."""

from __future__ import annotations

import errno
import os

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import HEADER_BYTES
from kvstore.tiers.block_io import BLOCK_BYTES, BlockIO, aligned_empty

_Bytes = NDArray[np.uint8]


class SlotVector:
    """Header, payload and zeros up to a whole block, as aligned buffers.

    The payload's first ``in_place`` bytes are used where they lie; the rest, a partial last block
    or all of an array that isn't aligned, goes through ``rest``: ``fill`` copies it there before a
    write, ``drain`` copies it back after a read. Borrows the payload.
    """

    def __init__(self, payload: _Bytes, in_place: int, own: _Bytes) -> None:
        self.header = own[:HEADER_BYTES]
        self._payload = payload
        self._in_place = in_place
        self._rest = own[HEADER_BYTES:]
        parts = (self.header, payload[:in_place], self._rest)
        self.parts = [part for part in parts if part.nbytes]
        self.nbytes = sum(part.nbytes for part in self.parts)

    def fill(self, header: bytes) -> None:
        """Make the buffers ready for a write."""
        behind = self._payload.nbytes - self._in_place
        self.header[:] = np.frombuffer(header, np.uint8)
        self._rest[:behind] = self._payload[self._in_place :]
        self._rest[behind:] = 0

    def drain(self) -> None:
        """Complete the payload after a read."""
        behind = self._payload.nbytes - self._in_place
        self._payload[self._in_place :] = self._rest[:behind]

    def read(self, io: BlockIO, fd: int, offset: int) -> int:
        """Read all parts, in as many calls as the system wants; returns the bytes read, fewer
        than ``nbytes`` only at the file's end."""
        done = 0
        while done < self.nbytes:
            got = io.preadv(fd, self._behind(done), offset + done)
            if got < BLOCK_BYTES:
                break
            done += got - got % BLOCK_BYTES
        return done

    def write(self, io: BlockIO, fd: int, offset: int) -> None:
        """Write all parts, in as many calls as the system wants. Raises OSError."""
        done = 0
        while done < self.nbytes:
            put = io.pwritev(fd, self._behind(done), offset + done)
            if put < BLOCK_BYTES:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += put - put % BLOCK_BYTES

    def _behind(self, done: int) -> list[_Bytes]:
        """The parts without their first ``done`` bytes."""
        rest = []
        for part in self.parts:
            if done < part.nbytes:
                rest.append(part[done:])
            done = max(0, done - part.nbytes)
        return rest


def slot_vector(payload: _Bytes, direct: bool) -> SlotVector:
    """The buffers for a payload; ``direct``: I/O needs alignment."""
    in_place = payload.nbytes - payload.nbytes % BLOCK_BYTES
    if direct and payload.ctypes.data % BLOCK_BYTES:
        in_place = 0
    rest = payload.nbytes - in_place
    return SlotVector(payload, in_place, aligned_empty(HEADER_BYTES + rest + -rest % BLOCK_BYTES))
