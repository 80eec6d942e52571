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

from kvstore.codecs import base as codecs
from kvstore.codecs.base import HEADER_BYTES
from kvstore.core.errors import ChunkCorruptError, ConfigError, TierUnavailableError
from kvstore.core.keys import ChunkKey
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader
from kvstore.tiers import manifest
from kvstore.tiers.lock import FolderLock
from kvstore.tiers.manifest import Manifest
from kvstore.tiers.slabs import aligned_empty


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
    """Counts by verdict; ``clean`` says whether the last daemon ended in order."""

    clean: bool
    counts: Counter[Verdict] = field(default_factory=Counter)
    read_bytes: int = 0
    erased: int = 0


class FolderCheck:
    """One check of one folder, inside a ``with`` that holds the folder's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FolderLock(folder)
        self._manifest: Manifest | None = None

    def __enter__(self) -> FolderCheck:
        """Raises TierUnavailableError where a daemon uses the folder, ConfigError where it is no
        folder of this version."""
        if not (self.folder / manifest.FILE_NAME).exists():
            raise ConfigError(f"nvme.path={self.folder} holds no manifest: no daemon has used it")
        try:
            self._lock.acquire()
        except TierUnavailableError as error:
            raise TierUnavailableError(
                f"{error}; `kvstore stats` shows what a running daemon finds"
            ) from error
        try:
            self._manifest = manifest.load(self.folder)
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
        for path in sorted(self.folder.glob("slab_*_*.kv")):
            slot_bytes = int(path.stem.split("_")[2])
            slots = self._slots(slot_bytes)
            block = aligned_empty(slot_bytes).data
            with open(path, "rb", buffering=0) as file:
                for index in range(slots):
                    file.seek(index * slot_bytes)
                    count = _read_whole(file.fileno(), block)
                    report.read_bytes += count
                    spot = Spot(path, index * slot_bytes, slot_bytes)
                    yield spot, *_look(block[:count])

    def _slots(self, slot_bytes: int) -> int:
        assert self._manifest is not None, "inside the with statement only"
        return self._manifest.slab_bytes // slot_bytes

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
            if epochs.get((header.tenant, header.namespace)) != header.epoch:
                yield spot, Verdict.OLD_EPOCH
            elif newest[_chunk(header), header.shard, header.part] != header.sequence:
                yield spot, Verdict.DUPLICATE
            else:
                yield spot, Verdict.VALID if _chunk(header) in rooted else Verdict.ORPHAN


def _look(data: memoryview) -> tuple[Verdict, ChunkHeader | None]:
    """What the bytes of one slot are."""
    if len(data) < HEADER_BYTES:
        return Verdict.EMPTY, None
    block = data[:HEADER_BYTES]
    if codecs.is_free(block):
        return Verdict.EMPTY, None
    try:
        header, payload = codecs.unpack(block)
    except ChunkCorruptError:
        return Verdict.CORRUPT, None
    stored = data[HEADER_BYTES : HEADER_BYTES + payload.stored_bytes]
    if len(stored) < payload.stored_bytes or _checksum(stored) != payload.checksum:
        return Verdict.TORN, None
    return Verdict.VALID, header


def _checksum(stored: memoryview) -> int:
    return codecs.payload_checksum(np.frombuffer(stored, np.uint8))


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


def _read_whole(fd: int, block: memoryview) -> int:
    """Fill the block from the file's position; fewer bytes only at the file's end."""
    done = 0
    while done < len(block):
        count = os.readv(fd, [block[done:]])
        if not count:
            break
        done += count
    return done


def _erase(spots: list[Spot]) -> None:
    """Overwrite headers, durably."""
    for spot in spots:
        fd = os.open(spot.file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(fd, codecs.erased(), spot.offset)
            os.fsync(fd)
        finally:
            os.close(fd)
