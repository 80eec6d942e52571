"""Eviction: only leaves leave, the coldest first; what is pinned or leased stays, and is a
candidate again afterwards."""

from __future__ import annotations

import gc

import pytest

from kvstore.core.eviction import LeastRecentlyUsed, Look
from kvstore.core.layout import Part
from kvstore.core.messages import MoveID, MoveKind, MoveStatus
from kvstore.core.slots import Slot
from kvstore.core.stats import Drop
from kvstore.core.tree_nodes import Copy
from tests.core.driver import Driver, Engine, limits
from tests.core.forest import SLOT_BYTES, Forest

MOVE = MoveID(99)


def slot_of(forest: Forest, name: str, part: Part = Part.FULL, shard: int = 0) -> Slot:
    """A chunk's slot."""
    slot = forest.copy(name).slot(part, shard)
    assert slot is not None
    return slot


# ---------------------------------------------------------------- which chunk leaves


def test_only_leaves_leave_and_the_coldest_first() -> None:
    """Chunk "a" is the coldest but has a child: its leaf "ab" leaves before the newer "x"; as a
    leaf, "a" counts as used when "ab" was, and goes before "x" too."""
    forest = Forest(slots=3)
    forest.put("a", "ab", "x", "y")
    assert forest.names() == {"a", "x", "y"}
    forest.put("z")
    assert forest.names() == {"x", "y", "z"}


def test_a_parent_inherits_the_recency_of_its_last_child() -> None:
    """Chunk "ab" was used after "x": when "ab" has left, "a" counts as used then, so "x" goes
    next."""
    forest = Forest(slots=3)
    forest.put("a", "x", "ab")
    forest.tree.touch(forest.copy("x"))
    forest.tree.touch(forest.copy("ab"))
    x = forest.copy("x")
    forest.tree.lease(x)
    forest.put("y")
    assert forest.names() == {"a", "x", "y"}
    forest.tree.unlease(x)
    forest.put("z")
    assert forest.names() == {"a", "y", "z"}


def test_a_whole_chain_leaves_from_its_tail() -> None:
    """A cold chain of four makes way one by one, always a prefix of it staying a hit."""
    forest = Forest(slots=4)
    forest.put("a", "ab", "abc", "abcd")
    for left, name in zip((3, 2, 1), "xyz", strict=True):
        forest.put(name)
        assert forest.run("abcd") == left


def test_head_that_two_prefixes_share_outlives_both_tails() -> None:
    """Field case 88: head "a", tails "ab" and "ac"; two new chunks take the tails, the head
    stays."""
    forest = Forest(slots=3)
    forest.put("a", "ab", "ac", "x", "xy")
    assert forest.names() == {"a", "x", "xy"}


def test_evicting_thirty_of_a_hundred_chunks_leaves_the_leading_seventy() -> None:
    """Field case 88: a prefix of 100 chunks is stored in 10 batches, the head looked up in between;
    another prompt of 30 chunks is stored: chunks 0..69 remain, and a lookup says 70."""
    driver = Driver(limits(host_slots=100))
    engine = driver.engine()
    keys = engine.chain(100)
    for start in range(0, 100, 10):
        assert engine.put(keys[start : start + 10]) == bytes([1] * 10)
        assert engine.peek(keys[:1]) == 1
    assert engine.put(engine.chain(30, seed=1)) == bytes([1] * 30)
    assert driver.tier().evictions == 30
    assert engine.peek(keys) == 70


def test_an_incomplete_family_leaves_before_whole_ones() -> None:
    """Rank 1 never stored "x": its place is taken first, though "x" is the newest."""
    forest = Forest(slots=5, shards=2)
    forest.put("a", "b")
    forest.land(forest.reserve("x", 0))
    forest.reserve("y", 0)
    assert forest.names() == {"a", "b", "y"}


def test_all_shards_of_a_family_leave_together() -> None:
    """One slot is needed, the whole family goes: a family without a shard is no hit."""
    forest = Forest(slots=4, shards=2)
    forest.put("a", "b")
    forest.reserve("x", 0)
    assert forest.names() == {"b", "x"}
    assert forest.used() == 3


# ---------------------------------------------------------------- what stays


def test_a_leased_chunk_stays_and_is_a_candidate_again_afterwards() -> None:
    """Two slots, both leased: no room. The lease of the colder one ends: it leaves."""
    forest = Forest(slots=2)
    forest.put("a", "b")
    forest.tree.lease(forest.copy("a"))
    forest.tree.lease(forest.copy("b"))
    assert forest.try_reserve("x") is Drop.HOST_FULL
    forest.tree.unlease(forest.copy("b"))
    forest.put("x")
    assert forest.names() == {"a", "x"}
    forest.tree.unlease(forest.copy("a"))
    forest.put("y")
    assert forest.names() == {"x", "y"}


def test_a_lease_on_the_tail_keeps_the_whole_prefix() -> None:
    """Chunk "abc" is leased: nothing of its path may leave, however cold."""
    forest = Forest(slots=4)
    forest.put("a", "ab", "abc", "x")
    forest.tree.lease(forest.copy("abc"))
    forest.put("y")
    assert forest.try_reserve("yz") is Drop.HOST_FULL
    assert forest.run("abc") == 3


