"""Spares: files written ahead take a slab's place, hold zeros, and never pass the tier's limit."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.messages import Place, TierName
from kvstore.testing import pattern
from kvstore.tiers import manifest, spares
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.slab_files import UNFINISHED_SPARE_NAME, slab_files
from kvstore.tiers.slabs import DirectIO
from tests.link_rig import eventually
from tests.nvme_bench import (
    PAYLOAD_BYTES,
    SLAB_BYTES,
    SLABS,
    FaultyIO,
    crash_and_reopen,
    found,
    header,
    holds,
    put,
)

AHEAD = 2 * SLAB_BYTES


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread doesn't pause, and writes a slab in two steps."""
    monkeypatch.setattr(spares, "STEP_BYTES", SLAB_BYTES // 2)
    for name in ("REST_S", "BUSY_PAUSE_S", "ENOUGH_PAUSE_S", "FAILED_PAUSE_S"):
        monkeypatch.setattr(spares, name, 0.001)


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture
def tier(tmp_path: Path, io: FaultyIO) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES, DirectIO.AUTO, io, AHEAD)
    tier.open()
    yield tier
    tier.close()


def settle(tier: NvmeTier, ahead_bytes: int = AHEAD) -> None:
    """Wait until so much is written ahead."""
    eventually(lambda: tier.stats().ahead_bytes == ahead_bytes)


def looked_in_vain(tier: NvmeTier) -> None:
    """Begin to write ahead; the thread has looked some times whether it may, and it may not."""
    seen, looks = threading.Event(), iter(range(3))

    def idle_s() -> float:
        if next(looks, None) is None:
            seen.set()
        return tier._counter.idle_s()

    tier._files.open_spares(AHEAD, idle_s)
    assert seen.wait(60)
    assert not (tier.folder / UNFINISHED_SPARE_NAME).exists()


def files(tier: NvmeTier) -> int:
    """Files that count against the limit."""
    names = os.listdir(tier.folder)
    return sum(name.startswith(("slab_", "spare")) for name in names)


def test_spares_are_whole_files_of_zeros(tier: NvmeTier) -> None:
    """As many as asked for, all of their extents written."""
    settle(tier)
    names = slab_files(tier.folder, SLAB_BYTES).spares
    assert len(names) == 2
    for name in names:
        path = tier.folder / name
        assert path.read_bytes() == bytes(SLAB_BYTES)
        assert path.stat().st_blocks * 512 >= SLAB_BYTES
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_slab_that_is_cut_takes_a_spare(tier: NvmeTier, io: FaultyIO) -> None:
    """No file is made then, another spare is; what was written is found, the other slots are
    free."""
    settle(tier)
    calls = io.calls.count("allocate")
    put(tier, 3, 7)
    assert io.calls.count("allocate") == calls
    assert holds(tier, 3, 7)
    settle(tier)
    assert found(tier) == {3: header(7).sequence}
    assert slab_files(tier.folder, SLAB_BYTES).strange == []


def test_a_spare_that_somebody_removed_costs_no_slab(tier: NvmeTier) -> None:
    """An administrator tidies up under a running daemon. A new slab takes the next spare or makes
    its file anew, and spares are written again."""
    settle(tier)
    for path in tier.folder.glob("spare_*.kv"):
        path.unlink()
    put(tier, 3, 7)
    assert holds(tier, 3, 7)
    settle(tier)


def test_a_spare_is_cut_to_whole_slots(tier: NvmeTier) -> None:
    """Slots of a size that doesn't divide the slab: the file ends with the last of them."""
    settle(tier)
    slot_bytes = 20_480
    where = Place(TierName.NVME, 1, 2, slot_bytes)
    tier.write(where, header(5), pattern(5, PAYLOAD_BYTES))
    out = np.zeros(PAYLOAD_BYTES, np.uint8)
    tier.read(where, header(5), out)
    np.testing.assert_array_equal(out, pattern(5, PAYLOAD_BYTES))
    path = tier.folder / f"slab_1_{slot_bytes}.kv"
    assert path.stat().st_size == SLAB_BYTES // slot_bytes * slot_bytes


