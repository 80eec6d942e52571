"""The demo's processes: a daemon of its own, and an engine process for each start of an engine."""

from __future__ import annotations

import importlib.util
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from kvstore.cli_admin import AdminClient, NoDaemonError
from kvstore.config import load
from kvstore.core.errors import KVStoreError, SessionLostError

Fields = dict[str, Any]
START_S = 60.0
"""A daemon answers, or an engine is registered, within this."""
ENGINE_ANSWER_S = 1800.0
"""An engine that says nothing for this long, loading a model included, is given up."""
WRITES_S = 300.0
"""What was stored is on disk within this."""
POLL_S = 0.05


class DemoError(KVStoreError):
    """The demo can't go on; the text says why."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module with this interpreter and finds the packages where this
    process found them, installed or not."""
    folders = []
    for package in ("kvstore", "kvstore_transformers"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no package {package}", name=package)
        folders.append(str(Path(spec.origin).parent.parent))
    start = (
        f"import runpy, sys; sys.path[:0] = {folders!r}; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", start, *arguments]


class OwnDaemon:
    """A ``kvstore serve`` of the demo's own, with socket and folders below ``folder``;
    ``settings`` is its configuration file."""

    def __init__(self, folder: Path, sizes: Sequence[str], settings: str = "") -> None:
        self.socket = folder / "kvstore.sock"
        self._settings = settings
        self._folder = folder
        self._sizes = sizes
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers, its scan of what is on disk included."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        config = self._folder / "kvstore.toml"
        config.touch(mode=0o600)
        config.write_text(self._settings, encoding="utf-8")
        command = module_command(
            "kvstore.cli", "serve", "--config", str(config), "--socket", str(self.socket),
            "--admin-address", self._admin_address(),
            "--nvme-path", str(self._folder / "nvme"), "--nvme-admit-after", "1",
            "--nvme-write-budget", "0", *self._sizes,
        )  # fmt: skip
        with self._log().open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.await_stats("the daemon started", _scanned, START_S)

    def kill(self) -> None:
        """SIGKILL it, as a crash would."""
        assert self._process is not None, "started"
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it in order; without effect on one that has ended."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def stats(self) -> Fields:
        """Its snapshot; raises NoDaemonError while it doesn't answer."""
        return daemon_stats(self.socket, self._admin_address())

    def await_writes(self) -> None:
        """Wait until everything that was stored is on disk."""
        self.await_stats("the daemon wrote everything to NVMe", _written, WRITES_S)

    def await_shared(self) -> None:
        """Wait until everything that was stored is in Redis."""
        self.await_stats("the daemon wrote everything to Redis", _shared, WRITES_S)

    def await_redis(self) -> None:
        """Wait until it reaches Redis."""
        self.await_stats("the daemon reached Redis", _reached, START_S)

    def await_stats(self, what: str, fits: Callable[[Fields], bool], deadline_s: float) -> None:
        """Wait for a snapshot that ``fits``; raises DemoError, with what the daemon said last,
        when it ends or none fits in time."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                raise DemoError(f"the daemon ended: {last_line(self._log())}")
            try:
                if fits(self.stats()):
                    return
            except NoDaemonError:
                pass
            time.sleep(POLL_S)
        raise DemoError(f"not within {deadline_s:.0f} s: {what}; {last_line(self._log())}")

    def _admin_address(self) -> str:
        """Where it would listen by itself, whatever the user's own settings say."""
        return f"unix:{self._folder}/kvstore-admin.sock"

    def _log(self) -> Path:
        return self._folder / "daemon.log"


def daemon_stats(socket: Path, admin_address: str = "") -> Fields:
    """The snapshot of a daemon by its engine socket; raises NoDaemonError where none answers."""
    flags = {"socket": str(socket)}
    if admin_address:
        flags["admin.address"] = admin_address
    with AdminClient(load(flags).admin_address()) as client:
        return dict(client.stats())


class EngineProcess:
    """An engine in a process of its own, spoken to in JSON lines (kvstore_transformers.worker)."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.ready: Fields = {}
        self._arguments = arguments
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> EngineProcess:
        """Start it and wait until its model is loaded; raises DemoError with its reason."""
        command = module_command("kvstore_transformers.worker", *self._arguments)
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._reader = threading.Thread(target=self._read, args=(_pipe(self._process.stdout),))
        self._reader.start()
        try:
            self.ready = self._answer()
        except KVStoreError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End it; a process that doesn't end is killed."""
        process = self._running()
        try:
            _pipe(process.stdin).close()
            process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join()
        _pipe(process.stdout).close()

    def ask(self, operation: str, **fields: object) -> Fields:
        """Do an operation and give its answer; raises DemoError where it is refused."""
        pipe = _pipe(self._running().stdin)
        try:
            pipe.write(json.dumps({"op": operation, **fields}) + "\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise SessionLostError(f"the engine ended: {last_line(self._log)}") from error
        return self._answer()

    def _answer(self) -> Fields:
        try:
            line = self._lines.get(timeout=ENGINE_ANSWER_S)
        except queue.Empty as error:
            raise DemoError(f"the engine said nothing for {ENGINE_ANSWER_S:.0f} s") from error
        if not line:
            raise SessionLostError(f"the engine ended: {last_line(self._log)}")
        answer: Fields = json.loads(line)
        if "error" in answer:
            raise DemoError(str(answer["error"]))
        return answer

    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "entered"
        return self._process

    def _read(self, stream: IO[str]) -> None:
        """In a thread: lines as they come, then an empty one."""
        for line in stream:
            self._lines.put(line)
        self._lines.put("")


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "every stream is a pipe"
    return stream


def _scanned(stats: Fields) -> bool:
    return not any(tier["scanning"] for tier in stats["tiers"])


def _written(stats: Fields) -> bool:
    traffic = stats["traffic"]
    waiting = traffic["write_backlog"] + traffic["moves_queued"] + traffic["moves_in_flight"]
    chunks = {tier["name"]: tier["chunks"] for tier in stats["tiers"]}
    return bool(waiting == 0 and chunks.get("nvme", 0) >= chunks["host"])


def _reached(stats: Fields) -> bool:
    return bool(stats["redis"]["state"] == "up")


def _shared(stats: Fields) -> bool:
    redis = stats["redis"]
    chunks = next(tier["chunks"] for tier in stats["tiers"] if tier["name"] == "host")
    there = redis["chunks_written"] + redis["chunks_present"]
    return bool(not redis["write_backlog"] and there >= chunks)


def last_line(log: Path) -> str:
    """The last line that a process wrote before it ended."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
