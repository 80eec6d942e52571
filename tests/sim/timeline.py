"""Timeline: a virtual clock and what happens when; worlds that share one happen together."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

from tests.sim.errors import SimulationError

STANDING_MAX = 20_000
"""Acts at one moment."""


class Timeline:
    """The time, and what is to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._standing = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after a while."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), act))

    def step(self) -> bool:
        """Let the next thing happen; tells whether there was one."""
        if not self._heap:
            return False
        at_s, _, act = heapq.heappop(self._heap)
        self._standing = self._standing + 1 if at_s == self.now else 0
        if self._standing > STANDING_MAX:
            raise SimulationError("time stands still: something goes on at Ticks for ever")
        self.now = at_s
        act()
        return True

    def run_for(self, seconds: float) -> None:
        """Let this much time pass."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.step()
        self.now = end


class Alarm:
    """Calls ``act`` when it was last wanted, or sooner wanted before; as the server does with
    Ticks."""

    def __init__(self, timeline: Timeline, act: Callable[[], None]) -> None:
        self._timeline = timeline
        self._act = act
        self._at_s = math.inf

    def set(self, delay_s: float) -> None:
        """It is wanted after a while, at the latest."""
        at_s = self._timeline.now + delay_s
        if at_s < self._at_s - 1e-6:
            self._at_s = at_s
            self._timeline.at(delay_s, lambda: self._ring(at_s))

    def stop(self) -> None:
        """It isn't wanted any more, for ever."""
        self._at_s = -math.inf

    def _ring(self, at_s: float) -> None:
        if at_s == self._at_s:
            self._at_s = math.inf
            self._act()
