"""RemoteTierContract: what every tier that nodes share does."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Protocol

import numpy as np
import pytest

from kvstore.core.errors import ChunkCorruptError, TierUnavailableError
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, Place, TierName
from kvstore.core.remote_messages import Probe, RemoteClear, RemoteEnter
from kvstore.testing.samples import pattern, sample_header
from kvstore.tiers.base import ChunkForeignError
from kvstore.tiers.remote import RemoteTier

OTHER_NAMESPACE = bytes(range(1, 33))


class RemoteTierBench(Protocol):
    """What RemoteTierContract works on: two tiers, as of two nodes, that are up and share one empty
    store."""

    tier: RemoteTier
    other: RemoteTier

    def swap(self, a: ChunkHeader, b: ChunkHeader, epoch: int) -> None:
        """Let each of two chunks lie under the other's name."""


def place(epoch: int) -> Place:
    """The place of everything in an epoch."""
    return Place(TierName.REDIS, epoch, 0, 0)


def probe_of(*headers: ChunkHeader, shards: tuple[int, ...] = (0,)) -> Probe:
    """A probe for the full parts of these chunks."""
    first = headers[0]
    keys = b"".join(header.key for header in headers)
    return Probe(7, first.tenant, first.namespace, keys, shards, (Part.FULL,))


def epoch_of(tier: RemoteTier, header: ChunkHeader) -> int:
    """The epoch of a chunk's namespace."""
    probed = tier.probe(probe_of(header))
    assert not probed.error
    return probed.epoch


