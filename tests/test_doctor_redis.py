"""``kvstore doctor --redis URL``: what is wrong with a server as a tier, and what to change."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.doctor_findings import Finding, Status
from kvstore.doctor_redis import examine
from kvstore.tiers.redis_settings import RedisSettings
from tests.conftest import private_environment, run_kvstore
from tests.redis_cluster import Cluster, Sentinels
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
    wait_until,
)
from tests.redis_tiers import opened

GOOD = {"maxmemory": "256mb", "maxmemory_policy": "allkeys-lru"}
NAMES = [
    "redis address", "redis servers", "redis version", "redis role", "redis maxmemory",
    "redis memory", "redis disk", "redis connections", "redis latency", "redis chunk",
]  # fmt: skip
SLOW = ("redis latency", "redis chunk")
"""What a busy machine may be warned of."""


def look(url: str, **settings: object) -> dict[str, Finding]:
    known: dict[str, Any] = {"operation_timeout_s": 30.0, "connect_timeout_s": 30.0}
    return {f.name: f for f in examine(RedisSettings(url, **(known | settings)), 0.020)}


def told(findings: dict[str, Finding], but: tuple[str, ...] = SLOW) -> dict[str, Status]:
    """The checks that didn't go well."""
    return {
        name: finding.status
        for name, finding in findings.items()
        if finding.status is not Status.OK and name not in but
    }


def test_a_good_server_has_nothing_to_change(private_folder: Path) -> None:
    """And nothing is left on it."""
    with standalone(private_folder / "v", **GOOD) as server:
        found = look(server.url)
        assert list(found) == NAMES
        assert told(found) == {}
        assert not any(f.status is Status.FAIL for f in found.values())
        assert found["redis version"].detail.startswith("Valkey 9")
        assert found["redis chunk"].detail.startswith("4 MiB: SET ")
        assert server.names() == []


@pytest.mark.parametrize(
    ("options", "settings", "name", "advice"),
    [
        ({}, {}, "redis maxmemory", "set maxmemory and maxmemory-policy allkeys-lru"),
        ({"maxmemory": "1gb"}, {}, "redis maxmemory", "new chunks are refused"),
        ({"maxmemory": "1gb", "maxmemory_policy": "allkeys-random"}, {}, "redis maxmemory", "hot"),
        ({"maxmemory": "1gb", "maxmemory_policy": "volatile-lru"}, {}, "redis maxmemory", "lru"),
        (GOOD | {"appendonly": "yes"}, {}, "redis disk", "appendonly no"),
        (GOOD | {"maxclients": "40"}, {"connections": 64}, "redis connections", "maxclients"),
        (GOOD | {"maxmemory": "9000gb"}, {}, "redis memory", "below the machine's memory"),
    ],
)
def test_what_to_change_is_said(
    private_folder: Path,
    options: dict[str, str],
    settings: dict[str, object],
    name: str,
    advice: str,
) -> None:
    """A warning each; the chunk goes there and comes back all the same."""
    with standalone(private_folder / "v", **options) as server:
        found = look(server.url, **settings)
    assert told(found) == {name: Status.WARN}
    assert advice in found[name].advice


def test_settings_of_ours_may_be_enough(private_folder: Path) -> None:
    """Our own limit by namespace instead of maxmemory; volatile policies with a TTL."""
    with standalone(private_folder / "v") as server:
        assert told(look(server.url, namespace_bytes=1 << 30)) == {}
    volatile = {"maxmemory": "1gb", "maxmemory_policy": "volatile-lru"}
    with standalone(private_folder / "w", **volatile) as server:
        assert told(look(server.url, ttl_s=60.0)) == {}


def test_a_full_server_fails(private_folder: Path) -> None:
    """OOM is said as such."""
    with standalone(private_folder / "v", maxmemory="3mb") as server:
        chunk = look(server.url)["redis chunk"]
    assert chunk.status is Status.FAIL
    assert "its memory is full" in chunk.detail
    assert "raise maxmemory" in chunk.advice


def test_a_replica_is_no_tier(private_folder: Path) -> None:
    with standalone(private_folder / "a") as first:
        second = standalone(private_folder / "b", replicaof=f"127.0.0.1 {first.port}")
        with second:
            role = look(second.url)["redis role"]
            chunk = look(second.url)["redis chunk"]
            with opened(second.url) as ours:
                wait_until(lambda: ours.tier.stats().state.endswith("takes no writes"), "refused")
    assert role.status is Status.FAIL
    assert "a replica" in role.detail
    assert chunk.advice == "name its master, or use redis+sentinel://"
    assert chunk.detail.count(second.address) == 1


@contextlib.contextmanager
def a_web_server() -> Iterator[str]:
    """Answers whatever comes as one does; gives its host and port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as peer:
                        peer.recv(1 << 16)
                        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_another_kind_of_server_is_named(private_folder: Path) -> None:
    """The address says Cluster, Sentinel, TLS or a database, and the server isn't or hasn't it; or
    it's no Redis at all. Each says so, and what to write instead."""
    with standalone(private_folder / "v") as server, a_web_server() as web:
        wrong = {
            f"redis+cluster://{server.address}": ("is no node of a Cluster", "use redis://"),
            f"redis+sentinel://{server.address}/kv": ("is no Sentinel", "26379"),
            f"rediss://{web}": ("not with TLS", "redis://"),
            f"{server.url}/99": ("no database", "correct the end"),
            f"redis://{web}": ("isn't a Redis", "host or port"),
        }
        for url, (said, advice) in wrong.items():
            found = look(url)["redis servers"]
            assert found.status is Status.FAIL
            assert said in found.detail, found
            assert advice in found.advice, found


