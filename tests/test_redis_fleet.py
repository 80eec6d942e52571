"""Daemons with folders of their own that share one Redis, as a fleet's nodes do, end to end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.messages import HitStatus
from tests.redis_cluster import Cluster
from tests.redis_fleet import Fleet, Member, fleet
from tests.redis_proxy import Fault, Proxy
from tests.redis_rig import (
    ADMIN,
    PASSWORD,
    USER,
    Certificates,
    Server,
    guarded,
    guarded_url,
    standalone,
    tls_server,
    unix_url,
    wait_until,
)
from tests.small_engine import SmallEngine


@pytest.fixture
def made(private_folder: Path) -> Iterator[Fleet]:
    with fleet(private_folder / "f") as one:
        yield one


@pytest.fixture
def server(private_folder: Path) -> Iterator[Server]:
    with standalone(private_folder / "v") as one:
        yield one


def values(server: Server) -> list[bytes]:
    """The names of chunks."""
    return [name for name in server.names() if name.endswith(b":0:0")]


def test_chunks_of_one_node_are_hits_at_another(made: Fleet, server: Server) -> None:
    """And a clear at either reaches both: by the epoch in every name."""
    first, second = made.pair(server.url)
    first.share(1)
    second.load_all(1)
    done = second.daemon.kvstore("clear", "--all", "--json")
    assert done.returncode == 0, done.stderr
    first.share(2)
    assert second.load(1) == 0
    second.load_all(2)


def test_a_chunk_is_written_once_by_many(made: Fleet, server: Server) -> None:
    """Field case 85: four engines at two nodes store the same chunks ten times, all at once."""
    first, second = made.pair(server.url)
    engines = [first.engine, second.engine]
    engines += [SmallEngine(m.daemon.socket, 8, name="other") for m in (first, second)]

    def store_often(engine: SmallEngine) -> None:
        keys = engine.keys(list(range(65)))
        engine.fill(keys)
        for _ in range(10):
            assert engine.store(keys).leading_chunks == 4

    store_often(engines[0])
    first.wait(lambda redis: redis["chunks_written"] == 4)
    threads = [threading.Thread(target=store_often, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    second.wait(lambda redis: redis["chunks_present"] >= 4 and not redis["write_backlog"])
    assert [member.redis()["chunks_written"] for member in (first, second)] == [4, 0]
    assert len(values(server)) == 4
    for engine in engines[2:]:
        engine.__exit__(None, None, None)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_every_codec_keeps_every_chunk(made: Fleet, server: Server, codec: str) -> None:
    """Field case 75: ten chunks are ten values, and all of them come back right."""
    first, second = made.pair(server.url, KVSTORE_REDIS_CODEC=codec)
    first.share(1, chunks=10)
    assert len(values(server)) == 10
    second.load_all(1, chunks=10)


def test_random_evictions_are_misses(made: Fleet, private_folder: Path) -> None:
    """Field case 69: what is left is right, and what isn't there isn't promised again. The server
    may drop the namespace's epoch as well: then all is a miss, until it is shared anew."""
    limits = {"maxmemory": "4mb", "maxmemory_policy": "allkeys-random"}
    with standalone(private_folder / "w", **limits) as small:
        first, second = made.pair(small.url)
        for seed in range(30):
            first.share(seed)
        assert small.info("stats")["evicted_keys"] > 0
        assert sum(second.load(seed) for seed in range(30)) < 120
        wait_until(lambda: shared_and_loaded(first, second, next(SEEDS)), "a whole prompt is hit")
        assert second.stats()["process"]["state"] == "ok"


def shared_and_loaded(first: Member, second: Member, seed: int) -> bool:
    first.share(seed)
    return second.load(seed) == 4


def test_a_full_server_takes_no_more(made: Fleet, private_folder: Path) -> None:
    """OOM under noeviction: stores are acknowledged and served here, refused there and counted."""
    with standalone(private_folder / "w", maxmemory="3mb") as small:
        first, second = made.pair(small.url)
        first.share(0)
        for seed in range(1, 30):
            first.store(seed)
        first.wait(lambda redis: first.stats()["drops"].get("redis_full"))
        assert first.load(29) == 4
        done = [second.load(seed) for seed in range(30)]
        assert done[0] == 4
        assert sum(done) < 120
        assert first.redis()["state"] == "up"


