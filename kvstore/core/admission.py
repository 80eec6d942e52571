"""Admission: what may enter a slow tier, as a byte budget.

An SSD wears and has one queue: a budget of bytes a second (a bucket that fills at that rate up to
``burst_s`` seconds' worth) bounds both, and ``admit_after`` keeps out what was stored fewer times.
"""

from __future__ import annotations


class ByteBudget:
    """A bucket of bytes that fills at ``bytes_s``; 0 is no limit."""

    def __init__(self, bytes_s: int, burst_s: float) -> None:
        self._bytes_s = bytes_s
        self._burst_bytes = bytes_s * burst_s
        self._level_bytes = self._burst_bytes
        self._filled_at: float | None = None

    def admit(self, nbytes: int, now: float) -> bool:
        """Take ``nbytes`` if they are there; a refusal takes nothing. A chunk larger than the whole
        bucket passes when the bucket is full, so that no size starves."""
        if not self._bytes_s:
            return True
        if self._filled_at is not None:
            gained = (now - self._filled_at) * self._bytes_s
            self._level_bytes = min(self._burst_bytes, self._level_bytes + gained)
        self._filled_at = now
        if self._level_bytes < min(nbytes, self._burst_bytes):
            return False
        self._level_bytes -= nbytes
        return True