def test_credentials_are_checked_and_never_told(private_folder: Path) -> None:
    """Right, wrong, and none; the user's missing rights."""
    with guarded(private_folder / "v", **GOOD) as server:
        right = look(guarded_url(server))
        assert told(right) == {}
        wrong = look(guarded_url(server, password="not-" + PASSWORD))
        none = look(server.url)
        for found in (wrong, none):
            assert list(found) == NAMES[:2]
            assert "auth failed" in found["redis servers"].detail
            assert "redis.password" in found["redis servers"].advice
        shown = repr([right, wrong, none])
        assert PASSWORD not in shown
        assert USER in right["redis address"].detail


def test_rights_that_lack_are_said(private_folder: Path) -> None:
    rules = "~kvstore:* +ping +info +get +exists +unlink"
    with guarded(private_folder / "v", rules, **GOOD) as server:
        chunk = look(guarded_url(server))["redis chunk"]
        server.run_as(*ADMIN, "ACL", "SETUSER", USER, "+set", "-info")
        found = look(guarded_url(server))
    assert chunk.status is Status.FAIL
    assert "NOPERM" in chunk.detail
    assert "+get +set +unlink" in chunk.advice
    assert told(found) == {"redis info": Status.WARN}


def test_tls_needs_its_files(private_folder: Path) -> None:
    """With them all is well; without them, or without TLS, the advice names them."""
    files = Certificates.create(private_folder / "pem")
    with tls_server(private_folder / "t", files, **GOOD) as server:
        url = f"rediss://{server.address}"
        mine = {"ca": str(files.ca), "cert": str(files.client), "key": str(files.client)}
        assert told(look(url, **mine)) == {}
        unknown = look(url)["redis servers"]
        plain = look(server.url)["redis servers"]
    assert (unknown.status, plain.status) == (Status.FAIL, Status.FAIL)
    assert "redis.ca" in unknown.advice
    assert "rediss://" in plain.advice


def test_every_node_of_a_cluster_is_looked_at(private_folder: Path) -> None:
    """All three take a chunk; one of them by its own address is refused as standalone; a dead
    node's slots are missing."""
    with Cluster(private_folder, **GOOD) as cluster:
        found = look(cluster.url)
        assert told(found) == {}
        assert found["redis role"].detail == "3 masters serve all slots"
        assert all(node.calls("set") >= 5 for node in cluster.nodes)
        assert not any(cluster.names().values())
        alone = look(cluster.nodes[0].url)["redis role"]
        assert (alone.status, alone.advice) == (Status.FAIL, "use redis+cluster://")
        cluster.kill(cluster.nodes[0])
        broken = look(cluster.url)
    assert "1 of 3 can't be used" in broken["redis servers"].detail
    assert broken["redis role"].status is Status.FAIL


def test_a_sentinels_master_is_looked_at(private_folder: Path) -> None:
    with Sentinels(private_folder) as sentinels:
        found = look(sentinels.url)
        assert found["redis servers"].detail == "1 of 1 answer"
        assert found["redis role"].status is Status.OK
        assert sentinels.first.calls("set") >= 5
        unknown = look(sentinels.url.replace("/kv/", "/other/"))["redis servers"]
    assert unknown.status is Status.FAIL
    assert "knows no such service" in unknown.detail


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (Fault.REFUSE, "redis servers"),
        (Fault.BLACK_HOLE, "redis servers"),
        (Fault.FLIP, "redis chunk"),
        (Fault.SHORT, "redis chunk"),
        (Fault.CUT, "redis servers"),
        (Fault.GARBAGE, "redis servers"),
    ],
)
def test_what_lies_between_is_found(private_folder: Path, fault: Fault, name: str) -> None:
    """A network or proxy that is broken fails a check, and the command ends."""
    with standalone(private_folder / "v", **GOOD) as server, Proxy(server.port) as proxy:
        proxy.set(fault)
        found = look(proxy.url, operation_timeout_s=5.0, connect_timeout_s=0.5)
    assert found[name].status is Status.FAIL


def cli(folder: Path, url: str, *arguments: str, **settings: str) -> tuple[int, str, str]:
    environment = private_environment(folder, settings)
    done = run_kvstore(environment, "doctor", "--redis", url, *arguments)
    return done.returncode, done.stdout, done.stderr


def test_exit_codes(private_folder: Path) -> None:
    """0 all can be used, 1 one can't, 2 no address; secrets nowhere."""
    server: Server
    with guarded(private_folder / "v") as server:
        secret = {"KVSTORE_REDIS_PASSWORD": PASSWORD, "KVSTORE_REDIS_USERNAME": USER}
        code, out, error = cli(private_folder, server.url, **secret)
        assert (code, error) == (0, "")
        assert "warn  redis maxmemory" in out
        wrong = secret | {"KVSTORE_REDIS_PASSWORD": "wrong-secret"}
        bad = cli(private_folder, server.url, "--json", **wrong)
        assert bad[0] == 1
        assert json.loads(bad[1])["ok"] is False
        assert "auth failed" in bad[1]
        usage = cli(private_folder, "http://user:wrong-secret@host")
        assert usage[0] == 2
        assert "redis+cluster://" in usage[2]
        for text in (out, *bad[1:], *usage[1:]):
            assert PASSWORD not in text
            assert "wrong-secret" not in text


def test_configured_servers_are_checked_with_the_machine(private_folder: Path) -> None:
    """Without ``--redis``, behind the other checks."""
    with standalone(private_folder / "v", **GOOD) as server:
        environment = private_environment(private_folder, {"KVSTORE_REDIS_URL": server.url})
        done = run_kvstore(environment, "doctor", "--json")
    names = [check["name"] for check in json.loads(done.stdout)["checks"]]
    assert done.returncode == 0, done.stdout
    assert names[-len(NAMES) :] == NAMES
    assert "memory" in names
