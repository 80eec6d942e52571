"""TierContract: what every lower tier does."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
import pytest

from kvstore.core.errors import ChunkCorruptError
from kvstore.core.messages import Place, ScannedSlot
from kvstore.testing.samples import pattern, sample_header
from kvstore.tiers.base import SCAN_BATCH_SLOTS, ChunkForeignError, Tier


class TierBench(Protocol):
    """What TierContract works on: an open tier, and places in it."""

    tier: Tier

    def place(self, number: int) -> Place:
        """One of at least eight places, each with room for 32 KiB of payload."""

    def reopen(self) -> None:
        """Close the tier and open it again."""


class TierContract:
    """What every lower tier does. Fixture ``bench``: TierBench."""

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 32_767, 32_768])
    def test_what_was_written_is_read(self, bench: TierBench, nbytes: int) -> None:
        """Field case 64: odd sizes, with aligned and unaligned buffers."""
        header, payload = sample_header(1, nbytes), pattern(1, nbytes)
        shifted = np.zeros(nbytes + 1, np.uint8)[1:]
        shifted[:] = payload
        for number, source in enumerate((payload, shifted)):
            bench.tier.write(bench.place(number), header, source)
            for out in (np.zeros(nbytes, np.uint8), np.zeros(nbytes + 1, np.uint8)[1:]):
                bench.tier.read(bench.place(number), header, out)
                np.testing.assert_array_equal(out, payload)

    def test_another_chunk_is_foreign(self, bench: TierBench) -> None:
        """Field case 10: A lies where B is asked for. B is told it's foreign, A is intact."""
        a, b = sample_header(1, 5000), sample_header(2, 5000)
        bench.tier.write(bench.place(0), a, pattern(1, 5000))
        with pytest.raises(ChunkForeignError, match="key"):
            bench.tier.read(bench.place(0), b, np.zeros(5000, np.uint8))
        out = np.zeros(5000, np.uint8)
        bench.tier.read(bench.place(0), a, out)
        np.testing.assert_array_equal(out, pattern(1, 5000))

    def test_erased_and_unwritten_are_corrupt(self, bench: TierBench) -> None:
        """Neither is ever found again, and erasing twice or nothing is fine."""
        header, out = sample_header(1, 5000), np.zeros(5000, np.uint8)
        bench.tier.erase(bench.place(0))
        bench.tier.write(bench.place(1), header, pattern(1, 5000))
        bench.tier.erase(bench.place(1))
        bench.tier.erase(bench.place(1))
        for number in (0, 1, 2):
            with pytest.raises(ChunkCorruptError):
                bench.tier.read(bench.place(number), header, out)

    def test_scan_reports_every_slot_once(self, bench: TierBench) -> None:
        """After a restart: chunks with their headers, erased slots as free, nothing twice."""
        headers = [sample_header(n, 3000 + n) for n in range(1, 5)]
        for number, header in enumerate(headers):
            payload = pattern(header.sequence, header.payload_bytes)
            bench.tier.write(bench.place(number), header, payload)
        bench.tier.erase(bench.place(2))
        bench.reopen()
        slots = scanned(bench.tier)
        found = {slot.place: slot.header for slot in slots}
        assert len(found) == len(slots)
        for number in (0, 1, 3):
            assert found[bench.place(number)] == headers[number]
        assert found[bench.place(2)] is None

    def test_stats_count(self, bench: TierBench) -> None:
        """Operations, bytes and errors add up."""
        header = sample_header(1, 5000)
        bench.tier.write(bench.place(0), header, pattern(1, 5000))
        bench.tier.read(bench.place(0), header, np.zeros(5000, np.uint8))
        bench.tier.erase(bench.place(0))
        with pytest.raises(ChunkCorruptError):
            bench.tier.read(bench.place(0), header, np.zeros(5000, np.uint8))
        stats = bench.tier.stats()
        assert (stats.reads, stats.writes, stats.erases, stats.errors) == (1, 1, 1, 1)
        assert stats.bytes_read >= 5000
        assert stats.bytes_written >= 5000
        assert stats.mode


def scanned(tier: Tier) -> list[ScannedSlot]:
    """All slots that a scan reports; checks the size of its batches."""
    batches: list[tuple[ScannedSlot, ...]] = []
    tier.scan(batches.append, threading.Event())
    assert all(0 < len(batch) <= SCAN_BATCH_SLOTS for batch in batches)
    return [slot for batch in batches for slot in batch]
