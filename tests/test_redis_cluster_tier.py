"""RedisTier on a Cluster and behind Sentinels: lost nodes, moving slots, failovers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import ChunkCorruptError, TierUnavailableError
from kvstore.core.messages import ChunkHeader
from kvstore.core.remote_messages import RemoteClear, RemoteEnter
from kvstore.testing import pattern, sample_header
from kvstore.testing.remote_tiers import epoch_of, place, probe_of
from kvstore.tiers.redis import RedisTier
from tests.redis_cluster import Cluster, Sentinels
from tests.redis_rig import wait_until
from tests.redis_tiers import name_of, opened, up

HEADERS = [sample_header(n, 9000) for n in range(60)]
PROBE = probe_of(*HEADERS)


@pytest.fixture
def cluster(private_folder: Path) -> Iterator[Cluster]:
    with Cluster(private_folder) as made:
        yield made


def write(tier: RedisTier, header: ChunkHeader, epoch: int) -> bool:
    """Whether the chunk was written."""
    try:
        tier.write(place(epoch), header, pattern(header.sequence, header.payload_bytes))
    except TierUnavailableError:
        return False
    return True


def hit(tier: RedisTier, header: ChunkHeader, epoch: int) -> bool:
    """Whether it's read; the bytes are right then."""
    out = np.zeros(header.payload_bytes, np.uint8)
    try:
        tier.read(place(epoch), header, out)
    except (ChunkCorruptError, TierUnavailableError):
        return False
    np.testing.assert_array_equal(out, pattern(header.sequence, header.payload_bytes))
    return True


def filled(tier: RedisTier) -> int:
    """Write all chunks; the epoch."""
    epoch = epoch_of(tier, HEADERS[0])
    assert all(write(tier, header, epoch) for header in HEADERS)
    return epoch


def test_chunks_spread_over_the_nodes(cluster: Cluster) -> None:
    """Each node holds some; a probe is one round trip to each, with the epoch."""
    with up(cluster.url) as tier:
        epoch = filled(tier)
        held = [sum(b":epoch:" not in name for name in names) for names in cluster.names().values()]
        assert min(held) > 5
        assert all(hit(tier, header, epoch) for header in HEADERS)
        stats = tier.stats()
        assert (stats.nodes, stats.nodes_up, stats.server_mode) == (3, 3, "cluster")


def test_a_node_of_a_cluster_is_no_single_server(cluster: Cluster) -> None:
    """Two thirds of the names would be elsewhere: the state says which address to use."""
    with opened(cluster.nodes[0].url) as ours:
        wait_until(lambda: "redis+cluster://" in ours.tier.stats().state, "the state says so")
        assert ours.told == []


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_lost_node_costs_its_own_keys(cluster: Cluster, number: int) -> None:
    """Whichever it is, also one with a copy of the epoch: its chunks are misses, the others' are
    hits and written, a clear says that it isn't sure; back again, all goes on."""
    with opened(cluster.url) as ours:
        tier = ours.tier
        ours.wait(True)
        wait_until(lambda: tier.stats().nodes_up == 3, "all nodes are reached")
        tier.enter(RemoteEnter(HEADERS[0].tenant, HEADERS[0].namespace, "m", ""))
        epoch = filled(tier)
        lost = cluster.nodes[number]
        lives = [cluster.owner(name_of(header, epoch)) is not lost for header in HEADERS]
        cluster.kill(lost)
        wait_until(lambda: tier.stats().nodes_up == 2, "the tier has seen it")
        probed = tier.probe(PROBE)
        assert (probed.epoch, probed.error) == (epoch, "")
        assert probed.found == (bytes(lives),)
        assert [hit(tier, header, epoch) for header in HEADERS] == lives
        assert [write(tier, header, epoch) for header in HEADERS] == lives
        assert tier.clear(RemoteClear(1, None, "m")).error
        assert ours.told == [True]
        cluster.restart(lost)
        wait_until(lambda: tier.stats().nodes_up == 3, "it's used again")
        assert tier.clear(RemoteClear(1, None, "m")).error == ""
        assert epoch_of(tier, HEADERS[0]) > epoch
        assert not any(tier.probe(PROBE).found[0])
        filled(tier)


def test_slots_move_during_traffic(cluster: Cluster) -> None:
    """Half moved, a slot answers ASK, then MOVED: every chunk is found, read and written
    throughout."""
    with up(cluster.url) as tier:
        epoch = filled(tier)
        added = cluster.add()
        for header in HEADERS[:6]:
            name = name_of(header, epoch)
            slot = cluster.slot(name)
            source = cluster.begin_migration(slot, added)
            assert hit(tier, header, epoch)
            cluster.move(source, added, [name])
            assert hit(tier, header, epoch)
            assert tier.probe(PROBE).found == (bytes([1] * len(HEADERS)),)
            assert write(tier, header, epoch)
            assert hit(tier, header, epoch)
            cluster.end_migration(slot, added)
            assert hit(tier, header, epoch)
            assert tier.probe(PROBE).found == (bytes([1] * len(HEADERS)),)
        assert len(cluster.names()[added.port]) >= 6
        wait_until(lambda: tier.stats().nodes_up == 4, "the new node is known")


def test_a_namespace_of_a_cluster_has_a_limit(cluster: Cluster) -> None:
    """Whatever node a chunk lies on: beyond the limit tails leave before heads, and their values
    are gone from every node."""
    headers = [replace(sample_header(n, 5000), depth=n) for n in range(10)]
    with up(cluster.url, namespace_bytes=6 * (4096 + 5000), split_bytes=4096) as tier:
        epoch = epoch_of(tier, headers[0])
        assert all(write(tier, header, epoch) for header in headers)
        assert len({cluster.owner(name_of(header, epoch)).port for header in headers}) > 1
        assert tier.probe(probe_of(*headers)).found == (bytes([1] * 6 + [0] * 4),)
        assert tier.stats().evicted == 4
        assert all(hit(tier, header, epoch) for header in headers[:6])
    left = [name for names in cluster.names().values() for name in names]
    for number, header in enumerate(headers):
        values = [name for name in left if name.startswith(name_of(header, epoch))]
        assert bool(values) is (number < 6)


def test_a_failover_is_followed(private_folder: Path) -> None:
    """Sentinel names another master: the tier goes there by itself."""
    with Sentinels(private_folder) as sentinels, opened(sentinels.url) as ours:
        ours.wait(True)
        epoch = epoch_of(ours.tier, HEADERS[0])
        assert write(ours.tier, HEADERS[0], epoch)
        sentinels.fail_over()
        wait_until(
            lambda: write(ours.tier, HEADERS[1], epoch_of_or(ours.tier, epoch)), "it writes again"
        )
        assert ours.is_up
        assert ours.tier.stats().nodes == 1
        assert ours.tier.stats().server_mode == "sentinel"


def epoch_of_or(tier: RedisTier, epoch: int) -> int:
    """The epoch, or this one where nobody tells."""
    return tier.probe(probe_of(HEADERS[0])).epoch or epoch