class RemoteTierContract:
    """What every remote tier does. Fixture ``bench``: RemoteTierBench."""

    @pytest.mark.parametrize("nbytes", [1, 4095, 4097, 32_768, 1_000_003])
    def test_what_one_node_writes_the_other_reads(
        self, bench: RemoteTierBench, nbytes: int
    ) -> None:
        """Field case 64: odd sizes, aligned and unaligned buffers; twice over one another."""
        header = sample_header(1, nbytes)
        at = place(epoch_of(bench.tier, header))
        shifted = np.zeros(nbytes + 1, np.uint8)[1:]
        shifted[:] = pattern(2, nbytes)
        for source in (pattern(1, nbytes), shifted):
            bench.tier.write(at, header, source)
            for out in (np.zeros(nbytes, np.uint8), np.zeros(nbytes + 1, np.uint8)[1:]):
                bench.other.read(at, header, out)
                np.testing.assert_array_equal(out, source)

    def test_probes_tell_parts_and_shards(self, bench: RemoteTierBench) -> None:
        """A key is there when all shards of the part are; what isn't closed is told as it is."""
        a, b, c = (sample_header(n, 5000) for n in (1, 2, 3))
        at = place(epoch_of(bench.tier, a))
        b0, b1 = replace(b, shards=2), replace(b, shards=2, shard=1)
        for header in (a, b0, b1, c):
            bench.tier.write(at, header, pattern(1, 5000))
        window = replace(c, part=Part.WINDOW)
        bench.tier.write(at, window, pattern(4, 5000))
        keys = a.key + b.key + c.key
        probe = Probe(9, a.tenant, a.namespace, keys, (0,), (Part.WINDOW, Part.FULL))
        probed = bench.other.probe(probe)
        assert (probed.id, probed.epoch, probed.error) == (9, at.slab, "")
        assert probed.found == (bytes([0, 0, 1]), bytes([1, 1, 1]))
        both = bench.other.probe(probe_of(a, b, c, shards=(0, 1)))
        assert both.found == (bytes([0, 1, 0]),)

    def test_what_is_absent_is_corrupt(self, bench: RemoteTierBench) -> None:
        """It's a miss, and of no other tenant, namespace, epoch, shard or part."""
        header, out = sample_header(1, 5000), np.zeros(5000, np.uint8)
        at = place(epoch_of(bench.tier, header))
        bench.tier.write(at, header, pattern(1, 5000))
        for other in (
            replace(header, tenant="tenant:x"),
            replace(header, namespace=OTHER_NAMESPACE),
            replace(header, key=sample_header(2, 1).key),
            replace(header, shard=1),
            replace(header, part=Part.WINDOW),
        ):
            with pytest.raises(ChunkCorruptError):
                bench.other.read(at, other, out)
        with pytest.raises(ChunkCorruptError):
            bench.other.read(place(at.slab + 1), header, out)

    def test_another_chunk_is_foreign_and_heals(self, bench: RemoteTierBench) -> None:
        """Field case 10: A lies where B is asked for. It's never given out, and once it was seen
        the place is free for the right one."""
        a, b = sample_header(1, 5000), sample_header(2, 5000)
        at = place(epoch_of(bench.tier, a))
        for header in (a, b):
            bench.tier.write(at, header, pattern(header.sequence, 5000))
        bench.swap(a, b, at.slab)
        out = np.zeros(5000, np.uint8)
        with pytest.raises(ChunkForeignError, match="key"):
            bench.other.read(at, b, out)
        assert bench.other.probe(probe_of(a, b)).found == (bytes([1, 0]),)
        bench.tier.write(at, b, pattern(2, 5000))
        bench.other.read(at, b, out)
        np.testing.assert_array_equal(out, pattern(2, 5000))

    def test_a_field_that_differs_is_foreign(self, bench: RemoteTierBench) -> None:
        """Fields that are in no name are compared, too."""
        header = sample_header(1, 5000)
        at = place(epoch_of(bench.tier, header))
        for change in ({"depth": 3}, {"tokens": 32}, {"dtype": "float16"}, {"shards": 4}):
            bench.tier.write(at, header, pattern(1, 5000))
            with pytest.raises(ChunkForeignError, match=next(iter(change))):
                bench.other.read(at, replace(header, **change), np.zeros(5000, np.uint8))

    def test_a_clear_reaches_every_node(self, bench: RemoteTierBench) -> None:
        """Whoever knows the namespace: nothing that was there is found afterwards, also not where
        a node knew the former epoch; other namespaces stay."""
        kept = replace(sample_header(2, 5000), namespace=OTHER_NAMESPACE)
        gone = sample_header(1, 5000)
        for header, model in ((kept, "kept"), (gone, "gone")):
            bench.tier.enter(RemoteEnter(header.tenant, header.namespace, model, ""))
            at = place(epoch_of(bench.tier, header))
            bench.tier.write(at, header, pattern(1, 5000))
        assert epoch_of(bench.other, gone) == at.slab
        cleared = bench.other.clear(RemoteClear(3, None, "gone"))
        assert (cleared.number, cleared.namespaces, cleared.error) == (3, 1, "")
        for tier in (bench.tier, bench.other):
            probed = tier.probe(probe_of(gone))
            assert (probed.epoch > at.slab, probed.found) == (True, (b"\0",))
            assert tier.probe(probe_of(kept)).found == (b"\1",)

    def test_a_clear_finds_what_was_written_without_an_entry(self, bench: RemoteTierBench) -> None:
        """A write that came before its namespace's entry: no clear of its tenant misses it."""
        header = sample_header(1, 5000)
        at = place(epoch_of(bench.tier, header))
        bench.tier.write(at, header, pattern(1, 5000))
        assert bench.other.clear(RemoteClear(1, "somebody", "model")).namespaces == 0
        assert bench.other.clear(RemoteClear(2, header.tenant, "model")).namespaces == 1
        assert bench.tier.probe(probe_of(header)).found == (b"\0",)

    def test_many_threads(self, bench: RemoteTierBench) -> None:
        """Reads, writes and probes at once: all right bytes."""
        headers = [sample_header(n, 100_000) for n in range(8)]
        at = place(epoch_of(bench.tier, headers[0]))
        well: list[ChunkHeader] = []

        def work(header: ChunkHeader) -> None:
            out = np.zeros(100_000, np.uint8)
            for _ in range(5):
                bench.tier.write(at, header, pattern(header.sequence, 100_000))
                assert bench.other.probe(probe_of(header)).found == (b"\1",)
                bench.other.read(at, header, out)
                np.testing.assert_array_equal(out, pattern(header.sequence, 100_000))
            well.append(header)

        threads = [threading.Thread(target=work, args=(header,)) for header in headers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(well) == len(headers)

    def test_stats_count(self, bench: RemoteTierBench) -> None:
        """Operations, bytes and errors add up."""
        header = sample_header(1, 5000)
        at = place(epoch_of(bench.tier, header))
        bench.tier.write(at, header, pattern(1, 5000))
        bench.tier.read(at, header, np.zeros(5000, np.uint8))
        with pytest.raises(ChunkCorruptError):
            bench.tier.read(at, sample_header(2, 5000), np.zeros(5000, np.uint8))
        stats = bench.tier.stats()
        assert (stats.reads, stats.writes, stats.errors) == (1, 1, 1)
        assert (stats.bytes_read, stats.bytes_written) == (5000, 5000)
        assert stats.mode

    def test_a_closed_tier_refuses(self, bench: RemoteTierBench) -> None:
        """At once, and closing twice is fine."""
        header = sample_header(1, 5000)
        at = place(epoch_of(bench.tier, header))
        bench.tier.close()
        bench.tier.close()
        with pytest.raises(TierUnavailableError):
            bench.tier.write(at, header, pattern(1, 5000))
        with pytest.raises(TierUnavailableError):
            bench.tier.read(at, header, np.zeros(5000, np.uint8))
        assert bench.tier.probe(probe_of(header)).error
        assert bench.tier.clear(RemoteClear(1, None, None)).error
