"""Setting: what a world is made of."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvstore.core.layout import Part
from kvstore.core.limits import Limits
from kvstore.core.quotas import NO_QUOTAS
from tests.sim.faults import Faults
from tests.sim.shapes import EngineShape
from tests.sim.themes import MIXED, QUOTA_SLABS_MIN, Theme


@dataclass(frozen=True, slots=True)
class Setting:
    """What a world is made of."""

    limits: Limits
    faults: Faults
    shapes: tuple[EngineShape, ...]
    roomy: bool = False
    theme: Theme = MIXED

    def leases_hold(self) -> bool:
        """Whether a lease keeps its hit whatever else goes on: all slots have one size, so that no
        slab is ever taken for another, and leases don't end for want of room."""
        sizes = {
            -(-shape.layout.part_bytes(part) // 4096) for shape in self.shapes for part in Part
        }
        return len(sizes - {0}) == 1 and self.limits.leases_max > 1000


def shrunk(limits: Limits, rng: random.Random) -> Limits:
    """Limits of the next start: sometimes another size of either tier."""
    host, nvme = limits.host, limits.nvme
    if rng.random() < 0.3:
        least = 1 if limits.quotas == NO_QUOTAS else QUOTA_SLABS_MIN
        host = replace(host, slabs=rng.randint(least, 7))
    if nvme is not None and rng.random() < 0.2:
        nvme = replace(nvme, slabs=rng.randint(1, 8))
    return replace(limits, host=host, nvme=nvme)
