"""FolderCheck: an NVMe folder without its daemon, read slot by slot: header, payload, epoch, chain.

It holds the folder's lock, so no daemon can start meanwhile, and changes nothing unless it is told
to repair. What it finds a daemon would find too, at its start or at the read; nothing here is
needed for safety.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs import base as codecs
from kvstore.codecs.base import HEADER_BYTES
from kvstore.core.errors import ChunkCorruptError, ConfigError, TierUnavailableError
from kvstore.core.keys import ChunkKey
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader
from kvstore.tiers import manifest
from kvstore.tiers.block_io import aligned_empty
from kvstore.tiers.lock import FolderLock
from kvstore.tiers.manifest import Manifest
from kvstore.tiers.regular_file import open_regular
from kvstore.tiers.slab_files import slab_files


class Verdict(Enum):
    """What a slot holds."""

    VALID = "valid"
    EMPTY = "empty"
    TORN = "torn"
    CORRUPT = "corrupt"
    OLD_EPOCH = "old_epoch"
    ORPHAN = "orphan"
    DUPLICATE = "duplicate"

    def meaning(self) -> str:
        """What it means, for a person."""
        return _MEANINGS[self]

    def damaged(self) -> bool:
        """Whether bytes at rest aren't what was written; the rest is bookkeeping."""
        return self in (Verdict.TORN, Verdict.CORRUPT)

    def useless(self) -> bool:
        """Whether a daemon would drop it."""
        return self not in (Verdict.VALID, Verdict.EMPTY)


_MEANINGS: Mapping[Verdict, str] = {
    Verdict.VALID: "header, payload, epoch and chain are right",
    Verdict.EMPTY: "never written, or erased",
    Verdict.TORN: "a whole header, but not its payload: a write that a crash cut short",
    Verdict.CORRUPT: "a header that fails its check",
    Verdict.OLD_EPOCH: "cleared, or of a namespace that the manifest doesn't know",
    Verdict.ORPHAN: "whole, but a chunk before it in its chain isn't here",
    Verdict.DUPLICATE: "whole, but written again later elsewhere",
}

Chunk = tuple[str, bytes, ChunkKey]
"""Tenant, namespace and key: a chunk of the directory."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a slot lies: its file, its offset and its size."""

    file: Path
    offset: int
    slot_bytes: int


@dataclass(slots=True)
class FolderReport:
    """Counts by verdict; ``clean`` says whether the last daemon ended in order. ``ignored`` names
    what is no slab of the tier, or an older file of one, which a daemon leaves alone or removes."""

    clean: bool
    counts: Counter[Verdict] = field(default_factory=Counter)
    ignored: list[str] = field(default_factory=list)
    read_bytes: int = 0
    erased: int = 0


