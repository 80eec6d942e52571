"""Disk: what a daemon left on NVMe, and the daemons before and after."""

from __future__ import annotations

import random

from kvstore.core.layout import Shard
from kvstore.core.messages import (
    ChunkHeader,
    MoveKind,
    Place,
    ScannedSlot,
    SpaceRecord,
    TierName,
)
from tests.core.driver import BLOCK_BYTES, Driver, Engine, limits

NVME = TierName.NVME
TWO_RANKS = (Shard(0, 2), Shard(1, 2))


class Disk:
    """What a daemon left on NVMe: slots by place, and the manifest."""

    def __init__(self) -> None:
        self.slots: dict[Place, ChunkHeader] = {}
        self.spaces: tuple[SpaceRecord, ...] = ()

    def take(self, driver: Driver) -> None:
        """Keep what a daemon wrote: all its WRITEs have ended well."""
        for move in driver.handed_out:
            if move.kind is MoveKind.WRITE and move.target is not None:
                self.slots[move.target] = move.header
        self.spaces = driver.persists[-1].spaces

    def found(self, seed: int = 0) -> list[ScannedSlot]:
        """Its slots in some order."""
        slots = [ScannedSlot(place, header) for place, header in self.slots.items()]
        random.Random(seed).shuffle(slots)
        return slots

    def put(self, index: int, header: ChunkHeader) -> None:
        """Write a slot by hand."""
        self.slots[Place(NVME, 0, index, 4096 + BLOCK_BYTES)] = header

    def header(self, key: bytes, shard: int = 0) -> ChunkHeader:
        """What a chunk's slot holds."""
        return next(h for h in self.slots.values() if (h.key, h.shard) == (key, shard))


def first_life(
    chunks: int = 4, shards: tuple[Shard, ...] = (Shard(),), nvme_slots: int = 16
) -> tuple[Disk, Engine]:
    """A daemon that stored one prompt and stopped; its disk, and the engine for its keys."""
    driver = Driver(limits(host_slots=16, nvme_slots=nvme_slots))
    driver.scanned()
    engine = driver.engine(shards=shards)
    assert engine.put(engine.chain(chunks)) == bytes([1] * chunks)
    disk = Disk()
    disk.take(driver)
    return disk, engine


def second_life(
    disk: Disk, shards: tuple[Shard, ...] = (Shard(),), nvme_slots: int = 16
) -> tuple[Driver, Engine]:
    """A daemon that starts on the disk; its scan hasn't begun."""
    driver = Driver(limits(host_slots=16, nvme_slots=nvme_slots), disk.spaces)
    return driver, driver.engine(shards=shards)
