"""Slabs that the device can't use, or that a scan finds half empty; namespaces beyond the limit."""

from __future__ import annotations

import pytest

from kvstore.core import spaces
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import MoveKind, MoveStatus, Place, TierName
from kvstore.core.slabs import SlabSpace
from tests.core.driver import BLOCK_BYTES, Driver, layout
from tests.core.test_full_disk import full_disk

NVME_SLOT = BLOCK_BYTES + 4096


def test_a_slab_whose_file_cannot_be_used_is_tried_after_all_others() -> None:
    """A directory has the first slab's name: its write fails, the next one goes to another slab."""
    driver, engine = full_disk()
    engine.store(engine.chain(1))
    driver.run(MoveKind.STORE)
    (first,) = driver.waiting(MoveKind.WRITE)
    driver.end(first, MoveStatus.FAILED)
    assert driver.drops("nvme_write_failed") == 1
    engine.store(engine.chain(1, 1))
    driver.run(MoveKind.STORE)
    (second,) = driver.waiting(MoveKind.WRITE)
    assert first.target is not None
    assert second.target is not None
    assert second.target.slab != first.target.slab
    assert not driver.tier(TierName.NVME).full


def test_a_failed_write_does_not_cost_a_slab_that_keeps_chunks() -> None:
    """One bad write among good ones: the slab goes on."""
    driver, engine = full_disk()
    engine.put(engine.chain(1))
    engine.store(engine.chain(1, 1))
    driver.run(MoveKind.STORE)
    (failed,) = driver.waiting(MoveKind.WRITE)
    driver.end(failed, MoveStatus.FAILED)
    engine.store(engine.chain(1, 2))
    driver.run(MoveKind.STORE)
    (again,) = driver.waiting(MoveKind.WRITE)
    assert again.target == failed.target


def test_a_slab_that_a_scan_began_with_free_slots_is_not_taken_for_empty() -> None:
    """The first slots of a slab hold nothing, the next one a chunk: the slab isn't cut anew for
    another size, which would overwrite the chunk."""
    slabs = SlabSpace(TierName.NVME, TierLimits(1, 4 * NVME_SLOT))
    free = slabs.adopt(Place(TierName.NVME, 0, 0, NVME_SLOT))
    assert free is not None
    slabs.give_back(free)
    kept = slabs.adopt(Place(TierName.NVME, 0, 1, NVME_SLOT))
    assert kept is not None
    kept.reserve(None, 0, kept.part, BLOCK_BYTES)
    slabs.check()
    assert slabs.take(2 * NVME_SLOT) is None
    assert slabs.lists(kept)


def test_namespaces_that_nobody_uses_make_room_for_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the limit, a namespace without engine, chunks and cleared epochs is forgotten; one that
    was cleared is kept, as what its epoch ended may still lie on disk."""
    monkeypatch.setattr(spaces, "SPACES_MAX", 2)
    driver = Driver(Limits(host=TierLimits(2, 4 * BLOCK_BYTES)))
    first = driver.engine("first", shape=layout(1))
    driver.clear()
    driver.close(first.workers[0])
    second = driver.engine("second", shape=layout(2))
    driver.close(second.workers[0])
    third = driver.engine("third", shape=layout(3))
    third.put(third.chain(1))
    kept = {space.epoch for space in driver.stats().spaces}
    assert kept == {0, 1}
    assert len(driver.stats().spaces) == 2
