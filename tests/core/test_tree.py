"""Tree: commit order, all-or-nothing reserves, doom, sweeps, and lookups meanwhile."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvariantError
from kvstore.core.layout import Part
from kvstore.core.messages import MoveID
from kvstore.core.slots import Slot, SlotState
from kvstore.core.stats import Drop
from tests.core.forest import Forest, state_of

# ---------------------------------------------------------------- commit order


def test_a_reserved_chunk_is_no_hit() -> None:
    """Field case 20: an uncommitted key is a plain miss, not an error."""
    forest = Forest()
    slot = forest.reserve("a")
    assert forest.run("a") == 0
    forest.land(slot)
    assert forest.run("a") == 1


def test_a_landed_child_waits_for_its_parent() -> None:
    """The child's bytes arrive first: it becomes READY right after its parent, and who waits for
    it is told then."""
    forest = Forest()
    parent, child = forest.reserve("a"), forest.reserve("ab")
    ticket = forest.wait_on(child)
    forest.land(child)
    forest.settle()
    assert state_of(child) is SlotState.RESERVED
    assert not ticket.ended()
    forest.land(parent)
    forest.settle()
    assert state_of(child) is SlotState.READY
    assert ticket.ended()
    assert not ticket.failed[0]
    assert forest.run("ab") == 2


def test_chunks_that_land_backwards_commit_in_one_go() -> None:
    """Four chunks land last to first; nothing is visible until the head is, then all are."""
    forest = Forest()
    slots = [forest.reserve("abcd"[: length + 1]) for length in range(4)]
    for slot in reversed(slots[1:]):
        forest.land(slot)
        assert forest.run("abcd") == 0
    forest.land(slots[0])
    assert forest.run("abcd") == 4
    assert [slot.owner for slot in forest.tree.committed] == [slot.owner for slot in slots]


def test_a_failed_parent_fails_what_landed_and_what_is_in_flight_below_it() -> None:
    """Field case 21: below a failed chunk one child has landed and its child is on its way. Both
    fail at once, their tickets are told, and only the running Move still holds a slot."""
    forest = Forest()
    a, ab, abc = forest.reserve("a"), forest.reserve("ab"), forest.reserve("abc")
    tickets = [forest.wait_on(slot) for slot in (a, ab, abc)]
    forest.land(ab)
    forest.fail(a)
    forest.settle()
    assert all(ticket.ended() and ticket.failed[0] for ticket in tickets)
    assert forest.names() == set()
    assert forest.used() == 1
    assert state_of(abc) is SlotState.CANCELLED
    forest.land(abc)
    assert forest.used() == 0


def test_a_failed_chunk_leaves_what_is_above_it_and_can_be_stored_again() -> None:
    """Field case 21: "ab" fails, "a" stays a hit, and a retry of "ab" works."""
    forest = Forest()
    forest.put("a")
    forest.fail(forest.reserve("ab"))
    assert forest.run("ab") == 1
    forest.put("ab")
    assert forest.run("ab") == 2


def test_a_chunk_is_visible_with_its_last_shard_only() -> None:
    """Two ranks: the second one's commit publishes the chunk."""
    forest = Forest(shards=2)
    forest.land(forest.reserve("a", shard=1))
    assert forest.run("a") == 0
    forest.land(forest.reserve("a", shard=0))
    assert forest.run("a") == 1


def test_shards_commit_in_order_each_by_itself() -> None:
    """Rank 1 has stored "a" and "ab", rank 0 only "ab"'s bytes so far: rank 1's slots are READY,
    rank 0's waits, and nothing is visible."""
    forest = Forest(shards=2)
    a0, ab0 = forest.reserve("a", 0), forest.reserve("ab", 0)
    a1, ab1 = forest.reserve("a", 1), forest.reserve("ab", 1)
    for slot in (a1, ab1, ab0):
        forest.land(slot)
    states = [slot.state for slot in (a0, ab0, a1, ab1)]
    assert states == [SlotState.RESERVED, SlotState.RESERVED, SlotState.READY, SlotState.READY]
    assert forest.run("ab") == 0
    forest.land(a0)
    assert forest.run("ab") == 2


