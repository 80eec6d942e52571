"""The daemon as a process: how it starts, what it refuses, how it ends, and what it keeps."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError
from kvstore.core.eviction import FirstInFirstOut, LeastRecentlyUsed
from kvstore.daemon import policy
from tests.conftest import SETTINGS, RunningDaemon, StartDaemon, private_environment, run_kvstore
from tests.small_engine import CHUNK_BYTES, SmallEngine, tokens

RSS_MAX_BYTES = 120 << 20
STOP_MAX_S = 10


def test_start_tells_sizes_modes_endpoints_and_how_to_connect(daemon: RunningDaemon) -> None:
    """What a person needs, one line each, and the ready line last."""
    text = "\n".join(daemon.lines)
    assert "host     64 MiB: " in text
    assert "nvme     256 MiB: " in text
    assert "direct I/O" in text or "buffered" in text
    assert f"engines  {daemon.socket}" in text
    assert "admin    unix:" in text
    assert f'Client("{daemon.socket}")' in text
    assert daemon.lines[-1].startswith("ready in ")


def test_without_arguments_everything_is_chosen_and_private(private_folder: Path) -> None:
    """No setting at all: sizes from the machine, places under the XDG folders, modes 0600 and
    0700."""
    daemon = RunningDaemon(private_folder, private_environment(private_folder), ())
    daemon.start()
    try:
        runtime = private_folder / "run" / "kvstore"
        for folder in (runtime, daemon.nvme):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
        for path in [*runtime.iterdir(), *daemon.nvme.iterdir()]:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    finally:
        assert daemon.stop() == 0


def test_supervisor_is_told_when_it_is_ready(
    private_folder: Path, start_daemon: StartDaemon
) -> None:
    """READY=1 on NOTIFY_SOCKET, as systemd's units of type notify wait for."""
    path = str(private_folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(path)
        supervisor.settimeout(30)
        start_daemon(NOTIFY_SOCKET=path)
        assert supervisor.recv(100) == b"READY=1"


def test_daemon_has_no_torch_in_it(daemon: RunningDaemon) -> None:
    """Neither as a module nor as a library: torch lives on the engine's side."""
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "numpy" in maps
    for name in ("torch", "transformers", "cupy"):
        assert name not in maps


def test_idle_daemon_is_small_beside_its_arena(daemon: RunningDaemon) -> None:
    """A resource bound: resident memory less the arena, once the arena is wholly touched."""
    daemon.wait_for_stats(lambda s: "pages" in s["tiers"][0]["mode"])
    rollup = Path(f"/proc/{daemon.pid}/smaps_rollup").read_text()
    rss = next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Rss"))
    assert rss - (64 << 20) < RSS_MAX_BYTES


def test_second_daemon_on_the_socket_is_refused(start_daemon: StartDaemon) -> None:
    """One line with the reason and the process; the first goes on."""
    first = start_daemon()
    other = {**first.environment, "KVSTORE_NVME_PATH": str(first.folder / "other")}
    done = run_kvstore(other, "serve")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "kvstore serve: " in last
    assert "another daemon listens there" in last
    assert str(first.pid) in last
    assert first.stats()["process"]["pid"] == first.pid


def test_second_daemon_on_the_folder_is_refused(start_daemon: StartDaemon) -> None:
    """Another socket doesn't help: the folder is locked."""
    first = start_daemon()
    other = {**first.environment, "KVSTORE_SOCKET": str(first.folder / "other.sock")}
    done = run_kvstore(other, "serve")
    assert done.returncode == 1
    assert f"is in use by process {first.pid}" in done.stderr.strip().splitlines()[-1]
    assert not (first.folder / "other.sock").exists()


def test_admin_address_of_another_daemon_is_refused(start_daemon: StartDaemon) -> None:
    """Sockets and folders of its own, but the first's admin address: it ends, the first goes on."""
    first = start_daemon()
    other = {
        **first.environment,
        "KVSTORE_SOCKET": str(first.folder / "other.sock"),
        "KVSTORE_NVME_SIZE": "off",
        "KVSTORE_ADMIN_ADDRESS": first.stats()["process"]["admin"],
    }
    done = run_kvstore(other, "serve")
    assert done.returncode == 1
    assert "another daemon listens there" in done.stderr.strip().splitlines()[-1]
    assert first.stats()["process"]["pid"] == first.pid


def test_clean_stop_keeps_everything_and_a_start_finds_it(start_daemon: StartDaemon) -> None:
    """field case 60: 100 chunks, a clean stop at once (the writes to NVMe are drained), a start:
    100 hits with the right bytes, the gauge is what is on disk, and nothing is written again."""
    daemon = start_daemon()
    with SmallEngine(daemon.socket, 100) as engine:
        keys = engine.keys(tokens(100))
        engine.fill(keys)
        assert engine.store(keys).leading_chunks == 100
        assert daemon.stop() == 0
    check = json.loads(daemon.kvstore("verify", "--json").stdout)
    assert (check["valid"], check["clean"], check["ok"]) == (100, True, True)
    daemon.start()
    before = daemon.wait_for_stats(lambda s: not s["tiers"][1]["scanning"])
    nvme = before["tiers"][1]
    assert nvme["chunks"] == 100
    assert nvme["bytes_used"] >= 100 * CHUNK_BYTES
    with SmallEngine(daemon.socket, 100) as engine:
        keys = engine.keys(tokens(100))
        assert engine.hits(keys) == 100
        assert engine.retrieve(keys).leading_chunks == 100
        assert engine.right_chunks(keys) == 100
    after = daemon.stats()["tiers"][1]
    assert after["io"]["writes"] == 0
    assert after["hits"] >= 100


def test_kill_loses_nothing_that_was_committed(start_daemon: StartDaemon) -> None:
    """field case 60: after kill -9 every chunk that was on NVMe is hit, and no temporary file is
    left."""
    daemon = start_daemon()
    with SmallEngine(daemon.socket, 40) as engine:
        keys = engine.keys(tokens(40))
        engine.fill(keys)
        assert engine.store(keys).leading_chunks == 40
        daemon.wait_written(40)
        daemon.kill()
    daemon.start()
    daemon.wait_for_stats(lambda s: not s["tiers"][1]["scanning"])
    with SmallEngine(daemon.socket, 40) as engine:
        keys = engine.keys(tokens(40))
        assert engine.hits(keys) == 40
        assert engine.retrieve(keys).leading_chunks == 40
        assert engine.right_chunks(keys) == 40
    assert not [path for path in daemon.nvme.iterdir() if path.name.endswith(".tmp")]


def test_stop_with_engines_connected_is_in_order_and_in_time(start_daemon: StartDaemon) -> None:
    """SIGTERM in the middle of stores: exit code 0 within ten seconds, sockets gone, the folder
    clean; the engine gets outcomes, never an exception."""
    daemon = start_daemon()
    with SmallEngine(daemon.socket, 200) as engine:
        keys = engine.keys(tokens(200))
        engine.fill(keys)
        ids = {"full": list(range(800))}
        tickets = [engine.worker.store(f"r{i}", keys, ids) for i in range(4)]
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(STOP_MAX_S) == 0
        assert daemon.wait() == 0
        assert all(ticket.wait(30) is not None for ticket in tickets)
        assert engine.hits(keys) == 0
    assert not Path(daemon.socket.removeprefix("unix:")).exists()
    check = json.loads(daemon.kvstore("verify", "--json").stdout)
    assert (check["clean"], check["torn"], check["corrupt"]) == (True, 0, 0)


def test_second_signal_ends_it_at_once(start_daemon: StartDaemon) -> None:
    """Whoever presses twice means it. A stopped process takes both when it goes on."""
    daemon = start_daemon()
    os.kill(daemon.pid, signal.SIGSTOP)
    os.kill(daemon.pid, signal.SIGTERM)
    os.kill(daemon.pid, signal.SIGINT)
    os.kill(daemon.pid, signal.SIGCONT)
    assert daemon.wait() == 1
    assert "a second signal: stopping at once" in daemon.log.read_text()


def test_without_nvme_it_serves_from_memory(start_daemon: StartDaemon) -> None:
    """``--nvme-size off``: no folder is made, and chunks are hit from host memory."""
    daemon = start_daemon("--nvme-size", "off")
    assert "nvme     off" in daemon.lines
    with SmallEngine(daemon.socket, 10) as engine:
        keys = engine.keys(tokens(10))
        engine.fill(keys)
        assert engine.store(keys).leading_chunks == 10
        engine.wipe()
        assert engine.hits(keys) == 10
        assert engine.retrieve(keys).leading_chunks == 10
        assert engine.right_chunks(keys) == 10
    assert not daemon.nvme.exists()
    assert daemon.stop() == 0


def test_a_tenant_keeps_to_its_quota(start_daemon: StartDaemon) -> None:
    """This user may hold a quarter of each tier: of a prompt as large as the host tier the leading
    part within that is kept, the rest counted, and stats show both."""
    user = f"uid:{os.getuid()}"
    daemon = start_daemon(KVSTORE_TENANTS_QUOTA=f"{user}=25%")
    figures = daemon.stats()
    host = figures["tiers"][0]
    chunks = host["bytes_total"] // CHUNK_BYTES
    with SmallEngine(daemon.socket, chunks, "org/small") as engine:
        keys = engine.keys(tokens(chunks))
        engine.fill(keys)
        outcome = engine.begin_store(keys).wait(60)
        kept = sum(outcome.done)
        assert 0 < kept <= chunks // 4
        assert engine.hits(keys) == kept
        figures = daemon.stats()
    assert figures["drops"]["host_quota"] == chunks - kept
    mine = next(row for row in figures["tenants"] if (row["tenant"], row["tier"]) == (user, "host"))
    assert mine["bytes_used"] <= mine["bytes_quota"] == host["bytes_total"] // 4


def test_stats_show_what_happened(daemon: RunningDaemon) -> None:
    """Slots, hits, latencies, throughput, engines by alias (field case 110), hit rate by tokens."""
    with SmallEngine(daemon.socket, 10, "org/small", alias="small") as engine:
        keys = engine.keys(tokens(10))
        engine.fill(keys)
        engine.store(keys)
        assert engine.hits(keys) == 10
        engine.retrieve(keys)
        figures = daemon.wait_written(10)
        text = daemon.kvstore("stats").stdout
    host, nvme = figures["tiers"]
    assert (host["name"], nvme["name"]) == ("host", "nvme")
    assert host["chunks"] == nvme["chunks"] == host["slots_used"] == 10
    assert host["hits"] == 10
    assert nvme["io"]["writes"] == 10
    assert nvme["io"]["write_bytes"] >= 10 * CHUNK_BYTES
    assert host["io"]["write_bytes"] == 10 * CHUNK_BYTES
    assert host["io"]["read_bytes"] == 20 * CHUNK_BYTES, "for the engine, and for NVMe"
    traffic = figures["traffic"]
    assert traffic["stored_chunks"] == traffic["retrieved_chunks"] == 10
    assert traffic["hit_tokens"] == 160
    for latency in ("lookup", "store", "retrieve"):
        assert traffic[latency]["count"] == 1
        assert 0 < traffic[latency]["p50_s"] <= traffic[latency]["max_s"]
    assert figures["engines"][0]["alias"] == "small"
    assert figures["engines"][0]["namespace"] == figures["spaces"][0]["namespace"]
    assert "small" in text
    assert "hit rate by tokens" in text


@pytest.mark.parametrize(
    ("setting", "tier", "mode"),
    [("KVSTORE_HOST_HUGE_PAGES", 0, "small pages"), ("KVSTORE_NVME_DIRECT_IO", 1, "buffered")],
)
def test_what_is_turned_off_is_off_and_status_says_so(
    start_daemon: StartDaemon, setting: str, tier: int, mode: str
) -> None:
    """field case 64, its last part: stats print the mode in effect, not the one that was hoped
    for."""
    daemon = start_daemon(**{setting: "off"})
    daemon.wait_for_stats(lambda s: s["tiers"][tier]["mode"].startswith(mode))
    assert mode in daemon.kvstore("stats").stdout


def test_watch_prints_again_until_interrupted(daemon: RunningDaemon) -> None:
    """One JSON document a line; Ctrl-C is a good end."""
    watch = subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", "stats", "--watch", "0.1", "--json"],
        env=daemon.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with watch:
        assert watch.stdout is not None
        documents = [json.loads(watch.stdout.readline()) for _ in range(3)]
        watch.send_signal(signal.SIGINT)
        watch.stdout.read()
        assert watch.wait(30) == 0
    assert documents[0]["process"]["pid"] == daemon.pid
    assert documents[2]["process"]["uptime_s"] > documents[0]["process"]["uptime_s"]


def test_credential_is_refused_rather_than_ignored(daemon: RunningDaemon) -> None:
    """This version knows none; a tenant that nobody checked would be a lie."""
    from kvstore import Client
    from kvstore.core.errors import ConfigError

    with (
        Client(daemon.socket, credential="secret") as client,
        pytest.raises(ConfigError) as caught,
    ):
        client.attach("e1")
    assert "credential: this daemon knows none" in str(caught.value)
    assert "secret" not in daemon.log.read_text()


def test_folder_of_a_foreign_format_is_refused(private_folder: Path) -> None:
    """What another version wrote is neither read nor overwritten."""
    environment = private_environment(private_folder, SETTINGS)
    folder = private_folder / "cache" / "kvstore" / "nvme"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"format": "kvstore/nvme/99"}')
    done = run_kvstore(environment, "serve")
    assert done.returncode == 2
    assert "kvstore/nvme/99" in done.stderr.strip().splitlines()[-1]
    assert "99" in (folder / "manifest.json").read_text()