def test_a_pool_of_two_serves_a_hundred_chunks(made: Fleet, server: Server) -> None:
    """Field case 72: who finds no connection free waits, and that is counted."""
    first, second = made.pair(server.url, KVSTORE_REDIS_CONNECTIONS="2")
    first.share(1, chunks=100)
    second.load_all(1, chunks=100)
    figures = second.redis()
    assert figures["connection_waits"] > 0
    assert figures["connection_wait_s"] > 0


def test_refused_connections_cost_a_lookup_nothing(made: Fleet, server: Server) -> None:
    """Field case 77: after the failures the tier is down; a thousand lookups ask nothing of it."""
    with Proxy(server.port) as proxy:
        member = made.member("a", proxy.url)
        member.wait_up()
        proxy.set(Fault.REFUSE)
        for seed in range(100, 104):
            assert member.load(seed) == 0
        member.wait(lambda redis: redis["state"].startswith("down"))
        member.store(1)
        before = member.redis()["probes"]
        keys, beyond = member.prompt(1), member.prompt(1, 8)
        for number in range(1000):
            found = member.engine.worker.lookup(f"r{number}", beyond)
            assert (found.status, found.chunks) == (HitStatus.HIT, len(keys))
        assert member.redis()["probes"] == before
        proxy.set(Fault.NONE)
        member.wait_up()


def test_a_black_hole_at_the_start_delays_nothing(made: Fleet, server: Server) -> None:
    """Field case 45: the daemon is ready and serves; the server appears, and the tier is up."""
    with Proxy(server.port) as proxy:
        proxy.set(Fault.BLACK_HOLE)
        member = made.member("a", proxy.url, KVSTORE_REDIS_CONNECT_TIMEOUT="1s")
        assert member.redis()["state"] != "up"
        member.store(1)
        assert member.load(1) == 4
        assert member.redis()["probes"] == 0
        proxy.set(Fault.NONE)
        member.wait_up()
        member.share(2)


def test_nothing_waits_for_a_server_that_never_answers(made: Fleet, server: Server) -> None:
    """The server is stopped before the first request and goes on after the last answer. Nothing
    that was asked of it has ended meanwhile, well or not: so nothing has waited for it."""
    settings = {"KVSTORE_REDIS_TIMEOUT": "60s", "KVSTORE_REDIS_PROBE_TIMEOUT": "20ms"}
    first, second = made.pair(server.url, **settings)
    first.share(1)
    server.stop()
    try:
        second.store(2)
        second.store(3, chunks=8)
        assert second.load(2) == 4
        found = second.engine.lookup("new", second.prompt(2, 6))
        assert (found.status, found.chunks) == (HitStatus.HIT, 4)
        assert second.load(1) == 0
        assert second.load(3, chunks=8) == 8
        asked = second.redis()
    finally:
        server.go_on()
    assert asked["probes"] > 0
    assert asked["lookups_timed_out"] > 0
    ended = ("probes_failed", "probes_late", "chunks_written", "chunks_present")
    assert [asked[name] for name in ended] == [0] * len(ended)
    assert (asked["state"], asked["breaker_openings"]) == ("up", 0)
    second.wait(lambda redis: redis["chunks_written"] == 12)
    second.load_all(1)


def test_a_lost_node_costs_its_own_chunks(made: Fleet, private_folder: Path) -> None:
    """A Cluster of three: everything spreads; a node dies, nothing hangs and others go on; it
    comes back, and takes chunks again; slots move under way."""
    with Cluster(private_folder / "c") as cluster:
        first, second = made.pair(cluster.url)
        wait_until(
            lambda: shared_whole(cluster, first, []) and all(map(values, cluster.nodes)),
            "every node takes chunks",
        )
        first.share(*range(8))
        second.load_all(0)
        gone = cluster.nodes[0]
        cluster.kill(gone)
        left = chunk_names(cluster)
        for seed in range(1, 8):
            names = [key_in(left, bytes(key)) for key in each(first.prompt(seed))]
            assert second.load(seed) <= [*names, False].index(False)
        first.store(20)
        assert first.load(20) == 4
        cluster.restart(gone)
        for member in (first, second):
            member.wait_up()
        assert moved(cluster, first, second) > 0
        wait_until(lambda: values(gone) or not first.store(next(SEEDS)), "the node takes chunks")


SEEDS = iter(range(1000, 10_000))


