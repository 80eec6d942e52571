"""HeaderReads: the headers of a slab's slots, several reads ahead of whoever looks at them.

One read a header would leave the disk idle while the header is parsed. So a few threads read pieces
of many slots ahead: headers of small slots with whole stretches of the file, which a disk hands
over faster than single blocks, those of larger slots one by one.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import HEADER_BYTES
from kvstore.core.errors import TierUnavailableError
from kvstore.tiers.block_io import BlockIO, aligned_empty
from kvstore.tiers.priority import lower_priority

PIECE_SLOTS = 64
"""Headers that one thread reads at a time."""
STRETCH_BYTES = 1 << 20
SMALL_SLOT_BYTES = 64 << 10
"""Slots up to this size are read in whole, STRETCH_BYTES at a time."""
THREADS = 4
_AHEAD = 2 * THREADS

Block = NDArray[np.uint8] | OSError | None
"""A header's bytes; why they can't be read; or None where the file has ended."""


class HeaderReads:
    """Threads that read headers. A context manager; one ``blocks`` at a time."""

    def __init__(self, io: BlockIO) -> None:
        self._io = io
        self._threads = ThreadPoolExecutor(THREADS, "scan-read", lower_priority)

    def __enter__(self) -> HeaderReads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def blocks(self, fd: int, slots: int, slot_bytes: int) -> Generator[Block, None, None]:
        """Each slot's header, in order; nothing reads the descriptor any more once the iterator has
        ended or was closed. Raises TierUnavailableError where the system refuses threads."""
        small = slot_bytes <= SMALL_SLOT_BYTES
        step = max(1, STRETCH_BYTES // slot_bytes) if small else PIECE_SLOTS
        read = self._stretch if small else self._singles
        ahead: deque[Future[list[Block]]] = deque()
        try:
            for first in range(0, slots, step):
                count = min(step, slots - first)
                ahead.append(self._submit(functools.partial(read, fd, first, count, slot_bytes)))
                if len(ahead) == _AHEAD:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
            wait(ahead)

    def _submit(self, read: functools.partial[list[Block]]) -> Future[list[Block]]:
        try:
            return self._threads.submit(read)
        except RuntimeError as error:
            raise TierUnavailableError(
                f"nvme: the system refuses a thread ({error}); raise the limit on processes"
            ) from error

    def _stretch(self, fd: int, first: int, count: int, slot_bytes: int) -> list[Block]:
        """The headers of neighbours by one read; one by one from where it ended early."""
        nbytes = (count - 1) * slot_bytes + HEADER_BYTES
        data = aligned_empty(nbytes)
        try:
            done = self._io.preadv(fd, [data], first * slot_bytes)
        except OSError:
            done = 0
        whole = min(count, (done - HEADER_BYTES) // slot_bytes + 1) if done >= HEADER_BYTES else 0
        starts = range(0, whole * slot_bytes, slot_bytes)
        found: list[Block] = [data[start : start + HEADER_BYTES] for start in starts]
        return found + self._singles(fd, first + whole, count - whole, slot_bytes)

    def _singles(self, fd: int, first: int, count: int, slot_bytes: int) -> list[Block]:
        """The headers of neighbours, a read each."""
        data = aligned_empty(count * HEADER_BYTES)
        found: list[Block] = []
        for number in range(count):
            block = data[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
            try:
                done = self._io.preadv(fd, [block], (first + number) * slot_bytes)
                found.append(block if done == HEADER_BYTES else None)
            except OSError as error:
                found.append(error)
        return found
