"""NvmeTier: chunks in preallocated files of 4 KiB-aligned slots, on a local disk.

A slot is a header of 4096 bytes (codecs/base.py), the payload, and zeros up to a multiple of 4096.
All of it goes out in one vectored write, past the page cache where the file system allows, and
comes back in one vectored read; nothing is trusted before header, fields and payload checksum are
verified. The files are the index: there is no other record of what lies where (tiers/scan.py).

Durability: a write is not synced, since a chunk that a power cut tears is a miss. An erasure is,
because what was dropped must not come back; so is the manifest, which holds the epochs. A clean
stop syncs everything before it says that it was clean.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs import base as codecs
from kvstore.codecs.base import HEADER_BYTES, Payload
from kvstore.codecs.identity import IdentityCodec
from kvstore.core.errors import (
    CapacityError,
    ChunkCorruptError,
    ConfigError,
    InvariantError,
    TierUnavailableError,
)
from kvstore.core.messages import ChunkHeader, Place, SpaceRecord, TierName
from kvstore.tiers import manifest
from kvstore.tiers.base import ChunkForeignError, IOCounter, IOKind, ScanReport, TierIOStats
from kvstore.tiers.block_io import BLOCK_BYTES, IN_DEVICE, BlockIO, aligned_empty
from kvstore.tiers.lock import FolderLock
from kvstore.tiers.manifest import Manifest
from kvstore.tiers.scan import SlabScan
from kvstore.tiers.slabs import DirectIO, SlabFolder
from kvstore.tiers.vector import slot_vector

_log = logging.getLogger(__name__)

VERIFY_NEWEST = 64
"""Slots whose payload is verified at start after an unclean stop: more than can be in flight."""

_Bytes = NDArray[np.uint8]
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NvmeTier:
    """The tier in ``folder``: at most ``slabs`` files of ``slab_bytes``, of which ``ahead_bytes``
    are written ahead of their use. Thread-safe."""

    name = TierName.NVME

    def __init__(
        self,
        folder: Path,
        slabs: int,
        slab_bytes: int,
        direct: DirectIO = DirectIO.AUTO,
        io: BlockIO | None = None,
        ahead_bytes: int = 0,
    ) -> None:
        self.folder = folder
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        self._ahead_bytes = ahead_bytes
        self._lock = FolderLock(folder)
        self._files = SlabFolder(folder, slab_bytes, direct, io or BlockIO())
        self._codec = IdentityCodec()
        self._counter = IOCounter()
        self._saving = threading.Lock()
        self._reading = threading.Semaphore(IN_DEVICE)
        self._writing = threading.Semaphore(IN_DEVICE)
        self._spaces: tuple[SpaceRecord, ...] = ()
        self._was_clean = False
        self._scan_ended = False
        self._torn_left = False
        self._is_open = False

    def open(self) -> None:
        """Lock the folder, read its manifest and mark it as in use. Raises TierUnavailableError
        (another daemon, or the system refuses) or ConfigError (another format or slab size)."""
        if self.slabs < 1 or not self._files.is_slot_size(self.slab_bytes):
            raise ConfigError(
                f"nvme: slabs={self.slabs} slab_bytes={self.slab_bytes}; valid are 1 or more "
                f"slabs of a multiple of {BLOCK_BYTES} bytes, at least {2 * BLOCK_BYTES}"
            )
        try:
            self._make_folder()
            self._lock.acquire()
        except OSError as error:
            raise _mapped(error, f"{self.folder} can't be opened") from error
        try:
            self._load()
        except OSError as error:
            self._let_go()
            raise _mapped(error, f"{self.folder} can't be opened") from error
        except (ConfigError, TierUnavailableError):
            self._let_go()
            raise
        self._is_open = True

    def close(self) -> None:
        """Sync everything, mark the folder as cleanly left and unlock it; no operation may be
        running. Idempotent."""
        if not self._is_open:
            return
        try:
            self._files.sync()
            with self._saving:
                # Only a scan finds the torn writes of a former daemon.
                clean = self._was_clean or self._scan_ended
                manifest.save(self.folder, Manifest(self.slab_bytes, clean, self._spaces))
        except OSError as error:
            _log.error("nvme: %s isn't left cleanly: %s", self.folder, error)
        self._let_go()

    def load_manifest(self) -> tuple[SpaceRecord, ...]:
        """The namespaces that the folder knew when it was opened or that were saved since."""
        return self._spaces

    def save_manifest(self, spaces: tuple[SpaceRecord, ...]) -> None:
        """Make the namespaces durable, all of them at once. Raises CapacityError or
        TierUnavailableError; what was saved before stands then."""
        with self._saving:
            try:
                manifest.save(self.folder, Manifest(self.slab_bytes, False, spaces))
            except OSError as error:
                raise _mapped(error, "the manifest can't be written") from error
            self._spaces = spaces

    def read(self, place: Place, header: ChunkHeader, out: _Bytes) -> None:
        """Fill ``out`` with the verified payload; raises ChunkCorruptError, ChunkForeignError or
        TierUnavailableError."""
        self._check(place, header, out)
        with self._operation(IOKind.READ, place, HEADER_BYTES + out.nbytes):
            vector = slot_vector(out, self._files.direct)
            try:
                with self._files.existing(place.slab, place.slot_bytes) as fd, self._reading:
                    done = vector.read(self._files.io, fd, place.index * place.slot_bytes)
            except FileNotFoundError as error:
                raise ChunkCorruptError(f"{_name(place)}: its slab has no file") from error
            if done < vector.nbytes:
                raise ChunkCorruptError(f"{_name(place)}: {done} bytes of {vector.nbytes}")
            vector.drain()
            self._verify(place, header, vector.header, out)

    def write(self, place: Place, header: ChunkHeader, payload: _Bytes) -> None:
        """Put a chunk at ``place`` in one write; raises CapacityError or TierUnavailableError."""
        self._check(place, header, payload)
        stored = self._codec.encode(payload)
        vector = slot_vector(stored, self._files.direct)
        checksum = codecs.payload_checksum(stored)
        vector.fill(
            codecs.pack(
                header,
                Payload(self._codec.id, self._codec.version, stored.nbytes, checksum),
            )
        )
        with (
            self._operation(IOKind.WRITE, place, vector.nbytes),
            self._files.allocated(place) as fd,
        ):
            offset = place.index * place.slot_bytes
            try:
                with self._writing:
                    vector.write(self._files.io, fd, offset)
            except OSError:
                # A new header may stand before half a payload.
                with contextlib.suppress(OSError):
                    self._overwrite_header(fd, offset)
                raise

    def erase(self, place: Place) -> None:
        """Overwrite the header at ``place``, durably; a place without a file needs nothing."""
        self._check_place(place)
        offset = place.index * place.slot_bytes
        with self._operation(IOKind.ERASE, place, HEADER_BYTES):
            try:
                with self._files.existing(place.slab, place.slot_bytes) as fd:
                    if offset < os.fstat(fd).st_size:
                        self._overwrite_header(fd, offset)
            except FileNotFoundError:
                return

    def scan(self, report: ScanReport, stop: threading.Event) -> None:
        """Report every slot of every slab file once; raises TierUnavailableError."""
        newest = 0 if self._was_clean else VERIFY_NEWEST
        try:
            SlabScan(self._files, newest, self._is_whole).run(report, stop)
            self._scan_ended = not stop.is_set() and not self._torn_left
        except OSError as error:
            raise _mapped(error, "the scan failed") from error

    def stats(self) -> TierIOStats:
        """A snapshot."""
        stats = self._counter.stats(self.name.value, self._files.mode)
        return replace(stats, ahead_bytes=self._files.ahead_bytes())

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"nvme: {self.folder} is no folder; set nvme.path to one, or to where one can be "
                "made"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"nvme: {self.folder} can't be made ({error.strerror}); set nvme.path to a folder "
                "of your own"
            ) from error
        try:
            self.folder.chmod(0o700)
        except PermissionError as error:
            _log.warning("nvme: %s keeps its mode: %s", self.folder, error)

    def _load(self) -> None:
        found = manifest.load(self.folder)
        if found is not None and found.slab_bytes != self.slab_bytes:
            raise ConfigError(
                f"nvme: {self.folder} was made with slab_bytes={found.slab_bytes}, the "
                f"configuration says {self.slab_bytes}; set it back to {found.slab_bytes}, or "
                "empty the folder to start with an empty tier"
            )
        self._files.open(self.slabs)
        if found is None:
            # Without the epochs nothing tells a cleared chunk from a live one.
            self._files.remove_all("there is no manifest that tells which chunks were cleared")
        self._was_clean = found is None or found.clean
        self._spaces = found.spaces if found else ()
        manifest.save(self.folder, Manifest(self.slab_bytes, False, self._spaces))
        self._files.open_spares(self._ahead_bytes, self._counter.idle_s)

    def _let_go(self) -> None:
        self._files.close()
        self._lock.release()
        self._is_open = False

    def _overwrite_header(self, fd: int, offset: int) -> None:
        block = aligned_empty(HEADER_BYTES)
        block[:] = np.frombuffer(codecs.erased(), np.uint8)
        self._files.io.pwritev(fd, [block], offset, os.RWF_DSYNC)

    def _verify(self, place: Place, header: ChunkHeader, block: _Bytes, out: _Bytes) -> None:
        """Every fact that a read relies on; ``out`` holds the stored bytes."""
        try:
            found, payload = codecs.unpack(block)
        except ChunkCorruptError as error:
            raise ChunkCorruptError(f"{_name(place)}: {error}") from error
        field = codecs.differing_field(found, header)
        if field is not None:
            raise ChunkForeignError(f"{_name(place)}: holds a chunk of another {field}")
        codec = (payload.codec_id, payload.codec_version)
        if codec != (self._codec.id, self._codec.version):
            raise ChunkCorruptError(f"{_name(place)}: codec {codec} is unknown")
        if payload.stored_bytes != out.nbytes or payload.checksum != codecs.payload_checksum(out):
            raise ChunkCorruptError(f"{_name(place)}: the payload fails its checksum")

    def _is_whole(self, place: Place, header: ChunkHeader) -> bool:
        try:
            self.read(place, header, aligned_empty(header.payload_bytes))
            return True
        except (ChunkCorruptError, TierUnavailableError) as error:
            _log.info("nvme: torn by a crash: %s", error)
        # Or the next scan, after a clean stop, would believe the header.
        try:
            self.erase(place)
        except (CapacityError, TierUnavailableError) as error:
            _log.error("nvme: a torn chunk's header stays: %s", error)
            self._torn_left = True
        return False

    def _check(self, place: Place, header: ChunkHeader, payload: _Bytes) -> None:
        """The caller's side of the bargain; a breach is a bug."""
        self._check_place(place)
        room = place.slot_bytes - HEADER_BYTES
        if payload.nbytes != header.payload_bytes or not 0 < payload.nbytes <= room:
            raise InvariantError(
                f"nvme: {payload.nbytes} bytes for a chunk of {header.payload_bytes} at {place}"
            )

    def _check_place(self, place: Place) -> None:
        fits = self._files.is_slot_size(place.slot_bytes)
        if not (
            fits
            and 0 <= place.slab < self.slabs
            and 0 <= place.index < self._files.slots(place.slot_bytes)
        ):
            raise InvariantError(f"nvme: {place} lies outside the tier")

    @contextmanager
    def _operation(self, kind: IOKind, place: Place, nbytes: int) -> Iterator[None]:
        """Times and counts one operation, and maps what the system raises."""
        start = time.perf_counter()
        self._counter.begin()
        try:
            yield
        except OSError as error:
            mapped = _mapped(error, f"{kind.value} of {_name(place)} failed")
            if isinstance(mapped, CapacityError):
                self._counter.fail()
            else:
                self._counter.refuse(kind, str(mapped))
            raise mapped from error
        except ChunkCorruptError:
            self._counter.fail()
            raise
        finally:
            self._counter.end()
        self._counter.add(kind, nbytes, time.perf_counter() - start)


def _mapped(error: OSError, what: str) -> CapacityError | TierUnavailableError:
    if error.errno in _FULL:
        return CapacityError(f"nvme: {what}: the device is full ({error.strerror})")
    where = f"{Path(error.filename).name}: " if error.filename else ""
    return TierUnavailableError(f"nvme: {what}: {where}{error.strerror or error}")


def _name(place: Place) -> str:
    return f"slab {place.slab} ({place.slot_bytes}) slot {place.index}"
