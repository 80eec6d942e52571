"""Slabs: cutting, giving back, reclaiming for another slot size, a full disk."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.errors import InvariantError
from kvstore.core.layout import Part
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import MoveID, Place, TierName
from kvstore.core.slabs import SlabSpace
from kvstore.core.slots import Slot
from tests.core.driver import BLOCK_BYTES, Driver, Engine, layout, limits

SMALL, LARGE = BLOCK_BYTES, 2 * BLOCK_BYTES
HOST = TierName.HOST
MOVE = MoveID(9)


def space(slabs: int = 2, slab_bytes: int = 2 * LARGE) -> SlabSpace:
    """Slabs of four small or two large slots."""
    return SlabSpace(HOST, TierLimits(slabs, slab_bytes))


def take(slabs: SlabSpace, slot_bytes: int) -> Slot:
    """A slot in use."""
    slot = slabs.take(slot_bytes)
    assert slot is not None
    slot.reserve(None, 0, Part.FULL, slot_bytes)
    slabs.check()
    return slot


def give_back(slabs: SlabSpace, slot: Slot) -> None:
    """End a slot's use."""
    slot.cancel()
    slot.free_if_dead()
    slabs.give_back(slot)
    slabs.check()


def commit(slot: Slot) -> None:
    """A slot's bytes are there."""
    slot.landed = True
    slot.commit()


def two_models(host_slabs: int, **settings: Any) -> tuple[Driver, Engine, Engine]:
    """A host of slabs of four small or two large slots, and engines of both sizes."""
    host = TierLimits(host_slabs, 4 * SMALL)
    driver = Driver(Limits(host=host, **settings))
    small = driver.engine("small", shape=layout(1))
    return driver, small, driver.engine("large", shape=layout(2))


# ---------------------------------------------------------------- cutting


def test_a_slab_is_cut_for_a_size_when_that_first_needs_it() -> None:
    """Four small slots fill one slab; the fifth cuts the second; the ninth finds none."""
    slabs = space()
    places = [take(slabs, SMALL).place for _ in range(8)]
    assert len(set(places)) == 8
    assert len({place.slab for place in places[:4]}) == 1
    assert {place.index for place in places[:4]} == {0, 1, 2, 3}
    assert slabs.uncut_count() == 0
    assert slabs.take(SMALL) is None


def test_sizes_have_slabs_of_their_own() -> None:
    """A small slot doesn't fit in between large ones: each size cuts its own slab."""
    slabs = space()
    small, large = take(slabs, SMALL).place, take(slabs, LARGE).place
    assert small.slab != large.slab
    assert slabs.take(4 * LARGE) is None
    take(slabs, LARGE)
    assert slabs.take(LARGE) is None


def test_the_limit_is_a_total() -> None:
    """Field case 62: however sizes alternate, no more than the limit's slabs are ever cut, and no
    slot reaches beyond its slab."""
    slabs = space(slabs=3)
    taken = []
    for turn in range(20):
        slot = slabs.take((SMALL, LARGE)[turn % 2])
        taken += [slot] if slot else []
    assert {slot.place.slab for slot in taken} == {0, 1, 2}
    for slot in taken:
        end = (slot.place.index + 1) * slot.place.slot_bytes
        assert end <= slabs.limits.slab_bytes


def test_a_size_that_does_not_divide_the_slab_leaves_its_rest_unused() -> None:
    """Slots of 12 KiB in a slab of 16 KiB: one fits."""
    slabs = space(slabs=1)
    take(slabs, 3 * SMALL)
    assert slabs.take(3 * SMALL) is None


def test_a_slot_larger_than_a_slab_is_never_had() -> None:
    """It isn't cut, and takes no slab from the others."""
    slabs = space(slabs=1)
    assert slabs.take(4 * LARGE) is None
    assert slabs.uncut_count() == 1


def test_a_freed_slot_is_given_out_again() -> None:
    """Full, one back, one more; giving back what isn't free raises (field case 25)."""
    slabs = space(slabs=1)
    slots = [take(slabs, SMALL) for _ in range(4)]
    with pytest.raises(InvariantError):
        slabs.give_back(slots[2])
    give_back(slabs, slots[2])
    assert take(slabs, SMALL) is slots[2]
    assert slabs.take(SMALL) is None


def test_a_slot_that_is_freed_twice_is_found() -> None:
    """Field case 25: the free list keeps each slot once."""
    slabs = space(slabs=1)
    give_back(slabs, slot := take(slabs, SMALL))
    slabs.give_back(slot)
    with pytest.raises(InvariantError):
        slabs.check()


# ---------------------------------------------------------------- retiring and reclaiming


def test_a_retired_slab_gives_no_slot_and_is_uncut_when_its_last_is_free() -> None:
    """Then another size may cut it."""
    slabs = space(slabs=1)
    first, second = take(slabs, SMALL), take(slabs, SMALL)
    slabs.retire(0)
    assert slabs.take(SMALL) is None
    give_back(slabs, first)
    assert slabs.take(LARGE) is None
    give_back(slabs, second)
    assert take(slabs, LARGE).place == Place(HOST, 0, 0, LARGE)


def test_the_coldest_slab_without_pins_is_reclaimed() -> None:
    """Three slabs of small slots: slab 2 was used last, a slot of the coldest is pinned; so the
    middle one goes."""
    slabs = space(slabs=3)
    slots = [take(slabs, SMALL) for _ in range(12)]
    by_slab = {slot.place.slab: slot for slot in slots}
    for use, number in enumerate((1, 0, 2)):
        by_slab[number].slab.last_use = use + 1
    by_slab[1].hold(MOVE)
    found = slabs.coldest_foreign(LARGE)
    assert found is not None
    assert found.number == 0
    by_slab[1].let_go(MOVE)
    slabs.begin()
    found = slabs.coldest_foreign(LARGE)
    assert found is not None
    assert found.number == 1


