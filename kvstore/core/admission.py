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

    def has_room(self, nbytes: int, now: float) -> bool:
        """Whether ``nbytes`` may enter now. What is larger than the whole bucket may enter when the
        bucket is full, so that no size starves."""
        if not self._bytes_s:
            return True
        if self._filled_at is not None:
            gained = (now - self._filled_at) * self._bytes_s
            self._level_bytes = min(self._burst_bytes, self._level_bytes + gained)
        self._filled_at = now
        return self._level_bytes >= min(nbytes, self._burst_bytes)

    def spend(self, nbytes: int) -> None:
        """``nbytes`` have entered."""
        self._level_bytes -= nbytes
