"""What a session says and hears of what its engine's namespace gains and loses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ChangeKind(IntEnum):
    """What happened in a tier to a chunk, or to its window part, which comes after the rest of the
    chunk and may leave before it; where it was gained it can be loaded from."""

    HOST_LOST = 0
    HOST_GAINED = 1
    NVME_LOST = 2
    NVME_GAINED = 3
    HOST_WINDOW_LOST = 4
    HOST_WINDOW_GAINED = 5
    NVME_WINDOW_LOST = 6
    NVME_WINDOW_GAINED = 7


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell this session, once, what changed since its last Watch was answered; the first one is
    answered at once, with a resync. Each answer takes another Watch, so a session that falls behind
    is owed one answer and not more."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Reply to Watch: ``keys`` changed as ``kinds`` (one byte a key, a ChangeKind) say, in this
    order. With ``resync`` everything told before is void, and may or may not be there still."""

    keys: bytes
    kinds: bytes
    resync: bool