def test_one_shards_failure_keeps_the_other_shards_slots() -> None:
    """Field case 30: rank 0 fails "a"; its "ab" goes with it, rank 1's slots stay for a retry."""
    forest = Forest(shards=2)
    a0, ab0 = forest.reserve("a", 0), forest.reserve("ab", 0)
    forest.land(forest.reserve("a", 1))
    forest.land(forest.reserve("ab", 1))
    forest.land(ab0)
    forest.fail(a0)
    assert forest.run("ab") == 0
    assert forest.used() == 2
    forest.land(forest.reserve("a", 0))
    forest.land(forest.reserve("ab", 0))
    assert forest.run("ab") == 2


def test_a_window_part_commits_after_its_chunks_full_part() -> None:
    """The window part of "a" lands before its full part, and waits for it."""
    forest = Forest()
    full, window = forest.reserve("a"), forest.reserve("a", part=Part.WINDOW)
    forest.land(window)
    assert state_of(window) is SlotState.RESERVED
    forest.land(full)
    assert state_of(window) is SlotState.READY
    assert forest.copy("a").window_visible()


def test_a_failed_full_part_fails_its_window_part() -> None:
    """Nothing of a chunk stays whose full part isn't there."""
    forest = Forest()
    full, window = forest.reserve("a"), forest.reserve("a", part=Part.WINDOW)
    forest.land(window)
    forest.fail(full)
    assert forest.used() == 0
    assert not forest.has("a")


def test_a_failed_window_part_leaves_the_chunk() -> None:
    """The full part is a hit by itself."""
    forest = Forest()
    forest.put("a")
    forest.fail(forest.reserve("a", part=Part.WINDOW))
    assert forest.run("a") == 1
    assert not forest.copy("a").window_visible()


# ---------------------------------------------------------------- reserve is all-or-nothing


@pytest.mark.parametrize(
    ("name", "part"), [("xy", Part.FULL), ("x", Part.WINDOW), ("ab", Part.WINDOW)]
)
def test_reserve_without_what_it_hangs_on_is_refused(name: str, part: Part) -> None:
    """A child without its parent, and a window part without its full part, change nothing."""
    forest = Forest()
    forest.put("a")
    assert forest.try_reserve(name, part=part) is Drop.PARENT_MISSING
    assert forest.names() == {"a"}
    assert forest.used() == 1
    assert forest.copy("a").first_child is None


def test_a_window_part_of_a_shard_needs_that_shards_full_part() -> None:
    """Rank 0 has stored "a"; rank 1's window part alone is refused."""
    forest = Forest(shards=2)
    forest.land(forest.reserve("a", 0))
    assert forest.try_reserve("a", 1, Part.WINDOW) is Drop.PARENT_MISSING
    assert forest.used() == 1


def test_reserve_below_a_hidden_chunk_is_refused() -> None:
    """Chunk "a" is doomed and "abc" not swept yet: its new child would be acknowledged and swept
    with it."""
    forest = Forest(slots=8)
    forest.put("a", "ab", "abc")
    forest.tree.doom(forest.copy("a"))
    assert forest.try_reserve("abcd") is Drop.PARENT_MISSING
    assert forest.sweep_all() == 2
    assert forest.used() == 0


def test_reserve_below_a_parent_without_this_shard_is_refused() -> None:
    """Rank 1 hasn't stored "a": its "ab" would break the order of its shard."""
    forest = Forest(shards=2)
    forest.land(forest.reserve("a", 0))
    assert forest.try_reserve("ab", shard=1) is Drop.PARENT_MISSING
    assert forest.names() == {"a"}


