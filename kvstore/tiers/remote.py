"""RemoteTier: a tier that several nodes share. It is probed, read and written; it has no slots, no
scan and no index of ours, and anything in it may vanish at any time."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.core.messages import ChunkHeader, Place
from kvstore.core.remote_messages import Probe, Probed, RemoteClear, RemoteCleared, RemoteEnter
from kvstore.tiers.base import TierIOStats


class RemoteTier(Protocol):
    """Chunks with headers, by namespace, epoch, key, shard and part.

    Guaranteed by the caller: ``open`` first; ``place.slab`` is an epoch that a Probed told; arrays
    are contiguous uint8 of ``header.payload_bytes``, nobody writes a payload during a write or
    touches ``out`` during a read.

    The implementation is responsible for: working from several threads; holding no interpreter
    lock while bytes move; a deadline of its own for each call, so that none ever waits for ever;
    refusing at once while the tier is known to be down, and after ``close``; returning from
    ``read`` only if header, every field of it (``sequence`` excepted) and payload are verified;
    returning from ``write`` only after the other side acknowledged it; no secret in any error's
    text; mapping foreign errors: CapacityError where the other side's memory is full,
    TierUnavailableError for everything else that it refuses.
    """

    def open(self) -> None:
        """Begin to connect; returns at once, whatever the other side does."""

    def close(self) -> None:
        """Let go of everything; calls in other threads end at once with TierUnavailableError.
        Idempotent."""

    def read(self, place: Place, header: ChunkHeader, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with the verified payload of the chunk ``header``, whose epoch is
        ``place.slab``.

        Raises ChunkCorruptError (damaged or absent), ChunkForeignError (whole, but another
        chunk's) or TierUnavailableError; what ``out`` holds is undefined then.
        """

    def write(self, place: Place, header: ChunkHeader, payload: NDArray[np.uint8]) -> None:
        """Put a chunk into the epoch ``place.slab``. Raises CapacityError or
        TierUnavailableError; a reader finds then what was there before, or nothing valid."""

    def probe(self, probe: Probe) -> Probed:
        """Which keys are there, by part and for all shards, and the namespace's epoch; an error
        where that can't be said."""

    def enter(self, enter: RemoteEnter) -> None:
        """Make a namespace known, so that clears by any node find it. Raises CapacityError or
        TierUnavailableError."""

    def clear(self, clear: RemoteClear) -> RemoteCleared:
        """Raise the epoch of each namespace that matches: nothing that was there is found
        afterwards, by any node. An error where that isn't sure for all of them."""

    def stats(self) -> TierIOStats:
        """A snapshot of what was done so far."""
