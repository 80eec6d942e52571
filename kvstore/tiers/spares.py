"""Spares: slab files that are written with zeros before they are used.

The first write to a fresh extent of a file is about half as fast as later ones, however the extent
was reserved. So a thread keeps some whole files written ahead, and a slab that is cut takes one of
them by renaming it. A spare holds nothing but zeros, and so does what a crash leaves of one.

The thread does as little harm as it can: one step at a time, at a bounded rate, at a low priority,
and none before the tier has been at rest for a while: an engine that fills the cores pays for each
byte that is written beside it, and where it stores without a pause, zeros would only double what
the disk takes. Spares count against the tier's limit; where that is
reached they become its last slabs.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.block_io import BlockIO, aligned_empty
from kvstore.tiers.priority import lower_priority
from kvstore.tiers.regular_file import open_regular
from kvstore.tiers.slab_files import UNFINISHED_SPARE_NAME, slab_files, spare_name
from kvstore.tiers.threads import start_thread

_log = logging.getLogger(__name__)

STEP_BYTES = 4 << 20
RATE_BYTES_S = 256 << 20
REST_S = 2.0
"""So long the tier has done nothing before anything is written ahead."""
BUSY_PAUSE_S = 0.1
"""Between looks whether it has."""
ENOUGH_PAUSE_S = 0.5
"""Between looks whether a spare was taken."""
FAILED_PAUSE_S = 30.0


class Spares:
    """The spares of one folder, ``slab_bytes`` each; thread-safe. Owns its thread and their files.

    ``room()`` tells how many files the tier's limit allows beside those of its slabs. ``take`` is
    called while the tier isn't idle, and what it makes room for is there before the tier is.
    """

    def __init__(self, folder: Path, slab_bytes: int, io: BlockIO, room: Callable[[], int]) -> None:
        self._folder = folder
        self._slab_bytes = slab_bytes
        self._io = io
        self._room = room
        self._wanted = 0
        self._flags = 0
        self._idle_s: Callable[[], float] = lambda: REST_S
        self._lock = threading.Lock()
        self._ready: list[Path] = []
        self._fd: int | None = None
        self._done_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, ahead_bytes: int, direct: bool, idle_s: Callable[[], float]) -> None:
        """Take over the spares that are there, and make more in a thread until ``ahead_bytes`` are
        written; 0: none. ``idle_s`` tells for how long the tier has done nothing. Raises OSError,
        and TierUnavailableError where there is no thread."""
        self._wanted = -(-ahead_bytes // self._slab_bytes)
        self._flags = os.O_DIRECT if direct else 0
        self._idle_s = idle_s
        (self._folder / UNFINISHED_SPARE_NAME).unlink(missing_ok=True)
        for name in slab_files(self._folder, self._slab_bytes).spares:
            path = self._folder / name
            whole = path.stat().st_size == self._slab_bytes
            if whole and len(self._ready) < self._most():
                self._ready.append(path)
            else:
                path.unlink()
        self._stop.clear()
        if self._wanted:
            self._thread = start_thread("nvme-spares", self._run)

    def close(self) -> None:
        """End the thread; finished spares stay for the next start. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            self._drop()
            self._ready.clear()

    def take(self, path: Path, nbytes: int) -> bool:
        """Make a spare the file at ``path``, of ``nbytes``; False where none is ready. Then the
        caller makes a file, for which one that isn't finished gives way. Raises OSError."""
        with self._lock:
            while self._ready:
                spare = self._ready.pop()
                try:
                    os.truncate(spare, nbytes)
                    spare.rename(path)
                except FileNotFoundError:
                    _log.warning("nvme: %s is gone; others may use its folder", spare)
                    continue
                return True
            if self._room() < 2:
                self._drop()
            return False

    def ready_bytes(self) -> int:
        """Bytes of finished spares."""
        return len(self._ready) * self._slab_bytes

    def _run(self) -> None:
        lower_priority()
        zeros = aligned_empty(STEP_BYTES)
        zeros[:] = 0
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            with self._lock:
                try:
                    pause_s = self._step(zeros)
                except OSError as error:
                    _log.warning("nvme: no file is written ahead: %s", error)
                    self._drop()
                    pause_s = FAILED_PAUSE_S

    def _step(self, zeros: NDArray[np.uint8]) -> float:
        """Write a little; returns how long to wait then."""
        if self._idle_s() < REST_S:
            return BUSY_PAUSE_S
        if len(self._ready) >= self._most():
            self._drop()
            return ENOUGH_PAUSE_S
        if self._fd is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | self._flags
            self._fd = open_regular(self._folder / UNFINISHED_SPARE_NAME, flags)
            self._done_bytes = 0
        part = zeros[: self._slab_bytes - self._done_bytes]
        if self._io.pwritev(self._fd, [part], self._done_bytes) < part.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._done_bytes += part.nbytes
        if self._done_bytes == self._slab_bytes:
            self._finish(self._fd)
        return part.nbytes / RATE_BYTES_S

    def _finish(self, fd: int) -> None:
        self._fd = None
        os.close(fd)
        taken = {path.name for path in self._ready}
        name = next(name for name in map(spare_name, itertools.count()) if name not in taken)
        path = (self._folder / UNFINISHED_SPARE_NAME).rename(self._folder / name)
        self._ready.append(path)

    def _drop(self) -> None:
        """Give up the one that isn't finished."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            with contextlib.suppress(OSError):
                (self._folder / UNFINISHED_SPARE_NAME).unlink()

    def _most(self) -> int:
        return min(self._wanted, self._room())