class FolderCheck:
    """One check of one folder, inside a ``with`` that holds the folder's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FolderLock(folder)
        self._manifest: Manifest | None = None

    def __enter__(self) -> FolderCheck:
        """Raises TierUnavailableError where a daemon uses the folder or the system refuses,
        ConfigError where it is no folder of this version."""
        if not os.path.lexists(self.folder / manifest.FILE_NAME):
            raise ConfigError(f"nvme.path={self.folder} holds no manifest: no daemon has used it")
        try:
            self._lock.acquire()
        except TierUnavailableError as error:
            raise TierUnavailableError(
                f"{error}; `kvstore stats` shows what a running daemon finds"
            ) from error
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._manifest = manifest.load(self.folder)
        except OSError as error:
            self._lock.release()
            raise self._unreadable(error) from error
        except ConfigError:
            self._lock.release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def run(self, repair: bool) -> FolderReport:
        """Read everything; with ``repair``, erase what a daemon would drop."""
        assert self._manifest is not None, "inside the with statement only"
        report = FolderReport(clean=self._manifest.clean)
        found: list[tuple[Spot, ChunkHeader]] = []
        bad: list[Spot] = []
        for spot, verdict, header in self._read(report):
            if header is not None:
                found.append((spot, header))
                continue
            report.counts[verdict] += 1
            if verdict.useless():
                bad.append(spot)
        for spot, verdict in self._judge(found):
            report.counts[verdict] += 1
            if verdict.useless():
                bad.append(spot)
        if repair:
            _erase(bad)
            report.erased = len(bad)
        return report

    def _read(self, report: FolderReport) -> Iterator[tuple[Spot, Verdict, ChunkHeader | None]]:
        """Every slot of every file; the header only where it and the payload are whole."""
        assert self._manifest is not None, "inside the with statement only"
        slab_bytes = self._manifest.slab_bytes
        found = slab_files(self.folder, slab_bytes)
        report.ignored = sorted([*found.strange, *(file.name() for file in found.replaced)])
        for file in found.current.values():
            path = self.folder / file.name()
            slots = slab_bytes // file.slot_bytes
            with open(open_regular(path, os.O_RDONLY), "rb", buffering=0) as opened:
                end = os.fstat(opened.fileno()).st_size
                there = min(slots, -(-end // file.slot_bytes))
                report.counts[Verdict.EMPTY] += slots - there
                for index in range(there):
                    spot = Spot(path, index * file.slot_bytes, file.slot_bytes)
                    verdict, header, count = _look(opened.fileno(), spot, end)
                    report.read_bytes += count
                    yield spot, verdict, header

    def _unreadable(self, error: OSError) -> TierUnavailableError:
        name = Path(error.filename).name if error.filename else "the folder"
        return TierUnavailableError(
            f"nvme.path={self.folder} can't be checked: {name}: {error.strerror or error}"
        )

    def _judge(self, found: list[tuple[Spot, ChunkHeader]]) -> Iterator[tuple[Spot, Verdict]]:
        """Epochs, duplicates and chains of the slots whose bytes are right."""
        assert self._manifest is not None, "inside the with statement only"
        epochs = {(s.tenant, s.namespace): s.epoch for s in self._manifest.spaces}
        newest: dict[tuple[Chunk, int, Part], int] = {}
        for _, header in found:
            if epochs.get((header.tenant, header.namespace)) == header.epoch:
                name = (_chunk(header), header.shard, header.part)
                newest[name] = max(newest.get(name, -1), header.sequence)
        rooted = _rooted([h for _, h in found if (_chunk(h), h.shard, h.part) in newest])
        for spot, header in found:
            name = (_chunk(header), header.shard, header.part)
            if epochs.get((header.tenant, header.namespace)) != header.epoch:
                yield spot, Verdict.OLD_EPOCH
            elif newest.get(name) != header.sequence:
                yield spot, Verdict.DUPLICATE
            else:
                del newest[name]  # a copy of the very same slot is one, too
                yield spot, Verdict.VALID if _chunk(header) in rooted else Verdict.ORPHAN


def _look(fd: int, spot: Spot, end: int) -> tuple[Verdict, ChunkHeader | None, int]:
    """What one slot of a file that ends at ``end`` holds, and how many bytes were read for it."""
    block = _read(fd, spot.offset, HEADER_BYTES)
    if block.nbytes < HEADER_BYTES or codecs.is_free(block):
        return Verdict.EMPTY, None, block.nbytes
    try:
        header, payload = codecs.unpack(block)
    except ChunkCorruptError:
        return Verdict.CORRUPT, None, block.nbytes
    room = min(spot.slot_bytes, end - spot.offset) - HEADER_BYTES
    if not codecs.is_possible(header, payload, room):
        return Verdict.TORN, None, block.nbytes
    stored = _read(fd, spot.offset + HEADER_BYTES, payload.stored_bytes)
    whole = codecs.payload_checksum(stored) == payload.checksum
    verdict = Verdict.VALID if whole else Verdict.TORN
    return verdict, header if whole else None, block.nbytes + stored.nbytes


def _chunk(header: ChunkHeader) -> Chunk:
    return header.tenant, header.namespace, header.key


def _rooted(headers: list[ChunkHeader]) -> set[Chunk]:
    """Chunks whose full part is here in all shards and whose chain is whole back to its root."""
    shards: dict[Chunk, set[int]] = {}
    for header in headers:
        if header.part is Part.FULL:
            shards.setdefault(_chunk(header), set()).add(header.shard)
    rooted: set[Chunk] = set()
    for header in sorted(headers, key=lambda header: header.depth):
        chunk = _chunk(header)
        parent = (header.tenant, header.namespace, header.parent)
        complete = len(shards.get(chunk, ())) == header.shards
        if complete and (header.depth == 0 or parent in rooted):
            rooted.add(chunk)
    return rooted


def _read(fd: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """So many bytes; fewer only at the file's end."""
    block = aligned_empty(nbytes)
    done = 0
    while done < nbytes:
        count = os.preadv(fd, [block[done:].data], offset + done)
        if not count:
            break
        done += count
    return block[:done]


def _erase(spots: list[Spot]) -> None:
    """Overwrite headers, durably."""
    for spot in spots:
        fd = open_regular(spot.file, os.O_WRONLY)
        try:
            os.pwrite(fd, codecs.erased(), spot.offset)
            os.fsync(fd)
        finally:
            os.close(fd)