def test_reserve_in_a_full_tier_without_candidates_changes_nothing() -> None:
    """All slots are RESERVED: the refusal leaves the parent without a child and everything else
    alone."""
    forest = Forest(slots=2)
    a, x = forest.reserve("a"), forest.reserve("x")
    assert forest.try_reserve("ab") is Drop.HOST_FULL
    assert forest.try_reserve("y") is Drop.HOST_FULL
    assert forest.names() == {"a", "x"}
    assert forest.copy("a").first_child is None
    forest.land(a)
    forest.land(x)
    assert forest.run("a") == 1


def test_a_refused_reserve_leaves_its_parent_evictable() -> None:
    """Chunk "ab" finds no place while "x" is on its way, and the lease of "a" is still on:
    afterwards "a" leaves as a leaf. (A parent that a failed child un-leafed for good would be a
    leak.)"""
    forest = Forest(slots=2)
    forest.put("a")
    x = forest.reserve("x")
    assert forest.try_reserve("ab") is Drop.HOST_FULL
    forest.reserve("y")
    assert forest.names() == {"x", "y"}
    forest.land(x)


def test_reserve_never_evicts_the_chunk_it_hangs_on() -> None:
    """One slot, and "a" in it: its child finds no place; "a" stays."""
    forest = Forest(slots=1)
    forest.put("a")
    assert forest.try_reserve("ab") is Drop.HOST_FULL
    assert forest.run("a") == 1


def test_reserve_of_a_second_shard_never_evicts_the_chunk_itself() -> None:
    """A family of two shards with room for one: the second shard is refused, the first one stays,
    and is a candidate again afterwards."""
    forest = Forest(slots=1, shards=2)
    forest.land(forest.reserve("a", 0))
    assert forest.try_reserve("a", 1) is Drop.HOST_FULL
    assert forest.names() == {"a"}
    forest.reserve("b", 0)
    assert forest.names() == {"b"}


# ---------------------------------------------------------------- doom and sweeps


def test_doom_hides_the_whole_subtree_at_once() -> None:
    """Chunk "ab" is doomed: the path ends at "a" and the branch beside it is untouched, before any
    sweep."""
    forest = Forest(slots=8)
    forest.put("a", "ab", "abc", "abd", "ax")
    forest.tree.doom(forest.copy("ab"))
    assert forest.tree.sweeping()
    assert [forest.run(name) for name in ("abc", "abd", "ax")] == [1, 1, 2]
    assert forest.used() == 4


def test_sweep_frees_no_more_than_it_was_asked_for() -> None:
    """A subtree of six goes in steps of two; the rest stays hidden meanwhile."""
    forest = Forest(slots=8)
    forest.put("a", "ab", "abc", "abcd", "abe", "abf", "ag")
    forest.tree.doom(forest.copy("a"))
    assert forest.used() == 6
    assert forest.tree.sweep(2) == 2
    assert forest.used() == 4
    assert forest.run("abcd") == 0
    assert forest.sweep_all() == 4
    assert forest.used() == 0
    assert forest.names() == set()


def test_sweep_of_a_deep_chain_needs_no_stack() -> None:
    """More chunks in one chain than Python has stack frames are doomed at their root, and swept to
    the last."""
    depth = 1200
    forest = Forest(slots=depth)
    for length in range(depth):
        slot = forest.tree.reserve(forest.space, forest.header("a" * (length + 1)))
        assert isinstance(slot, Slot)
        forest.tree.landed(slot)
    forest.tree.doom(forest.copy("a"))
    while forest.tree.sweeping():
        forest.tree.sweep(100)
    assert forest.used() == 0


def test_a_doomed_slot_stays_until_its_moves_have_ended() -> None:
    """A LOAD reads "a" while it is doomed: the slot is given to nobody before that Moved."""
    forest = Forest(slots=1)
    forest.put("a")
    slot = forest.copy("a").slot(Part.FULL, 0)
    assert slot is not None
    slot.hold(MoveID(99))
    forest.tree.doom(forest.copy("a"))
    assert forest.try_reserve("b") is Drop.HOST_FULL
    forest.tree.let_go(slot, MoveID(99))
    assert forest.reserve("b") is slot


