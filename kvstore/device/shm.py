"""HostMapping: an engine's shared host memory, mapped into the daemon.

Only a memfd sealed against shrinking is taken: a file that its owner can truncate would kill the
daemon with SIGBUS at the next copy. The seal is checked before the size, so the size can't fall
in between.
"""

from __future__ import annotations

import fcntl
import os

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import LayoutMismatchError
from kvstore.memory import MappedRange, map_shared, populate_in_steps

_WRITE_SEALS = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)


class HostMapping:
    """Mapped engine memory; owned by the session that registered it.

    ``array`` is uint8 [nbytes], writable. ``close`` unmaps it for certain, views of it or not.
    """

    def __init__(self, memory: MappedRange) -> None:
        self.nbytes = memory.nbytes
        self._memory = memory
        self._array: NDArray[np.uint8] | None = np.frombuffer(memory.buffer, np.uint8)

    @property
    def array(self) -> NDArray[np.uint8]:
        """The memory as uint8 [nbytes]; raises ValueError after ``close``."""
        if self._array is None:
            raise ValueError("mapping: closed")
        return self._array

    def close(self) -> None:
        """Unmap the memory, once no Move uses it. Idempotent. A view that is accessed afterwards
        faults; it never reads or writes another's memory."""
        self._array = None
        self._memory.close()


def map_memory(fd: int, nbytes: int) -> HostMapping:
    """Map ``nbytes`` of an engine's memfd and fault them in; may take seconds, holds no
    interpreter lock.

    The descriptor is only used during the call; closing it is up to the caller. Raises
    LayoutMismatchError, in one line, for anything but a writable memfd of at least ``nbytes``
    that is sealed against shrinking, and CapacityError where the pages can't be had.
    """
    if nbytes < 1:
        raise LayoutMismatchError(f"memory: nbytes={nbytes}; valid is 1 or more")
    _check_seals(fd)
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise LayoutMismatchError(
            f"memory: nbytes={nbytes}, but the descriptor has {size}; valid are 1..{size}"
        )
    try:
        memory = map_shared(fd, nbytes)
    except OSError as error:
        raise LayoutMismatchError(
            f"memory: fd={fd} can't be mapped for reading and writing ({error.strerror}); valid "
            "is a memfd opened for both"
        ) from error
    populate_in_steps(memory.address, nbytes)
    return HostMapping(memory)


def _check_seals(fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise LayoutMismatchError(
            f"memory: fd={fd} is no memfd ({error.strerror}); valid is a memfd with F_SEAL_SHRINK"
        ) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise LayoutMismatchError(
            f"memory: seals={seals:#x} lack F_SEAL_SHRINK, so it could be cut off while in use; "
            "valid is a memfd sealed against shrinking"
        )
    if seals & _WRITE_SEALS:
        raise LayoutMismatchError(
            f"memory: seals={seals:#x} forbid writing; valid is a memfd that can be written"
        )
