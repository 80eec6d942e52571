"""What the core counts, as frozen snapshots, and the latency histogram it counts with."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate


class Drop(Enum):
    """Why a chunk part was not kept or given back: nothing is lost silently."""

    HOST_FULL = "host_full"
    HOST_QUOTA = "host_quota"
    ENGINE_NOT_READY = "engine_not_ready"
    SESSION_LIMIT = "session_limit"
    PARENT_MISSING = "parent_missing"
    PARENT_LOST = "parent_lost"
    NULL_BLOCK = "null_block"
    BAD_BLOCK = "bad_block"
    CANCELLED = "cancelled"
    SESSION_LOST = "session_lost"
    STORE_FAILED = "store_failed"
    READ_FAILED = "read_failed"
    LOAD_FAILED = "load_failed"
    ERASE_FAILED = "erase_failed"
    CORRUPT = "corrupt"
    KEY_COLLISION = "key_collision"
    CLEARED = "cleared"
    NVME_FULL = "nvme_full"
    NVME_QUOTA = "nvme_quota"
    NVME_PARENT_MISSING = "nvme_parent_missing"
    NVME_BACKLOG = "nvme_backlog"
    NVME_BUDGET = "nvme_budget"
    NVME_ADMISSION = "nvme_admission"
    NVME_WRITE_FAILED = "nvme_write_failed"
    EVICTED_BEFORE_WRITE = "evicted_before_write"
    REDIS_BACKLOG = "redis_backlog"
    REDIS_DOWN = "redis_down"
    REDIS_PROBE_FAILED = "redis_probe_failed"
    REDIS_WRITE_FAILED = "redis_write_failed"
    REDIS_FULL = "redis_full"
    REDIS_READ_FAILED = "redis_read_failed"
    REDIS_LOST = "redis_lost"
    EVICTED_BEFORE_REDIS = "evicted_before_redis"
    SCAN_TORN = "scan_torn"
    SCAN_ORPHAN = "scan_orphan"
    SCAN_OLD_EPOCH = "scan_old_epoch"
    SCAN_DUPLICATE = "scan_duplicate"


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Count and percentiles of a latency, in seconds; zeros where nothing was counted."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """What the core knows of one tier. ``slots_total`` counts the slots of slabs cut so far and
    the room of uncut slabs, by the slot size in use; ``hits`` and ``misses`` count chunks of
    lookups."""

    name: str
    slots_used: int
    slots_total: int
    bytes_used: int
    bytes_total: int
    chunks: int
    hits: int
    misses: int
    evictions: int
    pinned: int
    scanning: bool
    full: bool


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """What the core knows of the remote tier. ``hits`` and ``misses`` count chunks of lookups
    beyond their local hit, while it was ``up``.

    ``probes`` were made for lookups, ``probes_failed`` of them; ``waiting`` lookups are pending
    now, ``timed_out`` got their local answer at the deadline, ``late`` probes came after it and
    were remembered, ``remembered`` lookups were answered by one. ``backlog`` chunk parts wait for
    their write; ``present`` weren't written as they were there already, ``written`` were.
    """

    up: bool
    hits: int
    misses: int
    probes: int
    probes_failed: int
    waiting: int
    timed_out: int
    late: int
    remembered: int
    backlog: int
    present: int
    written: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine: ``ranks_registered`` of ``ranks`` are there; ``namespace`` is the digest its
    keys start from; ``uncached`` names KV that it keeps and doesn't register."""

    engine: str
    tenant: str
    model: str
    alias: str
    ready: bool
    ranks_registered: int
    ranks: int
    sessions: int
    namespace: str
    uncached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpaceStats:
    """One namespace of one tenant."""

    tenant: str
    model: str
    alias: str
    namespace: str
    epoch: int
    chunks: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What a tenant holds of one tier, and may hold (None: all)."""

    tenant: str
    tier: str
    bytes_used: int
    bytes_quota: int | None


@dataclass(frozen=True, slots=True)
class CoreStats:
    """A snapshot of the whole core. ``spaces`` are some of ``spaces_total``, the rest is asked for
    in pages. ``changes_dropped`` counts what sessions that watch weren't told, as they had fallen
    behind."""

    tiers: tuple[TierStats, ...]
    engines: tuple[EngineStats, ...]
    spaces: tuple[SpaceStats, ...]
    spaces_total: int
    sessions: int
    leases: int
    moves_in_flight: int
    moves_queued: int
    write_backlog: int
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    stored_chunks: int
    retrieved_chunks: int
    store: LatencySummary
    retrieve: LatencySummary
    drops: dict[str, int] = field(default_factory=dict)
    watchers: int = 0
    changes_dropped: int = 0
    remote: RemoteStats | None = None
    tenants: tuple[TenantStats, ...] = ()


class Histogram:
    """A latency histogram: buckets grow by a quarter from 1 us, so a percentile is that close.

    ``add`` is O(1) and allocates nothing; 120 buckets reach beyond a day.
    """

    _BASE_S = 1e-6
    _GROWTH = 1.25
    _BUCKETS = 120

    def __init__(self) -> None:
        self._counts = [0] * self._BUCKETS
        self._bounds_s = [self._BASE_S * self._GROWTH**i for i in range(self._BUCKETS)]
        self._max_s = 0.0

    def add(self, latency_s: float) -> None:
        """Count one latency."""
        place = min(bisect_left(self._bounds_s, latency_s), self._BUCKETS - 1)
        self._counts[place] += 1
        self._max_s = max(self._max_s, latency_s)

    def summary(self) -> LatencySummary:
        """Percentiles so far: each the upper bound of its bucket, never more than the largest
        latency seen."""
        total = sum(self._counts)
        if not total:
            return LatencySummary(0, 0.0, 0.0, 0.0, 0.0)
        marks = []
        for share in (0.5, 0.9, 0.99):
            sums = accumulate(self._counts)
            place = next(i for i, seen in enumerate(sums) if seen >= share * total)
            marks.append(min(self._bounds_s[place], self._max_s))
        return LatencySummary(total, marks[0], marks[1], marks[2], self._max_s)
