"""Contract suites that every Pages, Tier, RemoteTier and Codec passes, ours and others'; and
FaultyTier.

A suite is a class of tests. To check an implementation, subclass it under a name that pytest
collects and give it the fixture that it names::

    class TestMyTier(TierContract):
        @pytest.fixture
        def bench(self, tmp_path):
            with MyTierBench(tmp_path) as bench:
                yield bench

Needs pytest, which the daemon doesn't.
"""

from kvstore.testing.codecs import CodecContract
from kvstore.testing.faults import FaultyTier, SlabBytes
from kvstore.testing.pages import LAYOUTS, MEMORY_BYTES, PagedBench, PagesContract, chunk_blocks
from kvstore.testing.remote_tiers import RemoteTierBench, RemoteTierContract
from kvstore.testing.samples import packed, pattern, sample_header
from kvstore.testing.tiers import TierBench, TierContract, scanned

__all__ = [
    "LAYOUTS",
    "MEMORY_BYTES",
    "CodecContract",
    "FaultyTier",
    "PagedBench",
    "PagesContract",
    "RemoteTierBench",
    "RemoteTierContract",
    "SlabBytes",
    "TierBench",
    "TierContract",
    "chunk_blocks",
    "packed",
    "pattern",
    "sample_header",
    "scanned",
]
