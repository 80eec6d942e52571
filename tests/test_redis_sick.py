"""RedisTier behind a proxy that makes the server sick: never wrong bytes, never a wait without end,
and well again by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import ChunkCorruptError, TierUnavailableError
from kvstore.testing import pattern, sample_header
from kvstore.testing.remote_tiers import place, probe_of
from tests.redis_proxy import Fault, Proxy
from tests.redis_rig import standalone, wait_until
from tests.redis_tiers import Opened, opened, write

NBYTES = 50_000
A, B = sample_header(1, NBYTES), sample_header(2, NBYTES)


@pytest.fixture
def proxy(private_folder: Path) -> Iterator[Proxy]:
    with standalone(private_folder / "r") as server, Proxy(server.port) as made:
        yield made


@pytest.fixture
def ours(proxy: Proxy) -> Iterator[Opened]:
    with opened(proxy.url, connect_timeout_s=0.5, operation_timeout_s=0.5) as made:
        made.wait(True)
        yield made


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE])
def test_a_sick_server_is_a_miss(proxy: Proxy, ours: Opened, fault: Fault) -> None:
    """Reads, writes and probes while the fault lasts: right bytes or an error of ours, A's bytes
    never for B. Afterwards both are written, found and read."""
    tier = ours.tier
    epoch = write(tier, A)
    write(tier, B)
    proxy.set(fault)
    for header in (A, B, A, B):
        out = np.zeros(NBYTES, np.uint8)
        try:
            tier.read(place(epoch), header, out)
        except (ChunkCorruptError, TierUnavailableError):
            continue
        np.testing.assert_array_equal(out, pattern(header.sequence, NBYTES))
    for header in (A, B):
        with contextlib.suppress(TierUnavailableError):
            tier.write(place(epoch), header, pattern(header.sequence, NBYTES))
    probed = tier.probe(probe_of(A, B))
    assert probed.error or len(probed.found[0]) == 2
    proxy.set(Fault.NONE)
    ours.wait(True)
    wait_until(lambda: not tier.probe(probe_of(A)).error, "probes are answered")
    for header in (A, B):
        again = write(tier, header)
        out = np.zeros(NBYTES, np.uint8)
        tier.read(place(again), header, out)
        np.testing.assert_array_equal(out, pattern(header.sequence, NBYTES))


def test_a_server_that_answers_nothing_is_left_alone(proxy: Proxy, ours: Opened) -> None:
    """Field case 45: a black hole opens the breaker; from then on nothing is sent there but by the
    tier's own thread; when it answers again the tier is up without a restart."""
    epoch = write(ours.tier, A)
    proxy.set(Fault.BLACK_HOLE)
    out = np.zeros(NBYTES, np.uint8)
    while ours.is_up:
        with pytest.raises(TierUnavailableError):
            ours.tier.read(place(epoch), A, out)
    seen = proxy.commands["GET"]
    for _ in range(200):
        with pytest.raises(TierUnavailableError, match="is down"):
            ours.tier.read(place(epoch), A, out)
        assert ours.tier.probe(probe_of(A)).error
    assert proxy.commands["GET"] == seen
    proxy.set(Fault.NONE)
    ours.wait(True)
    ours.tier.read(place(epoch), A, out)
    np.testing.assert_array_equal(out, pattern(1, NBYTES))
    assert ours.tier.stats().breaker_openings == 1
