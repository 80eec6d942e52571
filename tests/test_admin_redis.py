"""What administration says of the tier that nodes share: figures, and what a clear did where."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin import AdminService
from kvstore.admin_reply import document, stats_reply
from kvstore.admin_snapshot import InOut, Rates, RedisFigures, Snapshot
from kvstore.cli import main
from kvstore.core.messages import Cleared
from kvstore.core.remote_messages import RemoteCleared
from kvstore.core.stats import RemoteStats
from kvstore.report import render
from tests.test_admin import NOTHING, ScriptedSource
from tests.test_report import snapshot

MIB = 1 << 20
REMOTE = RemoteStats(
    up=True, hits=30, misses=4, probes=9, probes_failed=1, waiting=2, timed_out=3, late=1,
    remembered=5, backlog=6, present=7, written=8,
)  # fmt: skip
UP = RedisFigures(
    state="up", server="Valkey 9.1.2", mode="cluster", nodes=3, codec="lz4", raw_bytes=3 * MIB,
    stored_bytes=2 * MIB, breaker_openings=1, connection_waits=4, connection_wait_s=0.02,
    splits=1, evicted=2,
)  # fmt: skip


def shared(figures: RedisFigures = UP) -> Snapshot:
    """A daemon with Redis."""
    before = snapshot(remote=REMOTE)
    io = {**before.io, "redis": InOut("", 5, 8 * MIB, 0.5, 8, 4 * MIB, 0.5, 0, 2)}
    return dataclasses.replace(before, io=io, redis=figures)


def test_redis_is_a_row_beside_host_and_nvme() -> None:
    """Hits, misses, bytes, what the codec saves, and the state; its room is nobody's to know."""
    figures = document(stats_reply(shared(), Rates()))
    assert [tier["name"] for tier in figures["tiers"]] == ["host", "nvme", "redis"]
    row = figures["tiers"][2]
    assert (row["hits"], row["misses"]) == (30, 4)
    assert (row["io"]["read_bytes"], row["io"]["write_bytes"]) == (8 * MIB, 4 * MIB)
    redis = figures["redis"]
    assert redis["codec_gain"] == 1.5
    assert (redis["probes"], redis["lookups_timed_out"], redis["write_backlog"]) == (9, 3, 6)
    assert json.loads(json.dumps(figures)) == figures
    text = render(figures)
    [line] = [line for line in text.splitlines() if line.startswith("redis  ")]
    assert line.split()[:6] == ["redis", "-", "-", "-", "30", "4"]
    assert "up, lz4 1.50x, 2 failed or gone" in line
    assert "Valkey 9.1.2, cluster, nodes 3, breaker opened 1 times" in text
    assert "waits for a connection 4, 5 ms each" in text
    assert "parts written 8, there already 7, waiting 6" in text
    assert max(len(line) for line in text.splitlines()) <= 180


def test_redis_that_is_off_is_not_shown() -> None:
    """The document says so, the tables don't mention it."""
    figures = document(stats_reply(snapshot(), Rates()))
    assert figures["redis"]["state"] == "off"
    assert "redis" not in render(figures)


def test_redis_that_is_down_says_why_in_its_row() -> None:
    """Beside a state of the daemon that is ok: it serves on without it."""
    reason = "down: 10.0.0.1:6379 can't be reached: Connection refused"
    text = render(document(stats_reply(shared(RedisFigures(state=reason)), Rates())))
    assert text.splitlines()[0].endswith("  ok")
    [row, line] = [line for line in text.splitlines() if line.startswith("redis")]
    assert reason in row
    assert f"redis {reason}  server unknown" in line


class SharingSource(ScriptedSource):
    """A daemon with Redis, in which a clear does what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome = Cleared(2, 7, RemoteCleared(1, 3))

    def snapshot(self, deadline_s: float) -> Snapshot:
        return dataclasses.replace(super().snapshot(deadline_s), redis=UP)

    def clear(self, model: str | None, tenant: str | None, deadline_s: float) -> Cleared:
        super().clear(model, tenant, deadline_s)
        return self.outcome


@pytest.fixture
def source() -> SharingSource:
    return SharingSource()


@pytest.fixture
def service(private_folder: Path, source: SharingSource) -> Iterator[AdminService]:
    service = AdminService(f"unix:{private_folder}/admin.sock", source)
    service.open()
    yield service
    service.close()


def clear(service: AdminService, *arguments: str) -> int:
    return main(["clear", *arguments, "--admin-address", service.address])


def test_clear_says_what_was_cleared_here_and_in_the_fleet(
    service: AdminService, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two things: this node's chunks, and everybody's in Redis; and what neither covers."""
    assert clear(service, "--all", "--yes") == 0
    said = capsys.readouterr().out
    assert "cleared 7 chunks in 2 namespaces from host memory and NVMe of this node" in said
    assert "and 3 namespaces from Redis for all nodes" in said
    assert "other nodes hold in their own host memory and NVMe they keep" in said
    assert clear(service, "--all", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    fleet = {"namespaces": 3, "error": ""}
    assert told == {"namespaces": 2, "chunks": 7, "fleet": fleet}


def test_clear_that_did_not_reach_redis_fails_and_says_what_to_do(
    service: AdminService, source: SharingSource, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node's own chunks are gone; that the fleet's aren't can't be overlooked, by a script
    neither."""
    source.outcome = Cleared(2, 7, RemoteCleared(1, 0, "h:1 can't be reached"))
    assert clear(service, "--all", "--yes") == 1
    said = capsys.readouterr()
    assert "cleared 7 chunks" in said.out
    assert "NOT cleared: h:1 can't be reached" in said.err
    assert "clear again when Redis is up" in said.err
    assert clear(service, "--all", "--json") == 1
    assert json.loads(capsys.readouterr().out)["fleet"]["error"] == "h:1 can't be reached"


def test_clear_of_a_model_that_only_other_nodes_know(
    service: AdminService, source: SharingSource, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes to Redis, whose registry knows; where that doesn't either, it is a typing error."""
    source.outcome = Cleared(0, 0, RemoteCleared(1, 1))
    assert clear(service, "--yes", "--model", "elsewhere") == 0
    assert source.cleared == [("elsewhere", None)]
    source.outcome = Cleared(0, 0, RemoteCleared(2, 0))
    capsys.readouterr()
    assert clear(service, "--yes", "--model", "nobody's") == 1
    assert "is not known here" in capsys.readouterr().err


def test_clear_without_redis_speaks_of_this_node_only(
    service: AdminService, source: SharingSource, capsys: pytest.CaptureFixture[str]
) -> None:
    """No fleet in the answer, none in the text."""
    source.core = NOTHING
    source.outcome = Cleared(2, 7)
    assert clear(service, "--all", "--yes") == 0
    assert "of this node; other nodes keep theirs" in capsys.readouterr().out
    assert clear(service, "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out)["fleet"] is None


def test_typing_error_in_an_option_hides_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    """It may be a password."""
    with pytest.raises(SystemExit):
        main(["serve", "--redis-pasword=s3cr3t"])
    said = capsys.readouterr().err
    assert "did you mean --redis-password?" in said
    assert "s3cr3t" not in said
