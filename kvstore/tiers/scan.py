"""SlabScan: finds out at start what every slot of every slab file holds.

Only headers are read. A header tells whether it is whole itself, but not whether the payload
behind it is: a daemon killed in the middle of a write may leave a new header and half a payload.
Such a write was among the last ones. So after an unclean stop the slots with the highest write
sequences are held back until all headers are read, and their payloads are verified too. (Whatever
a scan says, a read verifies everything again.)
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

from kvstore.codecs.base import HEADER_BYTES, is_free, is_possible, unpack
from kvstore.core.errors import ChunkCorruptError
from kvstore.core.messages import ChunkHeader, Place, ScannedSlot, TierName
from kvstore.tiers.base import SCAN_BATCH_SLOTS, ScanReport
from kvstore.tiers.headers import Block, HeaderReads
from kvstore.tiers.slabs import SlabFolder

_log = logging.getLogger(__name__)

_Verify = Callable[[Place, ChunkHeader], bool]


class SlabScan:
    """One scan of a folder, in one thread. ``newest`` slots by sequence are verified in full with
    ``verify``."""

    def __init__(self, folder: SlabFolder, newest: int, verify: _Verify) -> None:
        self._folder = folder
        self._newest = newest
        self._verify = verify
        self._batch: list[ScannedSlot] = []
        self._held: list[tuple[int, int, ScannedSlot]] = []
        self._slots = 0
        self._damaged = 0

    def run(self, report: ScanReport, stop: threading.Event) -> None:
        """Report every slot once, in batches; return early once ``stop`` is set."""
        with HeaderReads(self._folder.io) as reads:
            for slab, slot_bytes in self._folder.slabs().items():
                for slot in self._slots_of(reads, slab, slot_bytes):
                    if stop.is_set():
                        return
                    self._found(slot, report)
        for _, _, slot in sorted(self._held):
            if stop.is_set():
                return
            self._settle(slot, report)
        self._flush(report)
        _log.info("nvme: scanned %d slots, %d damaged", self._slots, self._damaged)

    def _slots_of(self, reads: HeaderReads, slab: int, slot_bytes: int) -> Iterator[ScannedSlot]:
        """Every slot of a slab; all of them hold nothing where its file can't be opened."""
        count = self._folder.slots(slot_bytes)
        places = (Place(TierName.NVME, slab, index, slot_bytes) for index in range(count))
        try:
            with (
                self._folder.existing(slab, slot_bytes) as fd,
                closing(reads.blocks(fd, count, slot_bytes)) as blocks,
            ):
                end = os.fstat(fd).st_size
                for block in blocks:
                    before = self._damaged
                    place = next(places)
                    header = self._header(place, block, end)
                    yield ScannedSlot(place, header, self._damaged > before)
        except OSError as error:
            _log.error("nvme: slab %d (%d) can't be read: %s", slab, slot_bytes, error)
            for place in places:
                yield ScannedSlot(place, None)

    def _header(self, place: Place, block: Block, end: int) -> ChunkHeader | None:
        """What stands in a slot's header, None unless it is whole and its chunk fits."""
        if block is None:
            return None
        if isinstance(block, OSError):
            _log.warning("nvme: slab %d slot %d: %s", place.slab, place.index, block)
            self._damaged += 1
            return None
        offset = place.index * place.slot_bytes
        try:
            header, payload = unpack(block)
        except ChunkCorruptError:
            self._damaged += not is_free(block)
            return None
        room = min(place.slot_bytes, end - offset) - HEADER_BYTES
        if not is_possible(header, payload, room):
            self._damaged += 1
            return None
        return header

    def _found(self, slot: ScannedSlot, report: ScanReport) -> None:
        self._slots += 1
        if slot.header is None or not self._newest:
            self._add(slot, report)
            return
        entry = (slot.header.sequence, self._slots, slot)
        if len(self._held) < self._newest:
            heapq.heappush(self._held, entry)
        else:
            self._add(heapq.heappushpop(self._held, entry)[2], report)

    def _settle(self, slot: ScannedSlot, report: ScanReport) -> None:
        """Report a slot that was held back, after a look at its payload."""
        if slot.header is not None and not self._verify(slot.place, slot.header):
            self._damaged += 1
            slot = ScannedSlot(slot.place, None, damaged=True)
        self._add(slot, report)

    def _add(self, slot: ScannedSlot, report: ScanReport) -> None:
        self._batch.append(slot)
        if len(self._batch) == SCAN_BATCH_SLOTS:
            self._flush(report)

    def _flush(self, report: ScanReport) -> None:
        if self._batch:
            report(tuple(self._batch))
            self._batch = []