def test_the_limit_holds_with_spares(tier: NvmeTier) -> None:
    """Slabs and spares together are never more than the tier may have; the last slabs are made of
    the last spares."""
    for slab in range(SLABS):
        settle(tier, min(AHEAD, (SLABS - slab) * SLAB_BYTES))
        assert files(tier) <= SLABS
        put(tier, slab * (SLAB_BYTES // 16_384), slab + 1)
        assert files(tier) <= SLABS
    settle(tier, 0)
    assert all(holds(tier, slab * (SLAB_BYTES // 16_384), slab + 1) for slab in range(SLABS))


def test_an_unfinished_spare_gives_way_to_a_slab(tmp_path: Path) -> None:
    """The tier's only file is being written ahead when its slab is wanted: the slab comes first,
    and the limit holds."""
    started, go = threading.Event(), threading.Event()

    class Slow(FaultyIO):
        def pwritev(self, fd, buffers, offset, flags=0):  # type: ignore[no-untyped-def]
            if threading.current_thread().name == "nvme-spares" and offset == 0:
                done = super().pwritev(fd, buffers, offset, flags)
                started.set()
                return done
            if threading.current_thread().name == "nvme-spares":
                go.wait(60)
            return super().pwritev(fd, buffers, offset, flags)

    tier = NvmeTier(tmp_path, 1, SLAB_BYTES, DirectIO.AUTO, Slow(), SLAB_BYTES)
    tier.open()
    assert started.wait(60)
    go.set()
    put(tier, 0, 1)
    assert holds(tier, 0, 1)
    assert files(tier) == 1
    tier.close()


def test_finished_spares_outlive_a_restart_and_a_half_done_one_doesnt(tier: NvmeTier) -> None:
    """A clean stop and a crash; one of a wrong size, or too many, are removed."""
    settle(tier)
    inodes = {os.stat(tier.folder / n).st_ino for n in slab_files(tier.folder, SLAB_BYTES).spares}
    tier.close()
    (tier.folder / UNFINISHED_SPARE_NAME).write_bytes(b"half")
    (tier.folder / "spare_7.kv").write_bytes(b"short")
    tier.open()
    assert not (tier.folder / "spare_7.kv").exists()
    settle(tier)
    names = slab_files(tier.folder, SLAB_BYTES).spares
    assert {os.stat(tier.folder / n).st_ino for n in names} == inodes


def test_a_tier_that_keeps_none_removes_them(tier: NvmeTier) -> None:
    """The setting was switched off: their place on the disk is given back."""
    settle(tier)
    tier.close()
    other = NvmeTier(tier.folder, SLABS, SLAB_BYTES)
    other.open()
    assert slab_files(tier.folder, SLAB_BYTES).spares == []
    other.close()


def test_without_a_manifest_spares_go_too(tier: NvmeTier) -> None:
    """Nothing says what they held before."""
    settle(tier)
    tier.close()
    names = slab_files(tier.folder, SLAB_BYTES).spares
    (tier.folder / names[0]).write_bytes(pattern(1, SLAB_BYTES).tobytes())
    (tier.folder / manifest.FILE_NAME).unlink()
    tier.open()
    settle(tier)
    for name in slab_files(tier.folder, SLAB_BYTES).spares:
        assert (tier.folder / name).read_bytes() == bytes(SLAB_BYTES)


def test_a_full_disk_leaves_no_half_made_spare_and_is_tried_again(
    tmp_path: Path,
) -> None:
    """The tier goes on without; when there is room, files are written ahead again."""
    full = threading.Event()
    full.set()
    refused = threading.Event()

    class Full(FaultyIO):
        def pwritev(self, fd, buffers, offset, flags=0):  # type: ignore[no-untyped-def]
            if full.is_set() and offset and threading.current_thread().name == "nvme-spares":
                refused.set()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().pwritev(fd, buffers, offset, flags)

    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES, DirectIO.AUTO, Full(), AHEAD)
    tier.open()
    assert refused.wait(60)
    put(tier, 0, 1)
    assert holds(tier, 0, 1)
    assert tier.stats().ahead_bytes == 0
    full.clear()
    settle(tier)
    tier.close()


def test_nothing_is_written_ahead_while_the_tier_is_at_work(
    tmp_path: Path,
) -> None:
    """A read or write that runs goes first, however long it takes."""
    io = FaultyIO()
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES, DirectIO.AUTO, io, 0)
    tier.open()
    put(tier, 0, 1)
    io.half_way = threading.Barrier(2)
    writer = threading.Thread(target=put, args=(tier, 1, 2))
    writer.start()
    io.half_way.wait(60)
    looked_in_vain(tier)
    assert tier.stats().ahead_bytes == 0
    io.half_way.wait(60)
    writer.join(60)
    io.half_way = None
    settle(tier)
    tier.close()


def test_nothing_is_written_ahead_right_behind_the_tier_s_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that stores is at work as well: zeros wait until it has paused."""
    monkeypatch.setattr(spares, "REST_S", 1e9)
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES, DirectIO.AUTO, FaultyIO(), 0)
    tier.open()
    put(tier, 0, 1)
    looked_in_vain(tier)
    monkeypatch.setattr(spares, "REST_S", 0.001)
    settle(tier)
    tier.close()


def test_chunks_survive_a_crash_beside_spares(tier: NvmeTier) -> None:
    """A slab made of a spare is a slab like any other."""
    settle(tier)
    for number in range(SLAB_BYTES // 16_384 + 2):
        put(tier, number, number + 1)
    crash_and_reopen(tier)
    assert len(found(tier)) == SLAB_BYTES // 16_384 + 2
