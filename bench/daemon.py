"""BenchDaemon: a real daemon process on private folders, and what it says of itself."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore.cli_admin import AdminClient
from tests.conftest import RunningDaemon, private_environment

QUIET_S = 120.0
_POLL_S = 0.002


class BenchDaemon:
    """``kvstore serve`` with these settings; its NVMe folder lies in ``folder``, sockets in a short
    one. ``command`` starts another program than this checkout's. A context manager."""

    def __init__(
        self, folder: Path, settings: dict[str, str], command: tuple[str, ...] = ()
    ) -> None:
        self._command = command
        self._private = Path(tempfile.mkdtemp(prefix="kvb-"))
        self._disk = Path(tempfile.mkdtemp(prefix="nvme-", dir=folder))
        admin = f"unix:{self._private / 'admin.sock'}"
        given = {
            "KVSTORE_NVME_PATH": str(self._disk / "nvme"),
            "KVSTORE_ADMIN_ADDRESS": admin,
            "KVSTORE_LOG_LEVEL": "warning",
        }
        environment = private_environment(self._private, given | settings)
        self.running = RunningDaemon(self._private, environment, ())
        self._admin = AdminClient(admin)

    @property
    def address(self) -> str:
        """Where engines reach it."""
        return self.running.socket

    @property
    def nvme(self) -> Path:
        """Its NVMe folder."""
        return self.running.nvme

    def __enter__(self) -> BenchDaemon:
        try:
            self.running.start(*self._command)
            self._admin.__enter__()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._admin.__exit__(kind, error, trace)
        self._remove()

    def stats(self) -> dict[str, Any]:
        """What ``kvstore stats --json`` shows."""
        found: dict[str, Any] = self._admin.stats()
        return found

    def tier(self, name: str) -> dict[str, Any]:
        """What they say of one tier."""
        tiers: dict[str, dict[str, Any]] = {tier["name"]: tier for tier in self.stats()["tiers"]}
        return tiers[name]

    def io(self, what: str) -> int:
        """A counter of the NVMe tier: ``read_bytes``, ``write_bytes``, ``errors``."""
        return int(self.tier("nvme")["io"][what])

    def written_bytes(self) -> int:
        """What the daemon's process has written so far, as the kernel counts it when a call that
        writes has ended. To ask costs the daemon nothing, where ``stats`` would take its time."""
        assert self.running.process is not None, "it runs"
        text = Path(f"/proc/{self.running.process.pid}/io").read_text()
        return int(dict(line.split(": ") for line in text.splitlines())["wchar"])

    def await_written(self, nbytes: int) -> None:
        """Wait until so many bytes were written in all, but no longer than for QUIET_S."""
        until_s = time.monotonic() + QUIET_S
        while self.written_bytes() < nbytes and time.monotonic() < until_s:
            time.sleep(_POLL_S / 10)

    def restart(self) -> None:
        """Stop it in order and start it again, on the same folders."""
        self._admin.__exit__(None, None, None)
        self.running.stop()
        self.running.start(*self._command)
        self._admin.__enter__()

    def drain(self) -> None:
        """Wait until nothing moves and nothing waits for its write."""
        until_s = time.monotonic() + QUIET_S
        while True:
            traffic = self.stats()["traffic"]
            if not (
                traffic["moves_in_flight"] or traffic["moves_queued"] or traffic["write_backlog"]
            ):
                return
            assert time.monotonic() < until_s, f"the daemon never came to rest: {traffic}"
            time.sleep(_POLL_S)

    def _remove(self) -> None:
        if self.running.process is not None:
            self.running.kill()
        shutil.rmtree(self._private, ignore_errors=True)
        shutil.rmtree(self._disk, ignore_errors=True)