def moved(cluster: Cluster, first: Member, second: Member) -> int:
    """Move the slots of a prompt's chunks one by one while others read and write."""
    seeds: list[int] = []
    wait_until(lambda: shared_whole(cluster, first, seeds), "a prompt is in the Cluster, whole")
    target, count = cluster.nodes[2], 0
    for number, key in enumerate(each(first.prompt(seeds[-1]))):
        [name] = [name for name in chunk_names(cluster) if key.hex().encode() in name]
        if cluster.owner(name) is not target:
            source = cluster.begin_migration(cluster.slot(name), target)
            first.store(31 + number)
            cluster.move(source, target, [name])
            second.load(31 + number)
            cluster.end_migration(cluster.slot(name), target)
            count += 1
    second.load_all(seeds[-1])
    return count


def shared_whole(cluster: Cluster, member: Member, seeds: list[int]) -> bool:
    """Whether one prompt more is in Redis: what a node that has just come back doesn't take yet is
    dropped."""
    seeds.append(next(SEEDS))
    member.store(seeds[-1])
    member.wait(lambda redis: not redis["write_backlog"])
    names = chunk_names(cluster)
    return all(key_in(names, key) for key in each(member.prompt(seeds[-1])))


def chunk_names(cluster: Cluster) -> set[bytes]:
    return {name for node in cluster.live() for name in values(node)}


def each(keys: Any) -> list[bytes]:
    return [bytes(key) for key in keys]


def key_in(names: set[bytes], key: bytes) -> bool:
    return any(key.hex().encode() in name for name in names)


SECRET = "wr0ng-s3cret"


def told(member: Member) -> str:
    """All that a daemon says."""
    shown = member.daemon.kvstore("serve", "--print-config").stdout
    stats = member.daemon.kvstore("stats")
    return "\n".join(
        [shown, stats.stdout, stats.stderr, repr(member.stats()), *member.daemon.lines,
         member.daemon.log.read_text()]
    )  # fmt: skip


def test_credentials(made: Fleet, private_folder: Path) -> None:
    """Field case 74: the right ones work, in the address or beside it. Wrong ones are a state, all
    else goes on, and no secret is told anywhere; a password that is changed on the server takes
    the tier down, and changed back brings it up."""
    with guarded(private_folder / "v") as server:
        beside = {"KVSTORE_REDIS_USERNAME": USER, "KVSTORE_REDIS_PASSWORD": PASSWORD}
        first = made.member("a", guarded_url(server))
        second = made.member("b", server.url, **beside)
        for member in (first, second):
            member.wait_up()
        first.share(1)
        second.load_all(1)
        wrong = made.member("c", guarded_url(server, password=SECRET))
        wrong.wait(lambda redis: redis["state"].startswith("auth failed"))
        wrong.store(1)
        assert wrong.load(1) == 4
        assert wrong.load(2) == 0
        for member in (first, second, wrong):
            assert PASSWORD not in (said := told(member))
            assert SECRET not in said
        server.run_as(*ADMIN, "ACL", "SETUSER", USER, "resetpass", ">another")
        server.run_as(*ADMIN, "CLIENT", "KILL", "USER", USER)
        first.wait(lambda redis: redis["state"].startswith("auth failed"))
        server.run_as(*ADMIN, "ACL", "SETUSER", USER, f">{PASSWORD}")
        first.wait_up()


def test_tls(made: Fleet, private_folder: Path) -> None:
    """Field case 74: with a client's certificate of the authority; without one, with a stranger's,
    or where the server's own isn't known the tier is down, and says why."""
    files = Certificates.create(private_folder / "pem")
    with tls_server(private_folder / "t", files) as server:
        url = f"rediss://{server.address}"
        client, other = str(files.client), str(files.other_client)
        ours = {"KVSTORE_REDIS_CA": str(files.ca)}
        right = ours | {"KVSTORE_REDIS_CERT": client, "KVSTORE_REDIS_KEY": client}
        first, second = made.pair(url, **right)
        first.share(1)
        second.load_all(1)
        wrong = {
            "none": ours,
            "strange": ours | {"KVSTORE_REDIS_CERT": other, "KVSTORE_REDIS_KEY": other},
            "ca": right | {"KVSTORE_REDIS_CA": str(files.other_ca)},
        }
        for name, settings in wrong.items():
            member = made.member(name, url, **settings)
            member.wait(lambda redis: redis["state"].startswith("down"))
            member.store(1)
            assert member.load(1) == 4


def test_a_unix_socket_is_an_address(made: Fleet, server: Server) -> None:
    """Field case 74; a database of its own keeps fleets apart."""
    first, second = made.pair(unix_url(server, 3))
    first.share(1)
    second.load_all(1)
    assert server.names() == []
    assert server.info("keyspace")["db3"]["keys"] >= 4
