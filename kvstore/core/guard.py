"""guarded: the one broad ``except`` of kvstore, for its outer boundaries.

A boundary is where work of many owners is driven: a request, a Move, an engine's call of a
connector. An error that nobody expected costs the one piece of work and not the thread, the daemon
or the engine that drives it. tests/test_tidy.py lists the boundaries; elsewhere an ``except`` names
what it expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def guarded(work: Callable[[], Answer], otherwise: Callable[[Exception], Answer]) -> Answer:
    """What ``work`` gives; where it raises anything but an order to end, what ``otherwise`` makes
    of the error. It logs and counts, and may raise what must go further."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 (a boundary)
        return otherwise(error)
