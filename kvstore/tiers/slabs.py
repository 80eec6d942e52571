"""SlabFolder: the preallocated files of the NVMe tier and how they are opened, made and grown.

Slab *n* cut into slots of *s* bytes is one file (slab_files.py) of ``slab_bytes // s`` slots; there
is at most one file a slab, so their sum never exceeds the tier's limit. A slab that is cut anew
gets a new file, after the old one is gone: no stale header survives in it.

Files are opened on first use and closed when long unused, so that a tier of thousands of slabs
needs few descriptors.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvstore.core.errors import TierUnavailableError
from kvstore.core.messages import Place
from kvstore.tiers import lock, manifest
from kvstore.tiers.block_io import BLOCK_BYTES, BlockIO, aligned_empty
from kvstore.tiers.regular_file import open_regular
from kvstore.tiers.slab_files import is_slot_size, slab_files, slab_name
from kvstore.tiers.spares import Spares

_log = logging.getLogger(__name__)

OPEN_FILES_MAX = 128
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class DirectIO(Enum):
    """Whether the page cache is bypassed: AUTO where the file system can, REQUIRED or the tier
    doesn't open, OFF never."""

    AUTO = "auto"
    REQUIRED = "required"
    OFF = "off"


@dataclass(slots=True)
class _OpenFile:
    fd: int
    users: int = 0


