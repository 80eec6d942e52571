"""Tier: bytes at rest, by place. No policy and no index: which chunk lies where is the core's
business."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ChunkCorruptError
from kvstore.core.messages import ChunkHeader, Place, ScannedSlot, TierName

SCAN_BATCH_SLOTS = 1000
FAILING_AFTER = 3
"""One refusal may be a bad sector; so many in a row are a device that fails."""

ScanReport: TypeAlias = Callable[[tuple[ScannedSlot, ...]], None]


class ChunkForeignError(ChunkCorruptError):
    """A whole chunk, but another one than was asked for."""


@dataclass(frozen=True, slots=True)
class TierIOStats:
    """What a tier has read and written since it was opened. ``busy_s`` sums the time of all
    threads inside reads, writes and erasures; ``errors`` counts operations that failed, corrupt
    and foreign chunks included. ``failing`` is the last error of a kind of operation that the
    device refused FAILING_AFTER times in a row, empty where there is none. ``ahead_bytes`` of files
    are written ahead of their use."""

    name: str
    mode: str
    bytes_read: int
    bytes_written: int
    reads: int
    writes: int
    erases: int
    read_s: float
    write_s: float
    erase_s: float
    errors: int
    failing: str = ""
    ahead_bytes: int = 0


class Tier(Protocol):
    """A lower tier: chunks with headers, each at a Place.

    Guaranteed by the caller: ``open`` first, ``close`` last and once; one operation at a time per
    place; a place's slot holds header and payload; arrays are contiguous uint8 of
    ``header.payload_bytes``, nobody writes a payload during a write or touches ``out`` during a
    read; a place is read only after it was written or seen in the scan.

    The implementation is responsible for: working from several threads; holding no interpreter
    lock while bytes move; returning from ``read`` only if header, every field of it (``sequence``
    excepted) and payload are verified; mapping foreign errors: CapacityError for a full device,
    TierUnavailableError for everything else the device refuses.
    """

    name: TierName

    def open(self) -> None:
        """Make the tier usable. Raises TierUnavailableError or ConfigError, and holds nothing
        then."""

    def close(self) -> None:
        """Finish cleanly and let go of everything. Idempotent."""

    def read(self, place: Place, header: ChunkHeader, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with the verified payload of the chunk ``header`` at ``place``.

        Raises ChunkCorruptError (damaged, torn, erased or absent), ChunkForeignError (whole, but
        another chunk's) or TierUnavailableError; what ``out`` holds is undefined then.
        """

    def write(self, place: Place, header: ChunkHeader, payload: NDArray[np.uint8]) -> None:
        """Put a chunk at ``place``, over whatever was there. After an error the place holds
        nothing valid, or what was there."""

    def erase(self, place: Place) -> None:
        """Make sure that whatever is at ``place`` is never found again, not even after a power
        cut."""

    def scan(self, report: ScanReport, stop: threading.Event) -> None:
        """Report every slot that exists at rest exactly once, at most SCAN_BATCH_SLOTS at a time;
        return early once ``stop`` is set. Runs beside reads and writes of slots already reported.
        """

    def stats(self) -> TierIOStats:
        """A snapshot of what was done so far."""


class IOKind(Enum):
    """What an operation did, for counting."""

    READ = "read"
    WRITE = "write"
    ERASE = "erase"


class IOCounter:
    """Counts a tier's operations from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations = dict.fromkeys(IOKind, 0)
        self._bytes = dict.fromkeys(IOKind, 0)
        self._seconds = dict.fromkeys(IOKind, 0.0)
        self._errors = 0
        self._running = 0
        self._ended_s = time.monotonic()
        self._refused: dict[IOKind, list[str]] = {kind: [] for kind in IOKind}

    def begin(self) -> None:
        """An operation begins."""
        with self._lock:
            self._running += 1

    def end(self) -> None:
        """It has ended, well or not."""
        with self._lock:
            self._running -= 1
            self._ended_s = time.monotonic()

    def idle_s(self) -> float:
        """For how long none has been running, since it was made at most; 0 while one is."""
        with self._lock:
            return 0.0 if self._running else time.monotonic() - self._ended_s

    def add(self, kind: IOKind, nbytes: int, seconds: float) -> None:
        """Count an operation that succeeded."""
        with self._lock:
            self._operations[kind] += 1
            self._refused[kind].clear()
            self._bytes[kind] += nbytes
            self._seconds[kind] += seconds

    def fail(self) -> None:
        """Count an operation that failed."""
        with self._lock:
            self._errors += 1

    def refuse(self, kind: IOKind, reason: str) -> None:
        """Count an operation that the device refused."""
        with self._lock:
            self._errors += 1
            self._refused[kind] = [*self._refused[kind], reason][-FAILING_AFTER:]

    def stats(self, name: str, mode: str) -> TierIOStats:
        """A consistent snapshot."""
        with self._lock:
            return TierIOStats(
                name=name,
                mode=mode,
                bytes_read=self._bytes[IOKind.READ],
                bytes_written=self._bytes[IOKind.WRITE] + self._bytes[IOKind.ERASE],
                reads=self._operations[IOKind.READ],
                writes=self._operations[IOKind.WRITE],
                erases=self._operations[IOKind.ERASE],
                read_s=self._seconds[IOKind.READ],
                write_s=self._seconds[IOKind.WRITE],
                erase_s=self._seconds[IOKind.ERASE],
                errors=self._errors,
                failing=next(
                    (r[-1] for r in self._refused.values() if len(r) == FAILING_AFTER), ""
                ),
            )
