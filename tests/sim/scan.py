"""Scan: what a starting daemon finds on its disk, reported in batches and in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from kvstore.core.limits import Limits
from kvstore.core.messages import (
    ChunkHeader,
    Event,
    Place,
    ScanDone,
    Scanned,
    ScannedSlot,
    SpaceRecord,
    TierName,
)
from kvstore.core.service import Service
from tests.sim.media import Disk
from tests.sim.model import Model
from tests.sim.restored import check_restored, whole_families


class Scanning(Protocol):
    """What a scan needs of the world."""

    rng: random.Random
    disk: Disk
    limits: Limits
    manifest: tuple[SpaceRecord, ...]
    model: Model
    service: Service
    scanned: set[Place] | None

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after a while, unless the daemon dies before."""

    def deliver(self, event: Event) -> None:
        """Tell the core something."""

    def disturbances(self) -> int:
        """A number that changes whenever a chunk may have left for a good reason."""


def scan(world: Scanning) -> None:
    """Read every slot of every slab file now and report them over the next moments, then ScanDone.

    Headers only, as at a real start: a legible header in front of a torn payload is reported too.
    Slots that hold nothing may be left out.
    """
    leave_out = world.rng.random() < 0.3
    slots = [s for s in _slots(world) if s.header is not None or not leave_out]
    found = [slot.header for slot in slots if slot.header is not None and _fits(world, slot)]
    world.rng.shuffle(slots)
    delay_s = 0.0
    while slots:
        size = world.rng.choice((1, 3, 20, 1000))
        batch, slots = slots[:size], slots[size:]
        delay_s += world.rng.uniform(0.0, 0.02)
        _report_later(world, delay_s, tuple(batch))
    _finish_later(world, delay_s + world.rng.uniform(0.0, 0.05), found)


def _slots(world: Scanning) -> list[ScannedSlot]:
    found: list[ScannedSlot] = []
    limits = world.limits.nvme
    if limits is None:
        return found
    for slab, slot_bytes in world.disk.cuts.items():
        for index in range(limits.slab_bytes // slot_bytes):
            place = Place(TierName.NVME, slab, index, slot_bytes)
            record = world.disk.get(place)
            legible = record is not None and record.legible
            fits = record is not None and record.header.payload_bytes + 4096 <= slot_bytes
            header = record.header if record is not None and legible and fits else None
            found.append(ScannedSlot(place, header))
    return found


def _fits(world: Scanning, slot: ScannedSlot) -> bool:
    """Whether the slot lies within the limits of this start."""
    return world.limits.nvme is not None and slot.place.slab < world.limits.nvme.slabs


def _report_later(world: Scanning, delay_s: float, batch: tuple[ScannedSlot, ...]) -> None:
    def report() -> None:
        if world.scanned is not None:
            world.scanned.update(one.place for one in batch)
        world.deliver(Scanned(batch))

    world.later(delay_s, report)


def _finish_later(world: Scanning, delay_s: float, found: list[ChunkHeader]) -> None:
    """End the scan; with no clear and no bad read meanwhile, all that was whole must be there."""
    families = whole_families(found, world.manifest)
    before = world.disturbances()

    def finish() -> None:
        world.scanned = None
        world.deliver(ScanDone(TierName.NVME))
        check()

    def check() -> None:
        tiers = world.service.stats(0.0).tiers
        if any(tier.scanning for tier in tiers):
            world.later(0.001, check)
        elif world.disturbances() == before:
            world.model.counts["found at start"] += check_restored(world.service, families)

    world.later(delay_s, finish)
