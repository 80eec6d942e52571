"""FaultyTier: a real tier that fails on demand, and a way to damage bytes at rest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.core.messages import ChunkHeader, Place, TierName
from kvstore.tiers.base import IOKind, ScanReport, Tier, TierIOStats

_Bytes = NDArray[np.uint8]


class SlabBytes:
    """The bytes at rest of an NVMe folder, to damage them behind the tier's back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def poke(self, place: Place, offset: int, data: bytes) -> None:
        """Overwrite bytes of a slot, from its header on."""
        with self._open(place) as file:
            os.pwrite(file.fileno(), data, place.index * place.slot_bytes + offset)

    def peek(self, place: Place, offset: int, nbytes: int) -> bytes:
        """Bytes of a slot, from its header on."""
        with self._open(place) as file:
            return os.pread(file.fileno(), nbytes, place.index * place.slot_bytes + offset)

    def flip(self, place: Place, bit: int) -> None:
        """Turn one bit of a slot over."""
        (byte,) = self.peek(place, bit // 8, 1)
        self.poke(place, bit // 8, bytes([byte ^ 1 << bit % 8]))

    def _open(self, place: Place) -> FileIO:
        name = f"slab_{place.slab}_{place.slot_bytes}.kv"
        return FileIO(self._folder / name, "r+")


class FaultyTier:
    """A real tier whose operations fail, wait or lie on demand; passes the same contract when
    nothing is injected.

    Each injected fault hits the operations of its kind in turn: the first fault the next
    operation, the second the one after it.
    """

    def __init__(self, tier: Tier, at_rest: SlabBytes | None = None) -> None:
        self.name: TierName = tier.name
        self._tier = tier
        self._at_rest = at_rest
        self._lock = threading.Lock()
        self._faults: dict[IOKind, list[Callable[[Place], None] | None]] = {k: [] for k in IOKind}
        self._torn: dict[Place, int] = {}
        self.calls: list[tuple[IOKind, Place]] = []

    def fail(self, kind: IOKind, error: Exception, after: int = 0) -> None:
        """The operation after the next ``after`` ones raises ``error`` instead of doing
        anything."""

        def raise_error(_: Place) -> None:
            raise error

        self.inject(kind, raise_error, after)

    def inject(self, kind: IOKind, fault: Callable[[Place], None], after: int = 0) -> None:
        """``fault`` runs before the operation after the next ``after`` ones; it may wait (a slow
        device) or raise."""
        with self._lock:
            self._faults[kind] += [None] * after + [fault]

    def tear(self, place: Place, kept_bytes: int) -> None:
        """Of the next write to ``place`` only the first bytes reach the device, which says that
        all went well."""
        self._torn[place] = kept_bytes

    def open(self) -> None:
        """Open the real tier."""
        self._tier.open()

    def close(self) -> None:
        """Close the real tier."""
        self._tier.close()

    def read(self, place: Place, header: ChunkHeader, out: _Bytes) -> None:
        """The real read, unless a fault hits it."""
        self._hit(IOKind.READ, place)
        self._tier.read(place, header, out)

    def write(self, place: Place, header: ChunkHeader, payload: _Bytes) -> None:
        """The real write, unless a fault hits it."""
        self._hit(IOKind.WRITE, place)
        self._tier.write(place, header, payload)
        kept = self._torn.pop(place, place.slot_bytes)
        if kept < place.slot_bytes:
            assert self._at_rest is not None, "FaultyTier.tear needs at_rest"
            self._at_rest.poke(place, kept, bytes(place.slot_bytes - kept))

    def erase(self, place: Place) -> None:
        """The real erasure, unless a fault hits it."""
        self._hit(IOKind.ERASE, place)
        self._tier.erase(place)

    def scan(self, report: ScanReport, stop: threading.Event) -> None:
        """The real scan."""
        self._tier.scan(report, stop)

    def stats(self) -> TierIOStats:
        """The real tier's snapshot."""
        return self._tier.stats()

    def _hit(self, kind: IOKind, place: Place) -> None:
        with self._lock:
            self.calls.append((kind, place))
            queue = self._faults[kind]
            fault = queue.pop(0) if queue else None
        if fault is not None:
            fault(place)
