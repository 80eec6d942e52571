"""Real vLLM engines beside a real daemon. Skipped where there is no environment with vLLM.

``make test-vllm`` builds that environment (kvstore_vllm.environment) and names its Python in
VLLM_TEST_PYTHON; the ordinary suite neither needs it nor waits for it. Tests with the marker
``full`` start ``vllm serve`` or several ranks: .ci/run leaves them out.

Deadlines are for a machine several times slower than the one that they were written on: nothing is
waited for longer than it takes, and no assertion is about time.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvstore_transformers.config import small_model_folder

from tests.conftest import ROOT, SETTINGS, RunningDaemon, private_environment

PYTHON = os.environ.get("VLLM_TEST_PYTHON", "")
MODEL = Path(os.environ.get("VLLM_TEST_MODEL", "") or small_model_folder())
ANSWER_S = 600.0
LOOKUP_S = 2.0
"""Eight times the connector's own default: a test's hit must not be a miss because a slow machine
answered late."""
LEASE_S = 3600.0
"""Leases that aren't released stay for longer than any test waits for them to go."""
BIG = {
    "KVSTORE_LEASE_S": str(LEASE_S),
    "KVSTORE_HOST_SIZE": "512MiB",
    "KVSTORE_NVME_SIZE": "1GiB",
    "KVSTORE_NVME_SLAB_SIZE": "64MiB",
}
"""Tiers for some thousand tokens of a small model in float32, 6 MB a chunk."""
CHUNK = 128
"""Tokens a chunk, with vLLM's block size on CPUs."""
WITHOUT_VLLM = ("test_settings.py",)
"""Tests of what needs no vLLM: they run everywhere."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs vLLM where no environment is named; one that is named must be whole."""
    reason = ""
    if not PYTHON:
        reason = "no environment with vLLM (VLLM_TEST_PYTHON): make test-vllm builds one"
    elif not Path(PYTHON).exists():
        raise pytest.UsageError(f"VLLM_TEST_PYTHON={PYTHON}: there is no such file")
    elif not (MODEL / "config.json").exists():
        raise pytest.UsageError(f"no model at {MODEL}: python -m kvstore_transformers.fetch")
    here = Path(__file__).parent
    for item in items:
        if reason and here in item.path.parents and item.path.name not in WITHOUT_VLLM:
            item.add_marker(pytest.mark.skip(reason=reason))


class EngineProcess:
    """A running tests/vllm/engine.py, or ``module``; every call waits for its answer. ``broken``:
    one that never came may come instead of the next."""

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        self.log = log
        self.broken = False
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'connectors'}",
            "VLLM_CPU_KVCACHE_SPACE": str(arguments.pop("space_gib", 1)),
        }
        module = arguments.pop("module", "engine")
        self._stream = open(log, "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [PYTHON, "-m", f"tests.vllm.{module}", json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stream, env=environment,
            cwd=ROOT,
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until it has started."""
        assert self._read() == {"ready": True}

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Do one operation."""
        assert self.process.stdin is not None
        assert not self.broken, "the engine still owes an answer"
        line = json.dumps({"op": operation, **arguments}) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        return self._read()

    def run(self, *requests: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        """Run requests side by side; their results."""
        results: list[dict[str, Any]] = self.call("run", requests=list(requests), **more)["results"]
        return results

    def fresh(self) -> None:
        """Let everything end, and drop vLLM's own prefix cache."""
        assert self.call("settle")["settled"], self.call("status")
        assert self.call("reset")["done"], self.call("status")

    def lines(self, text: str) -> list[str]:
        """Lines of its log with a text in them."""
        found = self.log.read_text(errors="replace").splitlines()
        return [line for line in found if text in line]

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._stream):
            if stream is not None:
                stream.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        self.broken = True
        until_s = time.monotonic() + ANSWER_S
        while time.monotonic() < until_s:
            readable, _, _ = select.select([self.process.stdout], [], [], 1.0)
            if readable:
                line = self.process.stdout.readline()
                assert line, "the engine ended:\n" + self.log.read_text(errors="replace")[-8000:]
                answer: dict[str, Any] = json.loads(line)
                self.broken = False
                return answer
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-8000:]
        raise AssertionError(f"no answer in {ANSWER_S} s:\n{self.log.read_text()[-8000:]}")


StartEngine = Callable[..., EngineProcess]


