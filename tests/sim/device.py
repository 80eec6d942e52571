"""Device: the spells that befall a whole device: full, slow, or ending nothing at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.messages import MoveKind
from tests.sim.faults import Fault

COPIES = (MoveKind.STORE, MoveKind.LOAD)
SPELLS = (Fault.DISK_FULL, Fault.DEVICE_SLOW, Fault.DEVICE_STALLS, Fault.MACHINE_SLOW)
LONGEST_S = {
    Fault.DISK_FULL: 20.0,
    Fault.DEVICE_SLOW: 3.0,
    Fault.DEVICE_STALLS: 10.0,
    Fault.MACHINE_SLOW: 3.0,
}
LONGEST_PAUSE_S = 5.0
"""What a slow device makes of a pause that is short otherwise."""


@dataclass(slots=True)
class Device:
    """When each spell that is on ends; spells outlast the daemon. ``saw`` counts what is
    suffered."""

    rng: random.Random
    saw: Callable[[Fault], None]
    full_until: float = 0.0
    slow_until: float = 0.0
    stalled_until: float = 0.0
    copies_slow_until: float = 0.0
    was_full: bool = False

    def befall(self, now: float, spell: Fault | None = None) -> Fault:
        """A spell begins; tells which."""
        spell = spell or self.rng.choice(SPELLS)
        until = now + self.rng.uniform(0.05, 1.0) * LONGEST_S[spell]
        match spell:
            case Fault.DISK_FULL:
                self.full_until = until
            case Fault.DEVICE_SLOW:
                self.slow_until = until
            case Fault.DEVICE_STALLS:
                self.stalled_until = until
            case _:
                self.copies_slow_until = until
        return spell

    def calm(self) -> None:
        """All spells are over."""
        self.full_until = self.slow_until = self.stalled_until = self.copies_slow_until = 0.0

    def has_room(self, now: float) -> bool:
        """Whether a slab file can be made."""
        if now < self.full_until:
            self.saw(Fault.DISK_FULL)
            self.was_full = True
            return False
        if self.was_full:
            self.saw(Fault.DISK_ROOM_AGAIN)
            self.was_full = False
        return True

    def delay(self, kind: MoveKind, pause_s: float, now: float) -> float:
        """How long a step of a Move takes that would take ``pause_s`` otherwise."""
        if kind in COPIES:
            if now < self.copies_slow_until:
                self.saw(Fault.MACHINE_SLOW)
                pause_s = max(pause_s, min(LONGEST_PAUSE_S, pause_s * self.rng.uniform(20, 100)))
            return pause_s
        if now < self.slow_until:
            self.saw(Fault.DEVICE_SLOW)
            pause_s = max(pause_s, min(LONGEST_PAUSE_S, pause_s * self.rng.uniform(20, 100)))
        if now < self.stalled_until:
            self.saw(Fault.DEVICE_STALLS)
            pause_s += self.stalled_until - now
        return pause_s
