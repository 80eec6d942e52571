"""Faults that the core must survive, and how often a world has them.

What the simulator injects; through all of it a retrieve gives the right bytes or says that it
didn't:

* A Move of any kind is slow, out of order with others, or stuck for minutes.
* STORE, LOAD: fail in the middle (an unmapped page, a lost device); the target is half written.
* READ: an I/O error; the bytes at rest fail their check; they are whole, but another chunk's.
* WRITE: an I/O error or a full disk, before or after part of the record was overwritten.
* ERASE: fails, and the header stays.
* Bits flip at rest, in a payload or in a header; a record lies at another record's place.
* A session's connection breaks at any time, in the middle of its own transfers, or its engine's.
* The daemon dies at any time: all of the host tier is lost, a write in flight is torn (header
  written or not, payload half or whole), an erase in flight happened or not, the manifest in flight
  is there or not. It comes back with another tier size and finds its slots in any order.
* A manifest can't be written.
* Engines cancel, repeat, release, or forget what they asked for, at any time, and ask for what
  isn't there.
* Engines send nonsense: blocks that aren't theirs, stores with an impossible place in a chain,
  requests of sessions that never registered.

What it doesn't inject: hands that report a Move's end early or touch memory afterwards, bits that
flip in host memory (DESIGN: host slots are trusted), and engines that reuse blocks before they are
theirs again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities: ``move_*`` a Move, ``*_rate`` an action of the world (one each few
    milliseconds)."""

    move_fails: float = 0.02
    move_slow: float = 0.05
    move_stuck: float = 0.002
    disk_full: float = 0.01
    erase_fails: float = 0.1
    flip_rate: float = 0.02
    misplace_rate: float = 0.01
    close_rate: float = 0.01
    crash_rate: float = 0.004
    clear_rate: float = 0.01
    revision_rate: float = 0.002
    persist_fails: float = 0.05
    cancel: float = 0.1
    forget_release: float = 0.2
    nonsense: float = 0.02


NONE = Faults(**{field.name: 0.0 for field in fields(Faults)})
"""A world in which nothing goes wrong and nobody leaves."""


def draw(rng: random.Random) -> Faults:
    """Faults of one world: a third have all kinds, a third a few at a higher rate, a third are
    calm."""
    kind = rng.random()
    if kind < 0.34:
        return Faults()
    if kind < 0.67:
        chosen = rng.sample([field.name for field in fields(Faults)], 4)
        return replace(NONE, **{name: 4 * getattr(Faults(), name) for name in chosen})
    return replace(NONE, cancel=0.05, clear_rate=0.002, forget_release=0.1)
