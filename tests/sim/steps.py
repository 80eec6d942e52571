"""Steps: how much of a long work one event does, drawn small, so that the rest waits for Ticks.

The core's own steps are larger than anything that a simulated world does. In half of the worlds
they are one to four parts, so that works that go on overlap with everything else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.core import (
    batches,
    cancelling,
    clearing,
    leases,
    probing,
    reads,
    restoring,
    room,
    sharing,
    tree,
    tree_nodes,
    writing,
)

_STEPS: tuple[tuple[object, str], ...] = (
    (batches, "STEP_CHUNKS"),
    (cancelling, "STEP_PARTS"),
    (clearing, "STEP_SPACES"),
    (leases, "STEP_LEASES"),
    (restoring, "STEP_COPIES"),
    (reads, "STEP_READERS"),
    (room, "STEP_COPIES"),
    (tree, "STEP_COPIES"),
    (writing, "LOOKS"),
    (tree_nodes, "SPLIT_ENTRIES"),
    (probing, "STEP_WAITERS"),
    (sharing, "STEP_PARTS"),
    (sharing, "PROBE_PARTS"),
    (reads, "STEP_READS"),
    (reads, "ABOVE_MAX"),
)


@contextmanager
def drawn_steps(seed: int) -> Iterator[None]:
    """Draw the steps of a seed's world, and put them back afterwards."""
    draw = random.Random(f"steps {seed}")
    before = [getattr(module, name) for module, name in _STEPS]
    if draw.random() < 0.5:
        for module, name in _STEPS:
            setattr(module, name, draw.randint(1, 4))
    try:
        yield
    finally:
        for (module, name), value in zip(_STEPS, before, strict=True):
            setattr(module, name, value)
