"""NvmeTier under the published contract: direct, buffered, short reads and writes, wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.core.messages import Place, TierName
from kvstore.testing import FaultyTier, SlabBytes, TierContract
from kvstore.tiers.block_io import BlockIO
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.slabs import DirectIO

SLOT_BYTES = 4096 + 32_768
SLAB_BYTES = 4 * SLOT_BYTES


class NvmeBench:
    """An NVMe tier of three slabs of four slots."""

    def __init__(self, folder: Path, direct: DirectIO, io: BlockIO | None = None) -> None:
        self.tier: NvmeTier | FaultyTier = NvmeTier(folder, 3, SLAB_BYTES, direct, io)
        self.tier.open()

    def place(self, number: int) -> Place:
        return Place(TierName.NVME, number % 3, number // 3, SLOT_BYTES)

    def reopen(self) -> None:
        self.tier.close()
        self.tier.open()


class ShortIO(BlockIO):
    """A system that never moves more than one block at a time, and that not wholly when it isn't
    direct."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def preadv(self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int) -> int:
        return super().preadv(fd, [buffers[0][: self.nbytes]], offset)

    def pwritev(
        self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int, flags: int = 0
    ) -> int:
        return super().pwritev(fd, [buffers[0][: self.nbytes]], offset, flags)


class TestDirect(TierContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[NvmeBench]:
        bench = NvmeBench(tmp_path, DirectIO.AUTO)
        yield bench
        bench.tier.close()


class TestBuffered(TierContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[NvmeBench]:
        bench = NvmeBench(tmp_path, DirectIO.OFF)
        yield bench
        bench.tier.close()


class TestShortDirect(TierContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[NvmeBench]:
        bench = NvmeBench(tmp_path, DirectIO.AUTO, ShortIO(4096))
        yield bench
        bench.tier.close()


class TestShortBuffered(TierContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[NvmeBench]:
        bench = NvmeBench(tmp_path, DirectIO.OFF, ShortIO(5000))
        yield bench
        bench.tier.close()


class TestFaultyWithoutFaults(TierContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[NvmeBench]:
        bench = NvmeBench(tmp_path, DirectIO.AUTO)
        bench.tier = FaultyTier(bench.tier, SlabBytes(tmp_path))
        yield bench
        bench.tier.close()
