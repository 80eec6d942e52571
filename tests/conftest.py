"""Fixtures that several tests share: a real daemon process on private folders."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
READY_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0
SETTINGS = {
    "KVSTORE_HOST_SIZE": "64MiB",
    "KVSTORE_NVME_SIZE": "256MiB",
    "KVSTORE_NVME_SLAB_SIZE": "16MiB",
}
"""Small enough for any machine; a test changes what it is about."""


def private_environment(folder: Path, settings: dict[str, str] | None = None) -> dict[str, str]:
    """An environment in which kvstore sees only this checkout and folders below ``folder``."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
    runtime = folder / "run"
    runtime.mkdir(mode=0o700, exist_ok=True)
    paths = [str(ROOT), str(ROOT / "connectors"), os.environ.get("PYTHONPATH", "")]
    return environment | {
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(runtime),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        **(settings or {}),
    }


def run_kvstore(
    environment: dict[str, str], *arguments: str, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run one command of the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        env=environment, input=text, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


class RunningDaemon:
    """A ``kvstore serve`` process and where it is reached. ``log`` is its stderr, a file."""

    def __init__(self, folder: Path, environment: dict[str, str], arguments: tuple[str, ...]):
        self.folder = folder
        self.environment = environment
        self.arguments = arguments
        self.log = folder / "daemon.log"
        self.lines: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process ID."""
        assert self.process is not None
        return self.process.pid

    @property
    def socket(self) -> str:
        """The engines' address, as Client takes it."""
        given = self.environment.get("KVSTORE_SOCKET")
        return f"unix:{given or self.folder / 'run' / 'kvstore' / 'kvstore.sock'}"

    @property
    def nvme(self) -> Path:
        """The NVMe folder."""
        given = self.environment.get("KVSTORE_NVME_PATH")
        return Path(given) if given else self.folder / "cache" / "kvstore" / "nvme"

    def start(self, *command: str) -> None:
        """Start it, by this checkout's command line or another, and wait for its ready line."""
        self.launch(*command)
        self.await_ready()

    def launch(self, *command: str) -> None:
        """Start it, and don't wait."""
        command = command or (sys.executable, "-m", "kvstore.cli")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, "serve", *self.arguments],
                env=self.environment, stdout=subprocess.PIPE, stderr=log, cwd=self.folder,
            )  # fmt: skip

    def await_ready(self) -> None:
        """Wait for the ready line of the process that was launched."""
        self.lines = self._read_until_ready()

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        return self.end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; gives the exit code."""
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            code = self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process.stdout.close()
        return code

    def kvstore(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run another command with the daemon's settings."""
        return run_kvstore(self.environment, *arguments, text=text)

    def stats(self) -> dict[str, Any]:
        """``kvstore stats --json``."""
        done = self.kvstore("stats", "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def wait_for_stats(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for statistics until they meet a condition; fails with the last ones."""
        deadline_s = time.monotonic() + READY_DEADLINE_S
        while True:
            document = self.stats()
            if condition(document):
                return document
            assert time.monotonic() < deadline_s, document

    def wait_written(self, chunks: int) -> dict[str, Any]:
        """Statistics once so many chunks are on NVMe and no write is under way: the tier's chunks
        count those that are being written."""
        return self.wait_for_stats(
            lambda s: (
                s["tiers"][1]["chunks"] == chunks
                and not s["traffic"]["write_backlog"]
                and not s["traffic"]["moves_in_flight"]
            )
        )

    def _read_until_ready(self) -> list[str]:
        assert self.process is not None
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + READY_DEADLINE_S
        lines: list[str] = []
        pending = b""
        while not (lines and lines[-1].startswith("ready in")):
            left_s = deadline_s - time.monotonic()
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, left_s))
            data = os.read(self.process.stdout.fileno(), 65536) if readable else b""
            if not data:
                self.end(signal.SIGKILL)
                raise AssertionError(f"no ready line: {lines}\n{self.log.read_text()}")
            pending += data
            *whole, pending = pending.split(b"\n")
            lines += [line.decode() for line in whole]
        return lines


StartDaemon = Callable[..., RunningDaemon]


@pytest.fixture
def private_folder() -> Iterator[Path]:
    """A folder with a short path, as a Unix socket's may have 107 bytes only."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_daemon(private_folder: Path) -> Iterator[StartDaemon]:
    """Starts daemons below one private folder: ``start_daemon(*flags, KVSTORE_X=...)``. All of
    them are ended after the test."""
    started: list[RunningDaemon] = []

    def start(*arguments: str, **settings: str) -> RunningDaemon:
        environment = private_environment(private_folder, SETTINGS | settings)
        daemon = RunningDaemon(private_folder, environment, arguments)
        daemon.start()
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill()


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> RunningDaemon:
    """One running daemon with small tiers."""
    return start_daemon()
