"""ControlEcho: two processes that have nothing to do with kvstore and echo a small frame beside it.

A p99 on a shared machine says little alone: a hypervisor that takes a core away for 10 ms makes any
program look slow. The control meets the same machine at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from types import TracebackType

from bench.echo import ROOT, EchoServer


class ControlEcho:
    """Runs from entry to exit; then ``seconds`` holds each of its round trips."""

    def __init__(self, pace_s: float) -> None:
        self.seconds: list[float] = []
        self._pace_s = pace_s
        self._folder = tempfile.TemporaryDirectory(prefix="kvb-")
        self._server = EchoServer(f"{self._folder.name}/c.sock")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ControlEcho:
        self._server.__enter__()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.echo", "ping", self._server.path, str(self._pace_s)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the control didn't start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        told, _ = self._process.communicate()
        if told:
            self.seconds += json.loads(told)
        self._server.__exit__(kind, error, trace)
        self._folder.cleanup()

    def beside(self) -> str:
        """What it saw, in one line."""
        if not self.seconds:
            return "control echo of other processes: no call was made"
        ordered = sorted(self.seconds)
        p50_s, p99_s = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        return (
            f"control echo of other processes: p50 {p50_s * 1e6:.0f} us, "
            f"p99 {p99_s * 1e6:.0f} us, longest {ordered[-1] * 1e3:.1f} ms"
        )
