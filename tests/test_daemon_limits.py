"""The daemon where the machine gives less than it asks for: disk, threads, file sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import SETTINGS, RunningDaemon, StartDaemon, private_environment
from tests.small_engine import SmallEngine, tokens

LATE = 300
"""Chunks that a disk of 40 MiB has no room for once it is filled up."""


def fill_up(mount: Path) -> None:
    """Let another file take what room a disk has."""
    fd = os.open(mount / "rest", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(fd, bytes(1 << 16)):
            continue
    os.close(fd)
    assert not os.statvfs(mount).f_bavail


@pytest.fixture
def disk(private_folder: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    mount = private_folder / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=40M", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def settings_on(disk: Path) -> dict[str, str]:
    """Settings of a daemon whose NVMe tier is there."""
    return {
        "KVSTORE_NVME_PATH": str(disk / "nvme"),
        "KVSTORE_NVME_SIZE": "20MiB",
        "KVSTORE_NVME_SLAB_SIZE": "2MiB",
    }


def test_full_disk_keeps_what_is_there_over_a_restart(
    disk: Path, start_daemon: StartDaemon
) -> None:
    """field case 63: a disk of 40 MiB is filled up by something else while a daemon of automatic
    size has chunks there. It is restarted, and hits them."""
    daemon = start_daemon(**settings_on(disk))
    with SmallEngine(daemon.socket, 20) as engine:
        keys = engine.keys(tokens(20))
        engine.fill(keys)
        assert engine.store(keys).leading_chunks == 20
        daemon.wait_written(20)
    assert daemon.stop() == 0
    fill_up(disk)
    for size in ("20MiB", "auto"):
        daemon.environment["KVSTORE_NVME_SIZE"] = size
        daemon.start()
        daemon.wait_for_stats(lambda s: not s["tiers"][1]["scanning"])
        with SmallEngine(daemon.socket, 20) as engine:
            assert engine.hits(engine.keys(tokens(20))) == 20
        assert daemon.stop() == 0
    assert "is free for nvme.size 20 MiB" in daemon.log.read_text()


def test_disk_that_fills_up_under_a_daemon_costs_writes_only(
    disk: Path, start_daemon: StartDaemon
) -> None:
    """field case 63: the disk is filled while the tier has a few of its slabs. The daemon stays
    up, what can't be written is counted and the tier is full; earlier chunks are intact and
    later ones hit from memory. With the room back they reach the disk."""
    daemon = start_daemon(**settings_on(disk))
    with SmallEngine(daemon.socket, LATE) as engine:
        early, late = engine.keys(tokens(20)), engine.keys(tokens(LATE, 1))
        engine.fill(early)
        assert engine.store(early).leading_chunks == 20
        daemon.wait_written(20)
        fill_up(disk)
        engine.fill(late)
        assert engine.store(late).leading_chunks == LATE
        figures = daemon.wait_for_stats(
            lambda s: s["tiers"][1]["full"] and not s["traffic"]["write_backlog"]
        )
        assert figures["drops"]["nvme_full"] > 0
        assert figures["tiers"][1]["chunks"] < 20 + LATE
        engine.wipe()
        assert engine.retrieve(late).leading_chunks == LATE
        assert engine.right_chunks(late) == LATE
        (disk / "rest").unlink()
        assert daemon.stop() == 0
        daemon.start()
        daemon.wait_for_stats(lambda s: not s["tiers"][1]["scanning"])
        engine.rejoin(daemon.pid)
        engine.wipe()
        found = engine.hits(early)
        assert engine.retrieve(early[:found]).leading_chunks == found
        assert engine.right_chunks(early[:found]) == found
        engine.fill(late)
        assert engine.store(late).leading_chunks == LATE
        daemon.wait_for_stats(lambda s: s["tiers"][1]["chunks"] >= LATE)


REFUSES_THREAD = """
import sys, threading
from kvstore.cli import main
start = threading.Thread.start
def refuse(thread):
    if thread.name == sys.argv[1]:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refuse
sys.exit(main(["serve"]))
"""


@pytest.mark.parametrize("name", ["host-touch", "read-1", "start", "scan"])
def test_thread_that_the_system_refuses_is_one_line(private_folder: Path, name: str) -> None:
    """A container's limit on processes: the reason at the end of the log, and no trace of what
    failed because of it."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSES_THREAD, name],
        env=private_environment(private_folder, SETTINGS),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert f"the system refuses the thread {name} (can't start new thread)" in last
    assert "limit on processes" in last


def test_tier_that_fails_is_seen_in_the_state(private_folder: Path) -> None:
    """Every write to NVMe is refused (here by a limit on the size of files): chunks are kept in
    memory, and the daemon isn't well."""
    daemon = RunningDaemon(private_folder, private_environment(private_folder, SETTINGS), ())
    daemon.start("prlimit", f"--fsize={1 << 20}", sys.executable, "-m", "kvstore.cli")
    try:
        with SmallEngine(daemon.socket, 4) as engine:
            # A prompt whose first chunk can't be written tries no further: several prompts.
            for seed in range(5):
                keys = engine.keys(tokens(4, seed))
                engine.fill(keys)
                assert engine.store(keys).leading_chunks == 4
            figures = daemon.wait_for_stats(lambda s: s["process"]["state"] != "ok")
            assert figures["process"]["state"].startswith("the NVMe tier fails: ")
            assert "File too large" in figures["process"]["state"]
            assert engine.hits(keys) == 4
    finally:
        assert daemon.stop() == 0
