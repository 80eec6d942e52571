"""NvmeBench: an NVMe tier of 16 KiB slots on a disk that fails on demand, and what to ask it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ChunkCorruptError
from kvstore.core.messages import ChunkHeader, Place, TierName
from kvstore.testing import pattern, sample_header, scanned
from kvstore.tiers.block_io import BlockIO
from kvstore.tiers.nvme import NvmeTier

SLOT_BYTES = 16_384
SLAB_BYTES = 8 * SLOT_BYTES
PAYLOAD_BYTES = 12_000
SLABS = 4


class FaultyIO(BlockIO):
    """The system's calls, each of which can be replaced for a while."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.write_error: int | None = None
        self.allocate_error: int | None = None
        self.read_error: int | None = None
        self.half_way: threading.Barrier | None = None

    def preadv(self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int) -> int:
        self.calls.append("preadv")
        if self.read_error is not None:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return super().preadv(fd, buffers, offset)

    def pwritev(
        self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int, flags: int = 0
    ) -> int:
        """After half of the bytes of a chunk: an error or a barrier, if asked for."""
        self.calls.append("pwritev")
        if flags or (self.write_error is None and self.half_way is None):
            return super().pwritev(fd, buffers, offset, flags)
        if self.calls.count("pwritev") % 2:
            return super().pwritev(fd, [buffers[0], buffers[1][:4096]], offset)
        if self.write_error is not None:
            raise OSError(self.write_error, os.strerror(self.write_error))
        assert self.half_way is not None
        self.half_way.wait(60)
        self.half_way.wait(60)
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self.calls.append("allocate")
        if self.allocate_error is not None:
            os.ftruncate(fd, nbytes // 2)
            raise OSError(self.allocate_error, os.strerror(self.allocate_error))
        super().allocate(fd, nbytes)


def place(number: int, slot_bytes: int = SLOT_BYTES) -> Place:
    slots = SLAB_BYTES // slot_bytes
    return Place(TierName.NVME, number // slots, number % slots, slot_bytes)


def header(seed: int) -> ChunkHeader:
    return sample_header(seed, PAYLOAD_BYTES)


def put(tier: NvmeTier, number: int, seed: int) -> None:
    tier.write(place(number), header(seed), pattern(seed, PAYLOAD_BYTES))


def holds(tier: NvmeTier, number: int, seed: int) -> bool:
    """Whether a place holds the chunk; what is read is compared to what was written."""
    out = np.zeros(PAYLOAD_BYTES, np.uint8)
    try:
        tier.read(place(number), header(seed), out)
    except ChunkCorruptError:
        return False
    np.testing.assert_array_equal(out, pattern(seed, PAYLOAD_BYTES))
    return True


def found(tier: NvmeTier) -> dict[int, int]:
    """Place number -> sequence of every chunk that a scan reports."""
    slots = SLAB_BYTES // SLOT_BYTES
    return {
        slot.place.slab * slots + slot.place.index: slot.header.sequence
        for slot in scanned(tier)
        if slot.header is not None
    }


KINDS = ("folder", "pipe", "link", "link to nothing")
"""What may have a file's name and is none."""


def make_odd(path: Path, kind: str, target: Path) -> None:
    """Put one of KINDS at a path; links lead to ``target``."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target if kind == "link" else target.with_name("nothing"))


def remove_odd(path: Path) -> None:
    """Remove what ``make_odd`` put there."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


def crash_and_reopen(tier: NvmeTier) -> NvmeTier:
    """Another tier on the folder, which was never marked as cleanly left."""
    tier._files.close()
    tier._lock.release()
    tier._is_open = False
    tier.open()
    return tier


WRITER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from kvstore.testing import pattern, sample_header
from kvstore.core.messages import Place, TierName
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.block_io import BlockIO
from kvstore.tiers.slabs import DirectIO

class Dies(BlockIO):
    left = int(sys.argv[2])
    def pwritev(self, fd, buffers, offset, flags=0):
        Dies.left -= 1
        if Dies.left < 0:
            os.pwritev(fd, [buffers[0].data, buffers[1][:4096].data], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwritev(fd, buffers, offset, flags)

tier = NvmeTier(Path(sys.argv[1]), 4, 131072, DirectIO.AUTO, Dies())
tier.open()
print("open", flush=True)
for n in range(32):
    where = Place(TierName.NVME, n // 8, n % 8, 16384)
    tier.write(where, sample_header(n + 1, 12000), pattern(n + 1, 12000))
sys.stdin.read()
"""
"""A process that writes 32 chunks into argv[1] and kills itself in the middle of write argv[2]."""
