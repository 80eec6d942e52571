"""HostTier: one private arena of host memory, cut into slots by the core.

The arena is anonymous memory that nobody else can map, so no tenant can see another's bytes. It
asks for huge pages (they touch five to ten times as fast as small ones) and is touched in the
background in steps, so that the daemon serves at once and the first store into a slot doesn't pay
for its pages. Touching is a populate that doesn't change bytes: slots may be in use meanwhile.
"""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import CapacityError, ConfigError, InvariantError
from kvstore.core.messages import Place
from kvstore.memory import PAGE_BYTES, MappedRange, advise_huge_pages, map_anonymous, populate
from kvstore.tiers.priority import lower_priority
from kvstore.tiers.threads import start_thread

_log = logging.getLogger(__name__)

TOUCH_STEP_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class HostStats:
    """The arena: its size, how much of it was touched so far, and what pages it has. ``mode`` is
    one line for a person."""

    bytes_total: int
    bytes_touched: int
    bytes_huge: int
    mode: str


class HostTier:
    """The host arena of ``slabs`` slabs (staging included) of ``slab_bytes`` each."""

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        self._memory: MappedRange | None = None
        self._array: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._touched_bytes = 0
        self._huge_bytes = 0
        self._mode = "closed"

    def open(self) -> None:
        """Map the arena and start touching it. Raises ConfigError for sizes that don't fit or
        that the machine refuses, TierUnavailableError where it refuses the thread."""
        if self.slabs < 1 or self.slab_bytes < PAGE_BYTES or self.slab_bytes % PAGE_BYTES:
            raise ConfigError(
                f"host: slabs={self.slabs} slab_bytes={self.slab_bytes}; valid are 1 or more "
                f"slabs of a multiple of {PAGE_BYTES} bytes"
            )
        nbytes = self.slabs * self.slab_bytes
        try:
            self._memory = map_anonymous(nbytes)
        except OSError as error:
            raise ConfigError(
                f"host: the system refuses {nbytes} bytes of memory ({error.strerror}); ask for "
                "less or raise the limit"
            ) from error
        asked = advise_huge_pages(self._memory.address, nbytes) and _huge_pages_enabled()
        self._mode = (
            "huge pages asked for" if asked else "small pages: the system has huge pages off"
        )
        self._array = np.frombuffer(self._memory.buffer, np.uint8)
        self._touched_bytes = self._huge_bytes = 0
        self._stop.clear()
        touch = functools.partial(self._touch, self._memory.address, nbytes)
        self._thread = start_thread("host-touch", touch)

    def close(self) -> None:
        """Stop touching and give the memory back; no Move may be running. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._memory is not None:
            self._array = np.empty(0, np.uint8)
            self._memory.close()
            self._memory = None
            self._mode = "closed"

    def view(self, place: Place, nbytes: int) -> NDArray[np.uint8]:
        """The first ``nbytes`` of a slot, uint8 and writable, aligned to 4 KiB. Borrowed: the
        core's pin on the slot protects it. Raises InvariantError for a place outside the arena."""
        start = place.slab * self.slab_bytes + place.index * place.slot_bytes
        inside = 0 <= place.index < self.slab_bytes // place.slot_bytes
        if not (inside and 0 <= place.slab < self.slabs and 0 <= nbytes <= place.slot_bytes):
            raise InvariantError(f"host: {nbytes} bytes at {place} lie outside the arena")
        return self._array[start : start + nbytes]

    def stats(self) -> HostStats:
        """A snapshot."""
        return HostStats(
            bytes_total=self.slabs * self.slab_bytes,
            bytes_touched=self._touched_bytes,
            bytes_huge=self._huge_bytes,
            mode=self._mode,
        )

    def wait_touched(self, timeout_s: float) -> bool:
        """Wait until touching has ended, for whatever reason; False when time runs out first."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _touch(self, address: int, nbytes: int) -> None:
        lower_priority()
        for start in range(0, nbytes, TOUCH_STEP_BYTES):
            if self._stop.is_set():
                return
            step = min(TOUCH_STEP_BYTES, nbytes - start)
            try:
                populate(address + start, step)
            except CapacityError as error:
                self._mode = f"touched in part: {error}"
                _log.warning("host: touching stopped at %d of %d bytes: %s", start, nbytes, error)
                return
            self._touched_bytes = start + step
        self._huge_bytes = _huge_bytes(address, nbytes)
        share = 100 * self._huge_bytes // nbytes
        self._mode = f"huge pages ({share} %)" if self._huge_bytes else "small pages"
        _log.info("host: %d MiB touched, %s", nbytes >> 20, self._mode)


def _huge_pages_enabled() -> bool:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return "[never]" not in file.read()
    except OSError:
        return False


def _huge_bytes(address: int, nbytes: int) -> int:
    """Bytes of huge pages in a range, from the kernel's own count of this process's mappings."""
    found, inside = 0, False
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
            for line in file:
                head, _, rest = line.partition(" ")
                if "-" in head and not head.endswith(":"):
                    start, _, end = head.partition("-")
                    inside = int(start, 16) < address + nbytes and int(end, 16) > address
                elif inside and head == "AnonHugePages:":
                    found += int(rest.split()[0]) * 1024
    except OSError:
        return 0
    return min(found, nbytes)