def test_a_pinned_chunk_stays_and_is_a_candidate_again_afterwards() -> None:
    """Field case 27: a LOAD reads "a" while everything evictable is forced out: it stays until the
    Moved, and leaves then."""
    forest = Forest(slots=2)
    forest.put("a", "b")
    slot = slot_of(forest, "a")
    slot.hold(MOVE)
    forest.put("c", "d")
    assert forest.names() == {"a", "d"}
    forest.tree.let_go(slot, MOVE)
    forest.put("e")
    assert forest.names() == {"d", "e"}


def test_a_pin_on_one_shard_keeps_the_family() -> None:
    """Rank 1's slot is being read: rank 0's may not leave either."""
    forest = Forest(slots=2, shards=2)
    forest.put("a")
    slot = slot_of(forest, "a", shard=1)
    slot.hold(MOVE)
    assert forest.try_reserve("b") is Drop.HOST_FULL
    forest.tree.let_go(slot, MOVE)
    forest.put("b")
    assert forest.names() == {"b"}


def test_no_candidate_is_lost_over_many_rounds_of_pins_and_leases() -> None:
    """Field case 46: each of four chunks in turn is protected by a lease and a Move while all the
    others are forced out, and let go. In the end a fill evicts everything: a candidate that was
    forgotten on the way would show as a refusal."""
    forest = Forest(slots=4)
    forest.put("a", "b", "c", "d")
    for turn in range(50):
        kept = sorted(forest.names())[turn % 4]
        slot = slot_of(forest, kept)
        forest.tree.lease(forest.copy(kept))
        slot.hold(MOVE)
        fresh = [name for name in "abcdefgh" if not forest.has(name)][:3]
        forest.put(*fresh)
        assert forest.names() == {kept, *fresh}
        assert forest.try_reserve(kept + "~") is not Drop.PARENT_MISSING
        forest.fail(slot_of(forest, kept + "~"))
        forest.put(next(name for name in "abcdefgh" if not forest.has(name)))
        if turn % 2:
            forest.tree.let_go(slot, MOVE)
            forest.tree.unlease(forest.copy(kept))
        else:
            forest.tree.unlease(forest.copy(kept))
            forest.tree.let_go(slot, MOVE)
    forest.put(*"WXYZ")
    assert forest.names() == set("WXYZ")


def test_a_leaf_that_loses_its_child_to_a_failure_is_a_candidate_again() -> None:
    """Chunk "ab" fails after "a" was passed over as a parent: "a" may leave now."""
    forest = Forest(slots=2)
    forest.put("a")
    ab = forest.reserve("ab")
    assert forest.try_reserve("x") is Drop.HOST_FULL
    forest.fail(ab)
    forest.put("x", "y")
    assert forest.names() == {"x", "y"}


def test_a_leaf_that_loses_its_child_to_doom_is_a_candidate_again() -> None:
    """The same, where the child's bytes turned out bad."""
    forest = Forest(slots=2)
    forest.put("a", "ab")
    forest.tree.doom(forest.copy("ab"))
    forest.sweep_all()
    forest.put("x", "y")
    assert forest.names() == {"x", "y"}


# ---------------------------------------------------------------- window parts


def test_a_window_part_leaves_before_its_whole_chunk_and_newer_ones() -> None:
    """Three full parts and the oldest one's window part: the newcomer takes the window part's
    slot; the chunk stays."""
    forest = Forest(slots=4)
    forest.put("a")
    forest.land(forest.reserve("a", part=Part.WINDOW))
    forest.put("b", "c", "d")
    assert forest.names() == {"a", "b", "c", "d"}
    assert forest.copy("a").slot(Part.WINDOW, 0) is None


def test_a_window_part_outlives_whole_chunks_that_were_used_before_it() -> None:
    """A window part that was stored a moment ago is what the next hit of its prompt needs: the
    coldest whole chunk leaves, then the window part, as its chunk is older than the newcomers."""
    forest = Forest(slots=4)
    forest.put("a", "b", "c")
    forest.land(forest.reserve("c", part=Part.WINDOW))
    forest.put("d")
    assert forest.names() == {"b", "c", "d"}
    assert forest.copy("c").slot(Part.WINDOW, 0) is not None
    forest.put("e", "f")
    assert forest.names() == {"c", "d", "e", "f"}
    assert forest.copy("c").slot(Part.WINDOW, 0) is None


def test_the_window_part_of_a_parent_may_leave() -> None:
    """A window part isn't part of the prefix order: "a" has a child and loses its window part."""
    forest = Forest(slots=3)
    forest.put("a")
    forest.land(forest.reserve("a", part=Part.WINDOW))
    forest.put("ab", "x")
    assert forest.names() == {"a", "ab", "x"}


