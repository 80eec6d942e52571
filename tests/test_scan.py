"""What a scan finds at start, after a clean stop and after a crash."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.codecs.base import Payload, pack
from kvstore.core.keys import ChunkKey
from kvstore.core.messages import Place, ScannedSlot, TierName
from kvstore.testing import SlabBytes, pattern, sample_header, scanned
from kvstore.tiers.block_io import BlockIO
from kvstore.tiers.nvme import VERIFY_NEWEST, NvmeTier
from kvstore.tiers.slabs import DirectIO
from tests.nvme_bench import (
    PAYLOAD_BYTES,
    SLAB_BYTES,
    SLABS,
    SLOT_BYTES,
    WRITER,
    FaultyIO,
    crash_and_reopen,
    found,
    header,
    holds,
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


def test_scan_comes_in_batches_and_stops_when_told(tmp_path: Path) -> None:
    """More slots than a batch holds; each is reported once; a stop ends the scan early."""
    tier = NvmeTier(tmp_path, 2, 1100 * 8192)
    tier.open()
    for slab in range(2):
        where = Place(TierName.NVME, slab, 1099, 8192)
        tier.write(where, sample_header(slab, 100), pattern(slab, 100))
    slots = scanned(tier)
    assert len({slot.place for slot in slots}) == len(slots) == 2200
    assert [s.header.sequence for s in slots if s.header] == [0, 1]
    stop, batches = threading.Event(), []

    def first_only(batch: object) -> None:
        batches.append(batch)
        stop.set()

    tier.scan(first_only, stop)
    assert len(batches) == 1
    tier.close()


def test_unreadable_slot_does_not_end_the_scan(tier: NvmeTier, io: FaultyIO) -> None:
    """A bad sector: its slot counts as free, the others are found, though all are read at once."""
    for number in range(8):
        put(tier, number, number + 1)
    real = BlockIO.preadv

    def bad_sector(
        self: BlockIO, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int
    ) -> int:
        if offset <= 3 * SLOT_BYTES < offset + sum(buffer.nbytes for buffer in buffers):
            raise OSError(errno.EIO, "bad sector")
        return real(self, fd, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyIO, "preadv", bad_sector)
        assert found(tier) == {n: n + 1 for n in range(8) if n != 3}


def test_slab_that_cannot_be_opened_does_not_end_the_scan(
    tier: NvmeTier, caplog: pytest.LogCaptureFixture
) -> None:
    """One slab file of three can't be opened (here it was removed just now; a dying disk does the
    same): its slots are free, those of the others are found."""
    for number in (0, 8, 16):
        put(tier, number, number + 1)
    tier.close()
    tier.open()
    (tier.folder / "slab_1_16384.kv").unlink()
    slots = scanned(tier)
    assert len({slot.place for slot in slots}) == len(slots) == 24
    assert found(tier) == {0: 1, 16: 17}
    assert "slab 1" in caplog.text


def test_clean_stop_keeps_everything_and_reads_headers_only(tier: NvmeTier, io: FaultyIO) -> None:
    """Field case 60: after a clean stop all chunks are found by their headers, those of a slab of
    small slots by one read."""
    for number in range(16):
        put(tier, number, number + 1)
    tier.close()
    tier.open()
    io.calls.clear()
    assert found(tier) == {number: number + 1 for number in range(16)}
    assert io.calls == ["preadv"] * 2
    assert all(holds(tier, number, number + 1) for number in range(16))


def test_torn_payload_is_never_reported_after_a_crash(tier: NvmeTier) -> None:
    """Field case 65: the newest write has a whole header and half a payload. It's free at the
    next start, and stays so after a clean stop."""
    for number in range(8):
        put(tier, number, number + 1)
    SlabBytes(tier.folder).poke(place(5), 4096 + 8192, bytes(PAYLOAD_BYTES - 8192))
    tier = crash_and_reopen(tier)
    expected = {number: number + 1 for number in range(8) if number != 5}
    assert found(tier) == expected
    tier = crash_and_reopen(tier)
    SlabBytes(tier.folder).poke(place(3), 40, b"\xff")
    expected.pop(3)
    batches: list[ScannedSlot] = []
    tier.scan(batches.extend, threading.Event())
    assert [slot.place for slot in batches if slot.damaged] == [place(3)]
    tier.close()
    tier.open()
    assert found(tier) == expected


@pytest.mark.parametrize(
    "odd",
    [
        {"payload_bytes": 0},
        {"payload_bytes": SLOT_BYTES},
        {"shard": 1},
        {"shards": (1 << 32) - 1},
        {"depth": 3},
        {"parent": ChunkKey(b"p" * 32)},
        {"sequence": (1 << 64) - 1},
    ],
    ids=str,
)
def test_whole_header_of_an_impossible_chunk_is_damage(tier: NvmeTier, odd: dict[str, Any]) -> None:
    """Somebody wrote a header whose checksum is right and which no daemon writes: no bytes, more
    than the slot has, a shard or a parent that can't be, billions of shards, a sequence after
    which there is none."""
    put(tier, 0, 1)
    tier.close()
    raw = pack(replace(header(2), **odd), Payload(0, 1, PAYLOAD_BYTES, 0))
    SlabBytes(tier.folder).poke(place(1), 0, raw)
    tier.open()
    slots = scanned(tier)
    assert [slot.place for slot in slots if slot.damaged] == [place(1)]
    assert [slot.place for slot in slots if slot.header is not None] == [place(0)]


def test_newest_writes_are_verified_wherever_they_lie(tmp_path: Path) -> None:
    """More chunks than are verified, old and new ones mixed: each slot is reported once, and a
    torn one among the newest never."""
    count = VERIFY_NEWEST + 40
    slabs = -(-count // 8)
    tier = NvmeTier(tmp_path, slabs, SLAB_BYTES)
    tier.open()
    sequences = {number: 1 + number * 37 % count for number in range(count)}
    for number, sequence in sequences.items():
        put(tier, number, sequence)
    at_rest = SlabBytes(tmp_path)
    newest = sorted(sequences, key=lambda number: -sequences[number])[:VERIFY_NEWEST]
    torn = (newest[0], newest[-1], min(newest), max(newest))
    for number in set(torn):
        at_rest.flip(place(number), (4096 + 5) * 8)
    tier = crash_and_reopen(tier)
    slots = scanned(tier)
    assert len({slot.place for slot in slots}) == len(slots) == slabs * 8
    assert found(tier) == {n: s for n, s in sequences.items() if n not in torn}
    tier.close()


@pytest.mark.parametrize("writes", [0, 1, 7, 20])
def test_killed_in_the_middle_of_a_write(tmp_path: Path, writes: int) -> None:
    """Field case 65: kill -9 when half of a chunk's bytes are out. All chunks before it are found
    and whole, the torn one is not, and nothing keeps the folder locked."""
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), str(writes)],
        capture_output=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    tier = NvmeTier(tmp_path, SLABS, SLAB_BYTES)
    tier.open()
    assert found(tier) == ({} if not writes else {n: n + 1 for n in range(writes)})
    assert all(holds(tier, number, number + 1) for number in range(writes))
    tier.close()
