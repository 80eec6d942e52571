"""The folder of slab files: made, grown, cut anew, full, private, and locked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.core.errors import (
    CapacityError,
    ConfigError,
    TierUnavailableError,
)
from kvstore.testing import pattern, scanned
from kvstore.tiers.block_io import BlockIO
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.slabs import DirectIO, SlabFolder
from tests.nvme_bench import (
    KINDS,
    PAYLOAD_BYTES,
    SLAB_BYTES,
    SLABS,
    SLOT_BYTES,
    WRITER,
    FaultyIO,
    found,
    header,
    holds,
    make_odd,
    place,
    put,
)


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture
def tier(tmp_path: Path, io: FaultyIO) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path / "nvme", SLABS, SLAB_BYTES, DirectIO.AUTO, io)
    tier.open()
    yield tier
    tier.close()


def test_status_names_the_effective_mode(tmp_path: Path) -> None:
    """Field case 64: direct where the file system can, and if not, status says why."""

    class Refuses(BlockIO):
        def preadv(self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int) -> int:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    expected = [
        (DirectIO.AUTO, BlockIO(), "direct"),
        (DirectIO.REQUIRED, BlockIO(), "direct"),
        (DirectIO.OFF, BlockIO(), "buffered (as configured)"),
        (DirectIO.AUTO, Refuses(), "buffered (O_DIRECT refused: Invalid argument)"),
    ]
    for direct, io, mode in expected:
        tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES, direct, io)
        tier.open()
        assert tier.stats().mode == mode
        tier.close()
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES, DirectIO.REQUIRED, Refuses())
    with pytest.raises(TierUnavailableError, match="refuses O_DIRECT"):
        tier.open()
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES)
    tier.open()
    tier.close()


def test_files_are_private(tier: NvmeTier) -> None:
    """Nobody but the daemon's user reads anybody's KV."""
    put(tier, 0, 1)
    tier.save_manifest(())
    assert tier.folder.stat().st_mode & 0o777 == 0o700
    assert {entry.stat().st_mode & 0o777 for entry in tier.folder.iterdir()} == {0o600}


def test_full_device_leaves_no_half_made_file(tier: NvmeTier, io: FaultyIO) -> None:
    """Field case 63: the slab doesn't fit. Nothing is left of it, what was stored is intact, and
    once there is room the same write succeeds."""
    put(tier, 0, 1)
    io.allocate_error = errno.ENOSPC
    with pytest.raises(CapacityError, match="full"):
        put(tier, 8, 2)
    assert [path.name for path in tier.folder.glob("*.kv")] == ["slab_0_16384.kv"]
    assert holds(tier, 0, 1)
    put(tier, 1, 3)
    io.allocate_error = None
    put(tier, 8, 2)
    assert holds(tier, 8, 2)


def test_real_full_file_system(tmp_path: Path) -> None:
    """Field case 63 on a tmpfs of 1 MiB under a limit of 64 MiB: the tier stops growing, goes on
    within its slabs, saves its manifest all the same, and starts again on the full disk."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        tier = NvmeTier(folder, 512, SLAB_BYTES)
        tier.open()
        stored: list[int] = []

        def fill() -> None:
            for number in range(0, 512, 8):
                put(tier, number, number + 1)
                stored.append(number)

        with pytest.raises(CapacityError):
            fill()
        assert stored
        (folder / "rest").write_bytes(bytes(os.statvfs(folder).f_bavail * 4096))
        put(tier, 1, 1000)
        tier.save_manifest(())
        tier.close()
        tier.open()
        assert found(tier) == {number: number + 1 for number in stored} | {1: 1000}
        tier.close()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_few_descriptors_serve_many_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier of thousands of slabs must not run out of descriptors."""
    monkeypatch.setattr("kvstore.tiers.slabs.OPEN_FILES_MAX", 3)
    tier = NvmeTier(tmp_path, 20, SLAB_BYTES)
    tier.open()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(0, 160, 8):
        put(tier, number, number + 1)
    assert all(holds(tier, number, number + 1) for number in range(0, 160, 8))
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    tier.close()


@pytest.mark.parametrize("end", [0, 4095, 4096, 5000, 4096 + PAYLOAD_BYTES - 1, 3 * SLOT_BYTES + 9])
def test_truncated_file_is_scanned_whole_and_grown_on_write(tmp_path: Path, end: int) -> None:
    """A slab file was cut off. Slots beyond its end are free, none is lost; the next write grows
    the file back."""
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES)
    tier.open()
    for number in range(8):
        put(tier, number, number + 1)
    tier.close()
    os.truncate(tmp_path / "slab_0_16384.kv", end)
    tier.open()
    assert len(scanned(tier)) == 8
    whole = end // SLOT_BYTES
    assert found(tier) == {number: number + 1 for number in range(whole)}
    assert [holds(tier, n, n + 1) for n in range(8)] == [True] * whole + [False] * (8 - whole)
    tier.erase(place(7))
    assert (tmp_path / "slab_0_16384.kv").stat().st_size == end
    put(tier, 7, 70)
    assert (tmp_path / "slab_0_16384.kv").stat().st_size == SLAB_BYTES
    assert found(tier) == {number: number + 1 for number in range(whole)} | {7: 70}
    tier.close()


def test_full_device_while_a_file_is_grown_back(tier: NvmeTier, io: FaultyIO) -> None:
    """Field case 63: a truncated file can't be grown; it keeps the whole slots that it has."""
    for number in range(8):
        put(tier, number, number + 1)
    tier.close()
    os.truncate(tier.folder / "slab_0_16384.kv", 3 * SLOT_BYTES + 5000)
    tier.open()
    io.allocate_error = errno.ENOSPC
    with pytest.raises(CapacityError):
        put(tier, 7, 70)
    assert (tier.folder / "slab_0_16384.kv").stat().st_size == 3 * SLOT_BYTES
    assert found(tier) == {0: 1, 1: 2, 2: 3}
    io.allocate_error = None
    put(tier, 7, 70)
    assert found(tier) == {0: 1, 1: 2, 2: 3, 7: 70}