class Rig:
    """One daemon and one engine that a whole session of tests shares, as each takes long to start.

    ``begin`` makes both as good as new, whatever a failed test did to them, ``fresh`` does so in
    the middle of a test: the daemon runs, the engine is registered, and neither vLLM's blocks nor
    its prefix cache hold anything. Tests use prompts of their own. ``errors`` is how many errors
    inside the connector were provoked. ``engine`` are vLLM's arguments, ``extra`` the connector's.
    """

    def __init__(
        self,
        folder: Path,
        engine: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.arguments = engine or {}
        self.extra = extra or {}
        self.daemon = RunningDaemon(folder, private_environment(folder, SETTINGS | BIG), ())
        self.daemon.start()
        self.engine = self._started()
        self.errors = 0

    def begin(self) -> None:
        """A new test."""
        self.signal(signal.SIGCONT)
        try:
            self.engine.call("sabotage")
            self.fresh()
        except (AssertionError, OSError):
            self.engine.close()
            self.engine = self._started()
            self.fresh()
        self.errors = self.engine.call("status")["errors"]

    def fresh(self) -> None:
        """Start over."""
        if self._is_dead():
            self.daemon.wait()
            self.daemon.start()
            self.daemon.wait_for_stats(lambda s: not any(t["scanning"] for t in s["tiers"]))
        self.engine.fresh()
        if not self.engine.call("wait_ready")["ready"]:
            said = self.engine.lines("kvstore")[-20:]
            raise AssertionError(f"the engine isn't ready: {said}\n{self.daemon.stats()}")

    def written(self) -> None:
        """Wait until everything that was stored is on NVMe too."""
        self.daemon.wait_for_stats(
            lambda s: not s["traffic"]["moves_in_flight"] and not s["traffic"]["write_backlog"]
        )

    def from_nvme(self) -> None:
        """Restart the daemon, so that what was stored is on NVMe only."""
        self.written()
        self.daemon.kill()
        self.fresh()

    def signal(self, number: signal.Signals) -> None:
        """Send the daemon a signal, if it runs."""
        process = self.daemon.process
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def nothing_is_left(self) -> dict[str, Any]:
        """No block, request, transfer, lease or pin; no error was swallowed. Gives the status."""
        assert self.engine.call("settle")["settled"], self.engine.call("status")
        status = self.engine.call("status")
        names = ("blocks_used", "requests", "tracked", "held", "held_blocks", "wanted", "loads",
                 "stores")  # fmt: skip
        assert {name: status[name] for name in names} == dict.fromkeys(names, 0)
        assert status["errors"] == self.errors
        nothing_is_pinned(self.daemon)
        return status

    def close(self) -> None:
        """End both."""
        self.engine.close()
        self.daemon.kill()

    def _is_dead(self) -> bool:
        """Whether the daemon was killed. On a busy machine its other threads take longer to end
        than its first one, and until then nobody can wait for it without blocking."""
        process = self.daemon.process
        if process is None or process.poll() is not None:
            return process is not None
        return Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1][0] == "Z"

    def _started(self) -> EngineProcess:
        """An engine that runs; deadlines of its transfers end well within STOP_S."""
        extra = {"socket": self.daemon.socket, "lookup_timeout_s": LOOKUP_S,
                 "load_timeout_s": 8.0, "store_timeout_s": 8.0} | self.extra  # fmt: skip
        arguments = {"model": str(MODEL), "engine": self.arguments, "extra": extra}
        engine = EngineProcess(arguments, self.folder / "engine.log")
        engine.wait()
        return engine


def nothing_is_pinned(daemon: RunningDaemon, sessions: int = 2) -> None:
    """Wait until the daemon holds nothing for an engine any more but its sessions. LEASE_S is so
    long that a lease which nobody released is still there."""

    def idle(stats: dict[str, Any]) -> bool:
        traffic = stats["traffic"]
        left = [traffic[name] for name in ("leases", "moves_in_flight", "moves_queued")]
        left += [tier["pinned"] for tier in stats["tiers"]]
        return not any(left) and traffic["sessions"] == sessions

    daemon.wait_for_stats(idle)


@contextmanager
def running_rig(
    engine: dict[str, Any] | None = None, extra: dict[str, Any] | None = None
) -> Iterator[Rig]:
    """A rig on a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    rig = Rig(folder, engine, extra)
    try:
        yield rig
    finally:
        rig.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_rig() -> Iterator[Rig]:
    """The session's rig, as the last test left it."""
    with running_rig() as rig:
        yield rig


@pytest.fixture
def rig(shared_rig: Rig) -> Rig:
    """The session's rig, as good as new."""
    shared_rig.begin()
    return shared_rig


@pytest.fixture
def start_engine(private_folder: Path) -> Iterator[StartEngine]:
    """Starts engines: ``start_engine(extra, model=..., space_gib=..., engine={...})``."""
    started: list[EngineProcess] = []

    def start(extra: dict[str, Any] | None, **arguments: Any) -> EngineProcess:
        if extra is not None:
            extra = {"lookup_timeout_s": LOOKUP_S} | extra
        arguments = {"model": str(MODEL), "engine": {}} | arguments | {"extra": extra}
        engine = EngineProcess(arguments, private_folder / f"engine{len(started)}.log")
        started.append(engine)
        engine.wait()
        return engine

    yield start
    for engine in started:
        engine.close()


def prompt(tag: str, lines: int) -> str:
    """A prompt that begins with its tag, about 15 tokens a line."""
    return f"{tag} " + " ".join(f"Line {i}: fox {tag} number {i * 7} jumps." for i in range(lines))


def whole(engine: EngineProcess, text: str) -> int:
    """Tokens of the whole chunks of a prompt but its last token, as an external hit has them."""
    count: int = engine.call("tokens", prompt=text)["count"]
    return (count - 1) // CHUNK * CHUNK
