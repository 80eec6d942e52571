"""The daemon and its Redis: when it starts, what it says, how it stops, and what it isn't without
one. Sharing, faults, TLS and clusters: test_redis_fleet.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conftest import SETTINGS, RunningDaemon, StartDaemon, private_environment, run_kvstore
from tests.redis_proxy import Fault, Proxy
from tests.redis_rig import PASSWORD, USER, Server, guarded, guarded_url, standalone
from tests.small_engine import SmallEngine, tokens

STOP_MAX_S = 10
CHUNKS = 8
Stats = dict[str, Any]


@pytest.fixture
def server(private_folder: Path) -> Iterator[Server]:
    with standalone(private_folder / "v") as server:
        yield server


def up(stats: Stats) -> bool:
    return bool(stats["redis"]["state"] == "up")


def shared(chunks: int) -> Callable[[Stats], bool]:
    """Whether so many chunk parts were written to Redis."""
    return lambda stats: bool(stats["redis"]["chunks_written"] >= chunks)


def health_of(daemon: RunningDaemon) -> int:
    with grpc.insecure_channel(daemon.stats()["process"]["admin"]) as channel:
        request = health_pb2.HealthCheckRequest(service="")
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status)


def everything_said(daemon: RunningDaemon) -> str:
    """Log, start lines, figures as tables and as JSON, and the settings."""
    shown = [daemon.kvstore("stats").stdout, daemon.kvstore("stats", "--json").stdout]
    shown += [daemon.kvstore("serve", "--print-config", *daemon.arguments).stdout]
    return "\n".join([*shown, *daemon.lines, daemon.log.read_text()])


def stored(engine: SmallEngine, seed: int = 0) -> None:
    keys = engine.keys(tokens(CHUNKS, seed))
    engine.fill(keys)
    assert engine.store(keys).leading_chunks == CHUNKS


def test_black_hole_delays_neither_start_nor_engines(
    start_daemon: StartDaemon, server: Server
) -> None:
    """field case 45: the address takes no packet. The daemon is ready, serves, is healthy and says
    what is wrong; no lookup asks Redis. When a server appears the tier is up by itself, and what is
    stored then gets there."""
    with Proxy(server.port) as proxy:
        proxy.set(Fault.BLACK_HOLE)
        daemon = start_daemon(KVSTORE_REDIS_URL=proxy.url)
        assert f"redis    {proxy.address}, standalone, names begin with kvstore" in daemon.lines
        with SmallEngine(daemon.socket, CHUNKS) as engine:
            stored(engine)
            assert engine.load(engine.keys(tokens(CHUNKS))) == CHUNKS
            assert engine.hits(engine.keys(tokens(CHUNKS, seed=1))) == 0
            before = daemon.wait_for_stats(lambda s: s["redis"]["state"].startswith("down: "))
            assert before["process"]["state"] == "ok"
            assert health_of(daemon) == health_pb2.HealthCheckResponse.SERVING
            assert before["redis"]["probes"] == 0
            assert before["redis"]["breaker_openings"] <= 1
            proxy.set(Fault.NONE)
            daemon.wait_for_stats(up)
            stored(engine, seed=2)
            after = daemon.wait_for_stats(shared(CHUNKS))
        assert "up" in daemon.kvstore("stats").stdout
        assert after["redis"]["server"].startswith("Valkey ")
        assert daemon.stop() == 0


def test_wrong_password_is_told_and_nothing_else_breaks(
    start_daemon: StartDaemon, private_folder: Path
) -> None:
    """field case 74: "auth failed" in the figures, the daemon healthy and serving; neither the
    right nor the wrong password is anywhere."""
    with guarded(private_folder / "v") as server:
        url = guarded_url(server, password="wr0ng-w0rd")
        daemon = start_daemon(KVSTORE_REDIS_URL=url)
        daemon.wait_for_stats(lambda s: s["redis"]["state"].startswith("auth failed"))
        with SmallEngine(daemon.socket, CHUNKS) as engine:
            stored(engine)
            assert engine.load(engine.keys(tokens(CHUNKS))) == CHUNKS
        assert health_of(daemon) == health_pb2.HealthCheckResponse.SERVING
        said = everything_said(daemon)
        assert "wr0ng-w0rd" not in said
        assert f"redis://********@{server.address}/0" in said
        assert daemon.stop() == 0


def test_password_may_stand_beside_the_address(
    start_daemon: StartDaemon, private_folder: Path
) -> None:
    """field case 74: in settings of their own, raw: whatever is in it needs no encoding."""
    with guarded(private_folder / "v") as server:
        daemon = start_daemon(
            KVSTORE_REDIS_URL=server.url, KVSTORE_REDIS_USERNAME=USER,
            KVSTORE_REDIS_PASSWORD=PASSWORD,
        )  # fmt: skip
        daemon.wait_for_stats(up)
        with SmallEngine(daemon.socket, CHUNKS) as engine:
            stored(engine)
            daemon.wait_for_stats(shared(CHUNKS))
        assert PASSWORD not in everything_said(daemon)


def test_wrong_address_ends_the_start_without_its_secret(private_folder: Path) -> None:
    """Exit code 2, one line, masked."""
    settings = SETTINGS | {"KVSTORE_REDIS_URL": "redis://u:s3cr3t@host:port"}
    done = run_kvstore(private_environment(private_folder, settings), "serve")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "redis.url=redis://********" in line
    assert "environment KVSTORE_REDIS_URL" in line
    assert "s3cr3t" not in line


@pytest.mark.parametrize("fault", [Fault.BLACK_HOLE, Fault.NONE], ids=["black hole", "stopped"])
def test_stop_beside_a_server_that_answers_nothing(
    start_daemon: StartDaemon, server: Server, fault: Fault
) -> None:
    """SIGTERM while writes and probes wait for a server that is gone, or stopped: the daemon ends
    in order and in time, and what was stored is on NVMe."""
    with Proxy(server.port) as proxy:
        daemon = start_daemon(KVSTORE_REDIS_URL=proxy.url, KVSTORE_REDIS_TIMEOUT="60s")
        daemon.wait_for_stats(up)
        with SmallEngine(daemon.socket, CHUNKS) as engine:
            proxy.set(fault)
            server.stop()
            stored(engine)
            keys = engine.keys(tokens(CHUNKS, seed=3))
            engine.worker.lookup("waits", keys)
            assert daemon.process is not None
            daemon.process.terminate()
            assert daemon.process.wait(STOP_MAX_S) == 0
            assert daemon.wait() == 0
        server.go_on()
    check = json.loads(daemon.kvstore("verify", "--json").stdout)
    assert (check["clean"], check["valid"]) == (True, CHUNKS)


def test_stop_writes_what_waits_while_redis_is_up(
    start_daemon: StartDaemon, server: Server
) -> None:
    """A node that leaves takes nothing with it: what was stored just before gets to Redis, at a
    server that takes its time, too."""
    chunks = 64
    with Proxy(server.port) as proxy:
        proxy.delay_s = 0.01
        daemon = start_daemon(
            KVSTORE_REDIS_URL=proxy.url, KVSTORE_REDIS_TIMEOUT="20s", KVSTORE_NVME_SIZE="off"
        )
        daemon.wait_for_stats(up)
        with SmallEngine(daemon.socket, chunks) as engine:
            keys = engine.keys(tokens(chunks))
            engine.fill(keys)
            proxy.set(Fault.DELAY)
            assert engine.store(keys).leading_chunks == chunks
            assert daemon.stop() == 0
    assert len([name for name in server.names() if name.endswith(b":0:0")]) == chunks


def test_clear_reaches_the_fleet_or_says_that_it_does_not(
    start_daemon: StartDaemon, server: Server
) -> None:
    """With Redis: a clear by alias empties it for everybody, as no name is found any more. Without:
    this node's chunks are gone, exit code 1, and what to do; repeated later it works."""
    daemon = start_daemon(KVSTORE_REDIS_URL=server.url, KVSTORE_NVME_SIZE="off")
    daemon.wait_for_stats(up)
    with SmallEngine(daemon.socket, CHUNKS, "org/one", alias="one") as engine:
        keys = engine.keys(tokens(CHUNKS))
        stored(engine)
        daemon.wait_for_stats(shared(CHUNKS))
        server.stop()
        done = daemon.kvstore("clear", "--model", "one", "--yes")
        assert done.returncode == 1
        assert f"cleared {CHUNKS} chunks in 1 namespaces" in done.stdout
        assert "the fleet's chunks in Redis are NOT cleared: " in done.stderr
        server.go_on()
        daemon.wait_for_stats(up)
        done = daemon.kvstore("clear", "--model", "one", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["fleet"] == {"namespaces": 1, "error": ""}
        assert engine.hits(keys) == 0
        assert daemon.kvstore("clear", "--model", "two", "--yes").returncode == 1


def test_without_redis_nothing_of_it_is_there(daemon: RunningDaemon) -> None:
    """No library, no thread, no row: start time and memory are as if it didn't exist."""
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    for name in ("hiredis", "lz4", "zstd"):
        assert name not in maps
    tasks = Path(f"/proc/{daemon.pid}/task").glob("*/comm")
    assert not [name for task in tasks if "redis" in (name := task.read_text())]
    assert "redis    off" in daemon.lines
    stats = daemon.stats()
    assert stats["redis"]["state"] == "off"
    assert [tier["name"] for tier in stats["tiers"]] == ["host", "nvme"]
    assert "redis" not in daemon.kvstore("stats").stdout


def test_server_that_comes_and_goes_costs_drops_and_nothing_else(
    start_daemon: StartDaemon, server: Server
) -> None:
    """Killed in the middle of stores from two engines at once, and back: no store waits for it,
    what isn't written is counted, and the tier works again by itself."""
    daemon = start_daemon(KVSTORE_REDIS_URL=server.url)
    daemon.wait_for_stats(up)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with SmallEngine(daemon.socket, CHUNKS, name=f"e{number}") as engine:
                for seed in range(20):
                    stored(engine, seed=1000 * number + seed)
        except BaseException as error:  # noqa: BLE001 (handed to the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    server.kill()
    for thread in threads:
        thread.join()
    assert not failures
    server.start()
    daemon.wait_for_stats(up)
    with SmallEngine(daemon.socket, CHUNKS, name="late") as engine:
        before = daemon.stats()["redis"]["chunks_written"]
        stored(engine, seed=77)
        daemon.wait_for_stats(shared(before + CHUNKS))
    stats = daemon.stats()
    assert stats["process"]["state"] == "ok"
    assert stats["traffic"]["stored_chunks"] == 41 * CHUNKS
