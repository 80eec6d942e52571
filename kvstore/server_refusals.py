"""Refusals: who was refused, and why, so that it is logged once: who is refused tries again every
second."""

from __future__ import annotations

import logging

REFUSALS_MAX = 1024
"""Beyond it all are forgotten, and logged once more."""

_log = logging.getLogger(__name__)


class Refusals:
    """The last reason for each who was refused and hasn't been accepted since."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def note(self, who: str, reason: str) -> None:
        """Log a refusal, unless it is the same as before."""
        if self._reasons.get(who) == reason:
            return
        _log.warning("%s is refused: %s", who, reason)
        if len(self._reasons) >= REFUSALS_MAX:
            self._reasons.clear()
        self._reasons[who] = reason

    def forget(self, who: str) -> None:
        """They were accepted."""
        self._reasons.pop(who, None)
