"""Snapshot: everything that the admin service tells of a daemon, at one moment, and the Source that
it comes from."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.core.messages import Cleared
from kvstore.core.stats import CoreStats, LatencySummary

RATE_WINDOW_S = 10
"""Throughput is averaged over this many seconds, one sample each."""


@dataclass(frozen=True, slots=True)
class InOut:
    """What one tier has read and written so far; ``mode`` says how it works on this machine."""

    mode: str = ""
    reads: int = 0
    read_bytes: int = 0
    read_busy_s: float = 0.0
    writes: int = 0
    write_bytes: int = 0
    write_busy_s: float = 0.0
    erases: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class RedisFigures:
    """What the Redis tier tells of itself. ``state`` is "off", "up", or what is wrong;
    ``raw_bytes`` of payload were written as ``stored_bytes``."""

    state: str = "off"
    server: str = ""
    mode: str = ""
    nodes: int = 0
    codec: str = ""
    raw_bytes: int = 0
    stored_bytes: int = 0
    breaker_openings: int = 0
    connection_waits: int = 0
    connection_wait_s: float = 0.0
    splits: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Facts of the daemon's process. ``state`` is "ok" or one line that says what is degraded."""

    version: str
    pid: int
    uptime_s: float
    resident_bytes: int
    open_files: int
    threads: int
    socket: str
    admin: str
    state: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that Stats tells, at one moment."""

    process: ProcessFacts
    core: CoreStats
    io: Mapping[str, InOut]
    lookup: LatencySummary
    connections: int
    counters: Mapping[str, int] = field(default_factory=dict)
    redis: RedisFigures = RedisFigures()


class Source(Protocol):
    """The daemon, as administration sees it. Each call may be made from any thread, waits for the
    loop at most ``deadline_s`` and raises KVStoreError with one line for a person."""

    def snapshot(self, deadline_s: float) -> Snapshot:
        """All figures."""

    def clear(self, model: str | None, tenant: str | None, deadline_s: float) -> Cleared:
        """Forget chunks, durably."""

    def io(self) -> Mapping[str, InOut]:
        """Each tier's input and output; never waits."""

    def state(self) -> str:
        """ "ok", or one line that says what is degraded; never waits."""


class Rates:
    """Throughput of each tier over the last RATE_WINDOW_S seconds, from one sample a second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, InOut]]] = deque(maxlen=RATE_WINDOW_S + 1)

    def add(self, now_s: float, io: Mapping[str, InOut]) -> None:
        """Take a sample."""
        self._samples.append((now_s, io))

    def of(self, tier: str) -> tuple[float, float]:
        """(bytes read, bytes written) a second."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        (then, old), (now, new) = self._samples[0], self._samples[-1]
        if tier not in old or tier not in new or now <= then:
            return 0.0, 0.0
        elapsed = now - then
        read = (new[tier].read_bytes - old[tier].read_bytes) / elapsed
        written = (new[tier].write_bytes - old[tier].write_bytes) / elapsed
        return read, written
