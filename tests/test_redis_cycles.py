"""The daemon collects no cycles (gc is off): what the Redis tier does again and again for months
must leave none, or memory grows for as long as a server is down."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import KVStoreError
from kvstore.testing import pattern, sample_header
from kvstore.testing.remote_tiers import epoch_of, place, probe_of
from kvstore.tiers.redis_connect import login_of
from kvstore.tiers.redis_hosts import RedisHosts
from kvstore.tiers.redis_settings import RedisSettings
from tests.redis_rig import Server, free_port, guarded, guarded_url, standalone
from tests.redis_tiers import opened, up

TIMES = 200


@pytest.fixture
def server(private_folder: Path) -> Iterator[Server]:
    with standalone(private_folder / "r") as made:
        yield made


def left_by(work: Callable[[], object]) -> int:
    """Objects that only a collector could free after this was done TIMES times."""
    for _ in range(10):
        with suppress(KVStoreError):
            work()
    gc.collect()
    gc.disable()
    try:
        for _ in range(TIMES):
            with suppress(KVStoreError):
                work()
        return gc.collect()
    finally:
        gc.enable()


def connecting(url: str, host: str, port: int) -> Callable[[], None]:
    settings = RedisSettings(url)
    return lambda: RedisHosts(settings).find(host, port, login_of(settings)).close()


def test_connecting_leaves_no_cycles(server: Server, private_folder: Path) -> None:
    """To a server that is there, to none, to a socket that isn't there, with a wrong password."""
    nobody = free_port()
    assert left_by(connecting(server.url, "127.0.0.1", server.port)) < TIMES
    assert left_by(connecting(f"redis://127.0.0.1:{nobody}", "127.0.0.1", nobody)) < TIMES
    assert left_by(connecting(f"redis://localhost:{nobody}", "localhost", nobody)) < TIMES
    assert left_by(connecting("redis://no..name", "no..name", nobody)) < TIMES
    assert left_by(connecting("unix:///nowhere", "/nowhere", 0)) < TIMES
    with guarded(private_folder / "g") as other:
        url = guarded_url(other, password="wrong")
        assert left_by(connecting(url, "127.0.0.1", other.port)) < TIMES


def test_using_a_tier_leaves_no_cycles(server: Server) -> None:
    """Writes, reads, probes and misses on a healthy server."""
    header, absent = sample_header(1, 20_000), sample_header(2, 20_000)
    payload, out = pattern(1, 20_000), np.zeros(20_000, np.uint8)
    with up(server.url) as tier:
        where = place(epoch_of(tier, header))
        assert left_by(lambda: tier.write(where, header, payload)) < TIMES
        assert left_by(lambda: tier.read(where, header, out)) < TIMES
        assert left_by(lambda: tier.read(where, absent, out)) < TIMES
        assert left_by(lambda: tier.probe(probe_of(header))) < TIMES


def test_a_tier_that_is_down_leaves_no_cycles() -> None:
    """What is still asked of it, and what it says."""
    header, out = sample_header(1, 20_000), np.zeros(20_000, np.uint8)
    with opened(f"redis://127.0.0.1:{free_port()}") as found:
        tier = found.tier
        assert left_by(lambda: tier.read(place(1), header, out)) < TIMES
        assert left_by(lambda: tier.write(place(1), header, out)) < TIMES
        assert left_by(lambda: tier.probe(probe_of(header))) < TIMES
        assert left_by(tier.stats) < TIMES
