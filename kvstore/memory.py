"""Memory that two processes share, and the few system calls on pages that Python lacks.

An engine on a CPU keeps its KV blocks in a memfd: anonymous memory with a descriptor, sealed so
that nobody can shrink it under the daemon's feet. ``create_host_memory`` makes one;
``HostMemory`` and ``CudaMemory`` describe memory at registration.

The calls go through ctypes because that drops the interpreter lock while the kernel works, which
``mmap.madvise`` doesn't (SPEED: a populate of 1 GiB stalls every thread for 0.4 s). They work in
steps, because the kernel holds the address space's lock for each call, and any other thread that
maps memory meanwhile would wait for all of it.

A mapping ends in two stages, so that ending it is both certain and safe. ``MappedRange.close``
replaces the pages by inaccessible ones in one system call: the memory is given back whatever
arrays still point there, and such an array faults instead of reading or writing what was mapped
there since. The bare addresses come back when the last of those arrays is gone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import weakref
from dataclasses import dataclass
from types import TracebackType

from kvstore.core.errors import CapacityError, LayoutMismatchError

PAGE_BYTES = 4096
POPULATE_STEP_BYTES = 8 << 20
"""Pages faulted in by one call: about 10 ms of a memfd, 1 ms of huge pages."""

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MAP_FAILED = ctypes.c_void_p(-1).value
_HUGE_PAGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Engine memory on the host: ``fd`` is a memfd sealed against shrinking, ``nbytes`` its used
    size.

    The descriptor stays the caller's; it is duplicated into the daemon at registration.
    """

    fd: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Engine memory on a GPU: the CUDA IPC handle (64 bytes) of an allocation on the device
    ``device_uuid``; the KV starts ``offset_bytes`` behind the allocation's start."""

    device_uuid: str
    ipc_handle: bytes
    nbytes: int
    offset_bytes: int = 0


class MappedRange:
    """A range of pages mapped into this process, owned by whoever asked for it.

    Every array made of ``buffer`` keeps the addresses (after ``close`` not the pages) until it is
    gone. Without ``close`` the range is unmapped when the last array over it is gone.
    """

    def __init__(self, address: int, nbytes: int, mapped: tuple[int, int]) -> None:
        self.address = address
        self.nbytes = nbytes
        self._mapped = mapped
        self._bytes: ctypes.Array[ctypes.c_ubyte] | None = (ctypes.c_ubyte * nbytes).from_address(
            address
        )
        weakref.finalize(self._bytes, _unmap, *mapped).atexit = False

    @property
    def buffer(self) -> memoryview:
        """A new writable view of the range, bytes [nbytes]; raises ValueError after ``close``."""
        if self._bytes is None:
            raise ValueError("memory: the range is closed")
        return memoryview(self._bytes).cast("B")

    def close(self) -> None:
        """Give the pages back now, whatever still points there. Idempotent. Call it only when
        nothing accesses them any more: a later access faults."""
        if self._bytes is None:
            return
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(self._mapped[0], self._mapped[1], _PROT_NONE, flags, -1)
        self._bytes = None


def map_shared(fd: int, nbytes: int) -> MappedRange:
    """Map the first ``nbytes`` of a descriptor, readable and writable, shared with all who map it.

    The descriptor isn't kept. Raises OSError where the kernel refuses.
    """
    step = max(PAGE_BYTES, os.fstat(fd).st_blksize)
    mapped_bytes = -(-nbytes // step) * step
    address = _map(None, mapped_bytes, _PROT_READ | _PROT_WRITE, _MAP_SHARED, fd)
    return MappedRange(address, nbytes, (address, mapped_bytes))


def map_anonymous(nbytes: int) -> MappedRange:
    """Map ``nbytes`` of private memory, aligned to 2 MiB so that huge pages fit.

    Nothing is touched yet. Raises OSError where the kernel refuses.
    """
    mapped_bytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES + _HUGE_PAGE_BYTES
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    start = _map(None, mapped_bytes, _PROT_READ | _PROT_WRITE, flags, -1)
    address = start + -start % _HUGE_PAGE_BYTES
    return MappedRange(address, nbytes, (start, mapped_bytes))


def advise_huge_pages(address: int, nbytes: int) -> bool:
    """Ask for transparent huge pages in a range; False where the kernel has none."""
    return int(_libc.madvise(address, nbytes, _MADV_HUGEPAGE)) == 0


def populate(address: int, nbytes: int) -> None:
    """Fault in a range for writing without changing its bytes, and without the interpreter lock.

    Call it per POPULATE_STEP_BYTES where other threads map memory too. On a kernel that can't
    (before 5.14) it does nothing: pages are faulted in as they are used. Raises CapacityError
    where there is no memory.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise CapacityError(f"memory: no pages for {nbytes} bytes: {os.strerror(code)}")


def populate_in_steps(address: int, nbytes: int) -> None:
    """``populate`` a whole range, step by step."""
    for start in range(0, nbytes, POPULATE_STEP_BYTES):
        populate(address + start, min(POPULATE_STEP_BYTES, nbytes - start))


class OwnedHostMemory:
    """Shared memory that this process created and owns; a context manager.

    ``buffer`` is a writable memoryview of ``nbytes``. ``close`` closes the descriptor and gives
    up the memory, which stays mapped here until the last array made of ``buffer`` is gone (so a
    tensor over it never dangles), and in the daemon until its session ends.
    """

    def __init__(self, fd: int, memory: MappedRange) -> None:
        self.fd = fd
        self.nbytes = memory.nbytes
        self._memory: MappedRange | None = memory

    @property
    def buffer(self) -> memoryview:
        """A new writable view of the memory; raises ValueError after ``close``."""
        if self._memory is None:
            raise ValueError("memory: the owner is closed")
        return self._memory.buffer

    def describe(self) -> HostMemory:
        """What ``Client.register`` takes."""
        return HostMemory(self.fd, self.nbytes)

    def close(self) -> None:
        """Close the descriptor and let the memory go. Idempotent."""
        if self._memory is not None:
            self._memory = None
            os.close(self.fd)

    def __enter__(self) -> OwnedHostMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def create_host_memory(name: str, nbytes: int) -> OwnedHostMemory:
    """Create ``nbytes`` of zeroed shared memory that an engine can register; ``name`` shows up in
    /proc/PID/maps.

    A memfd, sealed against shrinking, faulted in without holding the interpreter lock. Raises
    LayoutMismatchError for a size below 1 and CapacityError where there isn't enough memory; then
    nothing is left behind.
    """
    if nbytes < 1:
        raise LayoutMismatchError(f"memory: nbytes={nbytes}; valid is 1 or more")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        memory = map_shared(fd, nbytes)
        populate_in_steps(memory.address, nbytes)
    except OSError as error:
        os.close(fd)
        raise CapacityError(f"memory: no {nbytes} bytes to share: {error.strerror}") from error
    except CapacityError:
        os.close(fd)
        raise
    return OwnedHostMemory(fd, memory)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def _unmap(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)