def test_a_size_with_its_fair_share_reclaims_nothing() -> None:
    """Two slabs each of four: neither size takes from the other."""
    slabs = space(slabs=4)
    for _ in range(8):
        take(slabs, SMALL)
    for _ in range(4):
        take(slabs, LARGE)
    assert slabs.coldest_foreign(SMALL) is None
    assert slabs.coldest_foreign(LARGE) is None


def test_an_odd_slab_is_not_taken_back_and_forth() -> None:
    """Three slabs of one size and two of the other: both have their share of five, so neither takes
    the odd one."""
    slabs = space(slabs=5)
    for _ in range(12):
        take(slabs, SMALL)
    for _ in range(4):
        take(slabs, LARGE)
    assert slabs.coldest_foreign(LARGE) is None
    assert slabs.coldest_foreign(SMALL) is None


def test_a_size_below_its_share_takes_from_one_above_only() -> None:
    """Three sizes, six slabs: large has three, small two, the third size one; its share is two, and
    only large has more than that."""
    slabs = space(slabs=6)
    for _ in range(6):
        take(slabs, LARGE)
    for _ in range(8):
        take(slabs, SMALL)
    take(slabs, 3 * SMALL)
    found = slabs.coldest_foreign(3 * SMALL)
    assert found is not None
    assert found.slot_bytes == LARGE


def test_with_one_slab_two_models_take_it_from_each_other() -> None:
    """Each store of the other model's chunks works; the former chunks are misses, never wrong."""
    driver, small, large = two_models(1)
    small.put(small.chain(2, 9))
    large.put(large.chain(1, 9))
    assert driver.tier().evictions == 2
    for turn in range(3):
        mine, other = small.chain(2, turn), large.chain(2, turn)
        assert small.put(mine) == b"\1\1"
        assert (small.peek(mine), large.peek(other)) == (2, 0)
        assert large.put(other) == b"\1\1"
        assert (small.peek(mine), large.peek(other)) == (0, 2)
    assert driver.tier().slots_used == 2


def test_two_models_that_alternate_end_with_half_of_the_slabs_each() -> None:
    """Four slabs: the model that came first gives up two, then each evicts its own."""
    driver, small, large = two_models(4)
    assert small.put(small.chain(16)) == bytes([1] * 16)
    for turn in range(4):
        assert large.put(large.chain(4, turn)) == bytes([1] * 4)
        assert small.put(small.chain(8, 50 + turn)) == bytes([1] * 8)
    assert large.peek(large.chain(4, 3)) == 4
    assert small.peek(small.chain(8, 53)) == 8
    for turn in range(4):
        assert large.put(large.chain(4, 10 + turn)) == bytes([1] * 4)
    assert small.peek(small.chain(8, 53)) == 8
    assert driver.tier().bytes_used == driver.tier().bytes_total


def test_reclaiming_leaves_what_a_move_reads() -> None:
    """The only slab holds a chunk that is being loaded: the other model's store is refused; after
    the Moved it works (field case 27)."""
    driver, small, large = two_models(1)
    keys = small.chain(1)
    small.put(keys)
    small.retrieve(keys)
    refused = large.store(large.chain(1))
    assert driver.completed(large.workers[0], refused).done == b"\0"
    assert driver.drops("host_full") == 1
    driver.run()
    assert large.put(large.chain(1)) == b"\1"


def test_reclaiming_spares_what_a_lease_protects() -> None:
    """A lookup promised the small model's chunks until its lease ends: a store of the large model
    must not take their slab (evict needs neither pin nor lease)."""
    _, small, large = two_models(1)
    keys = small.chain(2)
    small.put(keys)
    assert small.lookup(keys) == 2
    large.put(large.chain(1))
    assert small.lookup(keys) == 2
    small.release()
    assert large.put(large.chain(1, 1)) == b"\1"


def test_a_slab_whose_slots_are_all_free_serves_another_size() -> None:
    """The small model's chunks were cleared and swept: nothing of it is left, so all four slabs are
    there for the large model, not only its fair share."""
    driver, small, large = two_models(4)
    small.put(small.chain(16))
    driver.clear()
    driver.tick()
    assert driver.tier().slots_used == 0
    assert large.put(large.chain(8)) == bytes([1] * 8)


def test_making_room_sweeps_a_bounded_number_of_chunks() -> None:
    """100 chunks were cleared and wait for their sweep, two in each slab beside two of another
    tenant, so that no slab gets free. A store of the other model sweeps some, but not all of them
    in one event: with a million that would stop every engine for seconds."""
    driver = Driver(Limits(host=TierLimits(50, 4 * SMALL), sweep_entries=10))
    gone, stay = driver.engine("e1", tenant="t1"), driver.engine("e2", tenant="t2")
    large = driver.engine("large", tenant="t2", shape=layout(2))
    for start in range(0, 100, 2):
        for engine in (gone, stay):
            engine.put(engine.chain(100)[start : start + 2])
    driver.clear(tenant="t1")
    assert driver.tier().slots_used == 200
    large.store(large.chain(1))
    assert driver.tier().slots_used >= 110


def test_limits_of_the_driver_are_what_they_say() -> None:
    """Four slots are four slots."""
    driver = Driver(limits(host_slots=4))
    engine = driver.engine()
    assert engine.put(engine.chain(5)) == b"\1\1\1\1\0"
    assert driver.tier().slots_total == 4
