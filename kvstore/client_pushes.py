"""Pushes: the answers to lookups that the daemon owes, and those that have come and are misses."""

from __future__ import annotations

from enum import Enum

PUSHES_MAX = 4096
"""Lookups whose answer may be owed at a time."""


class Push(Enum):
    """How a lookup that was pending stands. OWED: its answer hasn't come. MISS: it has, and is one.
    OVER: ask again; for a hit that is how its lease is renewed."""

    OWED = "owed"
    MISS = "miss"
    OVER = "over"


class Pushes:
    """By the number of the lookup's message. Under the channel's lock, but for ``take``."""

    def __init__(self) -> None:
        self._pushes: dict[int, Push] = {}

    def owe(self, number: int) -> None:
        """A lookup is pending."""
        if len(self._pushes) >= PUSHES_MAX:
            self._pushes.clear()
        self._pushes[number] = Push.OWED

    def come(self, number: int, miss: bool) -> None:
        """An answer has come; nothing happens where it isn't owed."""
        if self._pushes.pop(number, None) is not None and miss:
            self._pushes[number] = Push.MISS

    def take(self, number: int) -> Push:
        """How a lookup stands; a miss is told once."""
        push = self._pushes.get(number, Push.OVER)
        if push is Push.MISS:
            self._pushes.pop(number, None)
        return push

    def clear(self) -> None:
        """The link is over: nothing is owed."""
        self._pushes.clear()