class SlabFolder:
    """The slab files of one folder; thread-safe. Owns their descriptors, and the spares that take
    their places (``open_spares``)."""

    def __init__(self, folder: Path, slab_bytes: int, direct: DirectIO, io: BlockIO) -> None:
        self.slab_bytes = slab_bytes
        self.io = io
        self.mode = "closed"
        self.direct = False
        self._folder = folder
        self._wanted = direct
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._open: OrderedDict[tuple[int, int], _OpenFile] = OrderedDict()
        self._cut: dict[int, int] = {}
        self._whole: set[tuple[int, int]] = set()
        self._written: set[tuple[int, int]] = set()
        self._slabs = 0
        self._spares = Spares(folder, slab_bytes, io, self._room)

    def open(self, slabs: int) -> None:
        """Find out what the file system can and which slabs exist; files beyond the limit of
        ``slabs`` are removed. Raises TierUnavailableError where REQUIRED direct I/O is refused."""
        self._choose_mode()
        self._slabs = slabs
        found = slab_files(self._folder, self.slab_bytes)
        for file in found.replaced:
            self._remove(file.slab, file.slot_bytes, "the slab has a newer file")
        for slab, file in found.current.items():
            if slab < slabs:
                self._cut[slab] = file.slot_bytes
            else:
                self._remove(slab, file.slot_bytes, f"the limit is {slabs} slabs now")
        if found.strange:
            _log.warning(
                "nvme: %s: left alone %d unknown names: %s",
                self._folder, len(found.strange), ", ".join(found.strange[:10]),
            )  # fmt: skip

    def open_spares(self, ahead_bytes: int, idle_s: Callable[[], float]) -> None:
        """Keep so many bytes of files written ahead, in the background, where the tier has done
        nothing for a while (``idle_s``). Raises OSError and TierUnavailableError."""
        self._spares.open(ahead_bytes, self.direct, idle_s)

    def ahead_bytes(self) -> int:
        """Bytes of whole files that are written and wait for a slab to be cut."""
        return self._spares.ready_bytes()

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._spares.close()
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1].fd)
        self._cut, self._whole, self._written = {}, set(), set()
        self.mode = "closed"

    def slabs(self) -> dict[int, int]:
        """Slab -> slot bytes of every file there is, in slab order; a copy."""
        with self._lock:
            return dict(sorted(self._cut.items()))

    def slots(self, slot_bytes: int) -> int:
        """Slots of a slab that is cut so."""
        return self.slab_bytes // slot_bytes

    def is_slot_size(self, slot_bytes: int) -> bool:
        """Whether a slab can be cut into slots of this size."""
        return is_slot_size(slot_bytes, self.slab_bytes)

    def remove_all(self, why: str) -> None:
        """Remove every slab file and spare."""
        for name in slab_files(self._folder, self.slab_bytes).spares:
            (self._folder / name).unlink()
        for slab, slot_bytes in self.slabs().items():
            self._remove(slab, slot_bytes, why)
        manifest.sync_folder(self._folder)

    @contextmanager
    def existing(self, slab: int, slot_bytes: int) -> Iterator[int]:
        """The descriptor of a slab's file for reading, or for writing inside it. Raises
        FileNotFoundError where the slab has no file cut so."""
        key = (slab, slot_bytes)
        with self._lock:
            file = self._open.get(key)
            if file is None:
                if self._cut.get(slab) != slot_bytes:
                    raise FileNotFoundError(f"nvme: slab {slab} isn't cut into {slot_bytes}")
                flags = _FLAGS | (os.O_DIRECT if self.direct else 0)
                file = self._open[key] = _OpenFile(os.open(self._path(*key), flags))
            file.users += 1
            self._open.move_to_end(key)
            self._close_idle()
        try:
            yield file.fd
        finally:
            with self._lock:
                file.users -= 1
                if self._open.get(key) is not file and not file.users:
                    os.close(file.fd)

    @contextmanager
    def allocated(self, place: Place) -> Iterator[int]:
        """The descriptor of a slab's file for writing, made or grown to its full size before.

        Raises OSError (ENOSPC for a full device) and leaves no half-made file then.
        """
        key = (place.slab, place.slot_bytes)
        if key not in self._whole:
            with self._making:
                if key not in self._whole:
                    self._make(*key)
        self._written.add(key)
        with self.existing(*key) as fd:
            yield fd

    def sync(self) -> None:
        """Make everything that was written durable. Raises OSError."""
        for key in sorted(self._written):
            if self._cut.get(key[0]) == key[1]:
                with self.existing(*key) as fd:
                    os.fsync(fd)
        self._written.clear()

    def _make(self, slab: int, slot_bytes: int) -> None:
        """Bring a slab's file to its full size; the only place that takes room on the device."""
        old = self._cut.get(slab)
        if old is not None and old != slot_bytes:
            self._remove(slab, old, f"the slab is cut into {slot_bytes} bytes now")
            old = None
        path = self._path(slab, slot_bytes)
        if not path.exists():
            old = None
        nbytes = slot_bytes * self.slots(slot_bytes)
        spare = not os.path.lexists(path) and self._spares.take(path, nbytes)
        # A descriptor of its own, not direct: the emulation of fallocate writes single bytes.
        fd = open_regular(path, os.O_RDWR | (0 if old or spare else os.O_CREAT | os.O_TRUNC))
        try:
            self._allocate(fd, slot_bytes)
        except OSError:
            if old is None:
                path.unlink()
            raise
        finally:
            os.close(fd)
        manifest.sync_folder(self._folder)
        with self._lock:
            self._cut[slab] = slot_bytes
            self._whole.add((slab, slot_bytes))

    def _allocate(self, fd: int, slot_bytes: int) -> None:
        """Give a file its full size; after an error it has the size that it had.

        A file that was cut off in the middle of a slot loses that slot's header first: its payload
        would come back as zeros.
        """
        nbytes = self.slots(slot_bytes) * slot_bytes
        before = os.fstat(fd)
        if before.st_size >= nbytes and before.st_blocks * 512 >= nbytes:
            return
        if before.st_size % slot_bytes:
            os.ftruncate(fd, before.st_size - before.st_size % slot_bytes)
        try:
            self.io.allocate(fd, nbytes)
        except OSError:
            os.ftruncate(fd, min(before.st_size, nbytes) // slot_bytes * slot_bytes)
            raise
        os.fsync(fd)

    def _room(self) -> int:
        """Files that may be there beside the slabs'."""
        with self._lock:
            return self._slabs - len(self._cut)

    def _remove(self, slab: int, slot_bytes: int, why: str) -> None:
        key = (slab, slot_bytes)
        with self._lock:
            self._whole.discard(key)
            if self._cut.get(slab) == slot_bytes:
                del self._cut[slab]
            file = self._open.pop(key, None)
            if file is not None and not file.users:
                os.close(file.fd)
        self._path(slab, slot_bytes).unlink(missing_ok=True)
        _log.info("nvme: removed %s: %s", self._path(slab, slot_bytes), why)

    def _close_idle(self) -> None:
        """Close the files that were unused longest, down to OPEN_FILES_MAX; called with the
        lock."""
        if len(self._open) <= OPEN_FILES_MAX:
            return
        for key, file in list(self._open.items()):
            if not file.users:
                os.close(file.fd)
                del self._open[key]
                return

    def _choose_mode(self) -> None:
        if self._wanted is DirectIO.OFF:
            self.direct, self.mode = False, "buffered (as configured)"
            return
        refusal = self._direct_refusal()
        if refusal and self._wanted is DirectIO.REQUIRED:
            raise TierUnavailableError(
                f"nvme: {self._folder}: the file system refuses O_DIRECT ({refusal}); choose "
                "another folder or allow buffered I/O"
            )
        self.direct = not refusal
        self.mode = f"buffered (O_DIRECT refused: {refusal})" if refusal else "direct"
        _log.info("nvme: %s, %s I/O", self._folder, self.mode)

    def _direct_refusal(self) -> str:
        """Why direct I/O doesn't work here, found out by reading the lock file so; else empty."""
        try:
            fd = os.open(self._folder / lock.FILE_NAME, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            return str(error.strerror)
        try:
            self.io.preadv(fd, [aligned_empty(BLOCK_BYTES)], 0)
        except OSError as error:
            return str(error.strerror)
        finally:
            os.close(fd)
        return ""

    def _path(self, slab: int, slot_bytes: int) -> Path:
        return self._folder / slab_name(slab, slot_bytes)