def test_a_chunk_is_stored_again_below_a_doomed_parent() -> None:
    """Chunk "a" is doomed and stored anew before the sweep: the old "ab" is hidden and never joins
    the new "a"; a store of "ab" replaces it, and the sweep takes only the old."""
    forest = Forest(slots=8)
    forest.put("a", "ab", "abc")
    old = forest.copy("ab")
    forest.tree.doom(forest.copy("a"))
    forest.put("a")
    assert forest.run("abc") == 1
    forest.put("ab")
    assert forest.copy("ab") is not old
    assert forest.run("abc") == 2
    forest.put("abc")
    assert forest.run("abc") == 3
    forest.sweep_all()
    assert forest.run("abc") == 3
    assert forest.used() == 3


def test_a_chunk_below_a_hidden_grandparent_is_not_taken_for_present() -> None:
    """Chunk "a" is doomed; a store that begins at "abc" must not be told that "abc" is there: it is
    hidden, so no lookup will ever find it, and it leaves with the sweep."""
    forest = Forest(slots=8)
    forest.put("a", "ab", "abc")
    forest.tree.doom(forest.copy("a"))
    assert forest.tree.current(forest.space, forest.header("abc")) is None


def test_a_landed_child_of_a_doomed_parent_fails_with_the_sweep() -> None:
    """Chunk "a" is doomed while "ab" is on its way: who waits for "ab" is told, and its slot is
    free after its Move."""
    forest = Forest()
    forest.put("a")
    ab = forest.reserve("ab")
    ticket = forest.wait_on(ab)
    forest.tree.doom(forest.copy("a"))
    forest.land(ab)
    forest.sweep_all()
    forest.settle()
    assert ticket.ended()
    assert ticket.failed[0]
    assert forest.used() == 0


def test_a_child_does_not_commit_because_its_dead_parents_slot_is_ready_again() -> None:
    """Chunk "a" is doomed, its slot is another chunk's by now, READY; the Moved of "ab" must not
    take that for its parent."""
    forest = Forest(slots=2)
    forest.put("a")
    slot = forest.copy("a").slot(Part.FULL, 0)
    ab = forest.reserve("ab")
    forest.tree.doom(forest.copy("a"))
    x = forest.reserve("x")
    assert x is slot
    forest.land(x)
    forest.land(ab)
    assert state_of(ab) is not SlotState.READY
    assert forest.run("ab") == 0


def test_full_tier_makes_room_from_hidden_chunks_before_it_evicts() -> None:
    """Of four slots three are hidden below a doomed root: a reserve takes one of those and "x"
    stays."""
    forest = Forest(slots=4)
    forest.put("a", "ab", "abc", "x")
    forest.tree.doom(forest.copy("a"))
    forest.put("y")
    forest.put("z")
    forest.put("w")
    assert forest.run("x") == 1
    assert forest.tree.evictions == 0


def test_an_index_of_a_dead_space_is_swept_in_steps() -> None:
    """A clear gives up an index of four chunks: two sweeps of two free it."""
    forest = Forest()
    forest.put("a", "ab", "abc", "x")
    forest.space.alive = False
    forest.tree.drop_index(forest.space.index[forest.tree.tier])
    assert forest.tree.sweep(2) == 2
    assert forest.used() == 2
    assert forest.tree.sweep(2) == 2
    assert forest.used() == 0
    assert forest.tree.sweep(2) == 0
    assert not forest.tree.sweeping()


def test_ending_a_lease_twice_raises() -> None:
    """A count of leases that goes below none is a bug."""
    forest = Forest()
    forest.put("a")
    forest.tree.lease(forest.copy("a"))
    forest.tree.unlease(forest.copy("a"))
    with pytest.raises(InvariantError):
        forest.tree.unlease(forest.copy("a"))