def test_file_removed_while_in_use_is_closed_by_its_last_user(tmp_path: Path) -> None:
    """The descriptor stays good for who has it, and isn't leaked."""
    folder = SlabFolder(tmp_path, SLAB_BYTES, DirectIO.OFF, BlockIO())
    folder.open(SLABS)
    with folder.allocated(place(0)):
        pass
    with folder.existing(0, SLOT_BYTES) as fd:
        folder.remove_all("a test")
        assert os.fstat(fd).st_nlink == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    folder.close()


def test_file_removed_under_the_tier_is_a_miss(tmp_path: Path) -> None:
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES)
    tier.open()
    put(tier, 0, 1)
    tier.close()
    tier.open()
    (tmp_path / "slab_0_16384.kv").unlink()
    assert not holds(tier, 0, 1)
    tier.erase(place(0))
    put(tier, 0, 2)
    assert holds(tier, 0, 2)
    tier.close()


def test_slab_cut_anew_loses_its_old_file(tier: NvmeTier) -> None:
    """The core gives a slab another slot size: never two files of one slab, and no header of the
    old cut is ever found."""
    put(tier, 0, 1)
    put(tier, 8, 2)
    tier.write(place(0, 32_768), header(3), pattern(3, PAYLOAD_BYTES))
    names = sorted(path.name for path in tier.folder.glob("*.kv"))
    assert names == ["slab_0_32768.kv", "slab_1_16384.kv"]
    assert not holds(tier, 0, 1)
    tier.erase(place(0))
    slots = scanned(tier)
    assert sorted(s.place.slot_bytes for s in slots) == [16_384] * 8 + [32_768] * 4
    assert sorted(s.header.sequence for s in slots if s.header) == [2, 3]


def test_limit_is_a_total(tmp_path: Path) -> None:
    """The limit was lowered while the daemon was down: slabs beyond it are gone at start."""
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES)
    tier.open()
    for number in (0, 8, 16, 24):
        put(tier, number, number + 1)
    tier.close()
    tier = NvmeTier(tmp_path, 2, SLAB_BYTES)
    tier.open()
    assert found(tier) == {0: 1, 8: 9}
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == 2 * SLAB_BYTES
    tier.close()


def test_two_files_of_one_slab(tmp_path: Path) -> None:
    """Somebody copied files about: the newer one counts, the other goes, the limit holds."""
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES)
    tier.open()
    put(tier, 0, 1)
    tier.close()
    other = tmp_path / "slab_0_8192.kv"
    other.write_bytes(bytes(SLAB_BYTES))
    os.utime(other, (1, 1))
    tier.open()
    assert found(tier) == {0: 1}
    assert not other.exists()
    tier.close()


def test_unknown_names_are_left_alone_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the tier didn't make, it doesn't touch."""
    names = ["notes.txt", "slab_1_5000.kv", "slab_01_8192.kv", "slab_x_8192.kv", "slab_1_16384.kv~"]
    for name in names:
        (tmp_path / name).write_text("mine")
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES)
    tier.open()
    assert scanned(tier) == []
    put(tier, 8, 1)
    tier.close()
    assert all((tmp_path / name).read_text() == "mine" for name in names)
    assert all(name in caplog.text for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_costs_only_its_own_slab(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder, a pipe or a link has a slab's name. Every chunk beside it is found, a write there
    is refused, and whatever it is stays as it is."""
    tier = NvmeTier(tmp_path / "nvme", SLABS, SLAB_BYTES)
    tier.open()
    for number in range(8):
        put(tier, number, number + 1)
    tier.close()
    odd, elsewhere = tier.folder / "slab_1_16384.kv", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    make_odd(odd, kind, elsewhere)
    make_odd(tier.folder / "slab_0_8192.kv", kind, elsewhere)
    mode = odd.lstat().st_mode
    tier.open()
    assert found(tier) == {number: number + 1 for number in range(8)}
    assert "left alone 2 unknown names: slab_0_8192.kv, slab_1_16384.kv" in caplog.text
    with pytest.raises(TierUnavailableError, match=r"slab_1_16384\.kv"):
        put(tier, 8, 9)
    put(tier, 16, 17)
    assert holds(tier, 16, 17)
    assert odd.lstat().st_mode == mode
    assert elsewhere.read_bytes() == b"mine"
    tier.close()


def test_second_daemon_is_kept_out(tmp_path: Path) -> None:
    """Two daemons on one folder would overwrite each other: the second is told who has it, and
    gets in once the first is dead."""
    first = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), "1000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert first.stdin is not None
    assert first.stdout is not None
    with first.stdin, first.stdout:
        assert first.stdout.readline() == b"open\n"
        tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES)
        with pytest.raises(TierUnavailableError) as caught:
            tier.open()
        assert str(tmp_path) in str(caught.value)
        assert str(first.pid) in str(caught.value)
        first.kill()
        first.wait()
    tier.open()
    tier.close()


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "nvme"):
        with pytest.raises(ConfigError, match=r"is no folder; set nvme\.path to one"):
            NvmeTier(path, SLABS, SLAB_BYTES).open()


@pytest.mark.parametrize(("slabs", "slab_bytes"), [(0, 8192), (1, 4096), (1, 10_000)])
def test_impossible_sizes_are_refused(tmp_path: Path, slabs: int, slab_bytes: int) -> None:
    with pytest.raises(ConfigError, match="valid are"):
        NvmeTier(tmp_path, slabs, slab_bytes).open()
