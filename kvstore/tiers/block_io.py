"""BlockIO: the system calls of direct I/O, and the buffers that it takes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4096
"""What offsets, lengths and addresses of direct I/O are multiples of."""

IN_DEVICE = 4
"""Reads, or writes, of chunks that a device is given at a time. It ends those that it has together,
so with all threads in it at once nobody would prepare the next ones meanwhile."""


class BlockIO:
    """The system calls on slab files, in one place so that a test can break them."""

    def preadv(self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int) -> int:
        """Read into buffers; returns the bytes read, maybe fewer than asked for."""
        return os.preadv(fd, [buffer.data for buffer in buffers], offset)

    def pwritev(
        self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int, flags: int = 0
    ) -> int:
        """Write buffers; returns the bytes written, maybe fewer than asked for."""
        return os.pwritev(fd, [buffer.data for buffer in buffers], offset, flags)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserve the file's first ``nbytes`` on the device, so that later writes find room."""
        os.posix_fallocate(fd, 0, nbytes)


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """An uninitialised buffer that starts at a multiple of BLOCK_BYTES."""
    buffer = np.empty(nbytes + BLOCK_BYTES, np.uint8)
    start = -buffer.ctypes.data % BLOCK_BYTES
    return buffer[start : start + nbytes]
