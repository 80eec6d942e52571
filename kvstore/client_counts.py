"""What a session counts of its connections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LinkCounts:
    """What a session's links count, one after the other."""

    links: int = 0
    losses: int = 0
    lookups: int = 0
    lookups_overdue: int = 0
    lookups_skipped: int = 0
    transfers: int = 0
    transfers_refused: int = 0