@pytest.mark.parametrize("target", ["link", "file"])
def test_socket_folder_of_someone_else_is_refused(private_folder: Path, target: str) -> None:
    """A symbolic link or a file where the private folder should be: another user may have put it
    there."""
    environment = private_environment(private_folder, SETTINGS)
    place = private_folder / "run" / "kvstore"
    if target == "link":
        (private_folder / "elsewhere").mkdir()
        place.symlink_to(private_folder / "elsewhere")
    else:
        place.write_text("")
    done = run_kvstore(environment, "serve")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert f"socket folder {place}" in last
    assert "set socket to a path of your own" in last


def test_the_eviction_policy_is_found_by_name(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours by name, others by their entry point; an unknown one is refused with what there is."""
    assert policy("fifo") is FirstInFirstOut
    own = EntryPoint("mine", "kvstore.core.eviction:LeastRecentlyUsed", "kvstore.policies")
    monkeypatch.setattr("kvstore.daemon.entry_points", lambda group: [own])
    assert policy("mine") is LeastRecentlyUsed
    with pytest.raises(ConfigError, match=r"eviction=lfu: .* valid are lru, fifo, mine"):
        policy("lfu")
    daemon = start_daemon(KVSTORE_EVICTION="fifo")
    assert daemon.stats()["process"]["state"] == "ok"