def test_a_leased_chunk_keeps_its_window_part() -> None:
    """A hit needs the window parts of its last chunks until it was retrieved."""
    forest = Forest(slots=2)
    forest.put("a")
    forest.land(forest.reserve("a", part=Part.WINDOW))
    forest.tree.lease(forest.copy("a"))
    assert forest.try_reserve("x") is Drop.HOST_FULL
    forest.tree.unlease(forest.copy("a"))
    forest.put("x")
    assert forest.names() == {"a", "x"}


def test_a_window_part_that_was_evicted_can_be_stored_again() -> None:
    """Its place went to "b"; when "b" has left, the chunk gets its window part back."""
    forest = Forest(slots=2)
    forest.put("a")
    forest.land(forest.reserve("a", part=Part.WINDOW))
    forest.put("b")
    assert not forest.copy("a").window_visible()
    forest.tree.touch(forest.copy("a"))
    forest.land(forest.reserve("a", part=Part.WINDOW))
    assert forest.names() == {"a"}
    assert forest.copy("a").window_visible()


# ---------------------------------------------------------------- what counts as a use


@pytest.mark.parametrize("use", ["lookup", "store", "retrieve"])
def test_a_use_of_a_prompt_makes_another_leave_first(use: str) -> None:
    """Two prompts of two chunks; the older one is looked up, stored again or retrieved: then a new
    chunk takes the other one's place."""
    driver = Driver(limits())
    engine = driver.engine()
    old, young = engine.chain(2, 1), engine.chain(2, 2)
    engine.put(old)
    engine.put(young)
    if use == "lookup":
        engine.peek(old)
    elif use == "store":
        engine.put(old)
    else:
        engine.get(old)
    engine.put(engine.chain(1, 3))
    assert (engine.peek(old), engine.peek(young)) == (2, 1)


def test_a_prompt_that_is_always_hit_in_the_host_stays_on_nvme_too() -> None:
    """One prompt is looked up and retrieved between one-off prompts. NVMe must not take it for
    cold because the host always answers: when the host loses it to a burst, NVMe still has it, and
    nobody would store it again."""
    driver = Driver(limits(host_slots=4, nvme_slots=5))
    driver.scanned()
    engine = driver.engine()
    hot = engine.chain(1)
    engine.put(hot)
    for seed in range(1, 9):
        assert engine.lookup(hot) == 1
        assert engine.get(hot) == b"\1"
        engine.release()
        engine.put(engine.chain(1, seed))
    engine.put(engine.chain(4, 20)[:3])
    assert engine.lookup(hot) == 1


def test_families_with_slots_of_other_sizes_leave_in_one_order() -> None:
    """Family "b" has a small and a large slot, "a" two small ones and was used later: a small slot
    is needed, and "b" leaves, though it queues elsewhere."""
    forest = Forest(slots=8, shards=2, slab_slots=4)
    forest.put("a")
    small, large = forest.reserve("b", 0), forest.reserve("b", 1, nbytes=2 * SLOT_BYTES)
    forest.land(small)
    forest.land(large)
    forest.tree.touch(forest.copy("a"))
    forest.reserve("x", 0)
    forest.reserve("y", 0)
    assert forest.names() == {"a", "x", "y"}


def test_the_only_candidate_may_be_offered_again_after_it_was_looked_at() -> None:
    """Two sizes of families free the wanted slot; the one that wasn't taken is offered again."""
    forest = Forest(slots=3)
    forest.put("a")
    copy, policy = forest.copy("a"), LeastRecentlyUsed()
    policy.offer(copy)
    assert policy.coldest_use(lambda copy: Look.LEAVES) is not None
    policy.offer(copy)
    assert policy.take(lambda copy: Look.LEAVES) is copy
    assert policy.take(lambda copy: Look.LEAVES) is None


def test_what_has_left_is_freed_without_cyclic_collection() -> None:
    """The daemon runs without it, so whatever leaves by eviction, doom, failure or clear must drop
    all links between copies. Forty rounds later no more copies are alive than after the first."""
    gc.collect()
    gc.disable()
    try:
        driver = Driver(limits(host_slots=8, nvme_slots=8))
        driver.scanned()
        engine = driver.engine()
        alive = []
        for turn in range(40):
            live_and_die(driver, engine, turn)
            alive.append(sum(type(thing) is Copy for thing in gc.get_objects()))
    finally:
        gc.enable()
    assert max(alive[20:]) <= max(alive[:5]) + 8


def live_and_die(driver: Driver, engine: Engine, turn: int) -> None:
    """Branches that are stored, evicted, read badly, failed and cleared."""
    engine.put(engine.chain(5, 3 * turn, shared=2))
    engine.put(engine.chain(5, 3 * turn + 1, shared=2))
    engine.put(engine.chain(6, 3 * turn + 2))
    engine.retrieve(engine.chain(5, 3 * turn, shared=2))
    for move in driver.waiting(MoveKind.READ)[:1]:
        driver.end(move, MoveStatus.CORRUPT)
    engine.store(engine.chain(3, 999, shared=1))
    for move in driver.waiting(MoveKind.STORE)[:1]:
        driver.end(move, MoveStatus.FAILED)
    driver.run()
    if turn % 2:
        driver.clear()
    driver.tick()
