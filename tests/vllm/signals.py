"""Signals: sends the daemon signals at chosen moments of an engine's run. Runs in the engine.

Each is ``{pid, number}`` and a moment:

- ``at``: before this step
- ``after``, ``seconds``: once the requests at these places have ended and so much time has passed
- ``before`` or ``behind``: just before, or just after, this method of the worker's session is
  called the first time ("retrieve", "store")
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ACTED_S = 60.0


class Signals:
    """The signals of one run that haven't been sent. ``close`` undoes what is left."""

    def __init__(self, wanted: Sequence[dict[str, Any]], session: Any) -> None:
        self.waiting = list(wanted)
        self._session = session
        self._hooked: list[str] = []
        for signal in wanted:
            name = signal.get("before") or signal.get("behind")
            if name:
                self._hook(name, signal)

    def send(self, step: int, passed_s: float, ended: Sequence[bool]) -> None:
        """Send those that are due before this step."""
        for signal in tuple(self.waiting):
            late = "after" in signal and passed_s >= signal["seconds"]
            if signal.get("at") == step or (late and all(ended[n] for n in signal["after"])):
                self._kill(signal)

    def close(self) -> None:
        """Leave the session as it was."""
        for name in self._hooked:
            delattr(self._session, name)

    def _hook(self, name: str, signal: dict[str, Any]) -> None:
        call = getattr(self._session, name)

        def hooked(*arguments: Any) -> Any:
            if "before" in signal and signal in self.waiting:
                self._kill(signal)
            found = call(*arguments)
            if "behind" in signal and signal in self.waiting:
                self._kill(signal)
            return found

        setattr(self._session, name, hooked)
        self._hooked.append(name)

    def _kill(self, signal: dict[str, Any]) -> None:
        """Send it, and wait until it has stopped or ended the process, if that is what it does."""
        self.waiting.remove(signal)
        os.kill(signal["pid"], signal["number"])
        state = Path(f"/proc/{signal['pid']}/stat")
        until_s = time.monotonic() + ACTED_S
        while signal.get("stops") and state.read_text().rsplit(") ", 1)[1][0] not in "TZX":
            assert time.monotonic() < until_s, "the signal has no effect"
