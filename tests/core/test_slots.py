"""Slot: the transition table, holders and handles."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.errors import InvariantError
from kvstore.core.layout import Part
from kvstore.core.messages import MoveID, TierName
from kvstore.core.slabs import Slab
from kvstore.core.slots import TRANSITIONS, Handle, Slot, SlotState

MOVE = MoveID(7)
VERBS: dict[str, Callable[[Slot], None]] = {
    "reserve": lambda slot: slot.reserve(None, 0, Part.FULL, 4096),
    "commit": Slot.commit,
    "cancel": Slot.cancel,
    "evict": Slot.evict,
    "doom": Slot.doom,
}
"""The verbs that raise where the table has no row; ``free`` tells instead whether it happened."""


def slot_in(state: SlotState) -> Slot:
    """A slot brought to a state by its own verbs, its bytes landed where it is RESERVED."""
    slot = Slab(TierName.HOST, 0, 4096, 1).make(0)
    paths: dict[SlotState, tuple[str, ...]] = {
        SlotState.FREE: (),
        SlotState.RESERVED: ("reserve",),
        SlotState.READY: ("reserve", "commit"),
        SlotState.CANCELLED: ("reserve", "cancel"),
        SlotState.DOOMED: ("reserve", "commit", "doom"),
    }
    for verb in paths[state]:
        VERBS[verb](slot)
        slot.landed = True
    assert slot.state is state
    return slot


def test_table_is_that_of_the_design() -> None:
    """FREE -> RESERVED -> READY or CANCELLED; READY -> FREE or DOOMED; the dead become FREE."""
    free, reserved, ready = SlotState.FREE, SlotState.RESERVED, SlotState.READY
    cancelled, doomed = SlotState.CANCELLED, SlotState.DOOMED
    assert {
        (free, "reserve"): reserved,
        (reserved, "commit"): ready,
        (reserved, "cancel"): cancelled,
        (cancelled, "free"): free,
        (ready, "evict"): free,
        (ready, "doom"): doomed,
        (doomed, "free"): free,
    } == TRANSITIONS


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", SlotState)
def test_a_verb_works_where_the_table_says_and_raises_elsewhere(
    state: SlotState, verb: str
) -> None:
    """Every pair of state and verb: either the table's next state, or InvariantError and no
    change."""
    slot = slot_in(state)
    after = TRANSITIONS.get((state, verb))
    if after is not None:
        VERBS[verb](slot)
        assert slot.state is after
    else:
        with pytest.raises(InvariantError):
            VERBS[verb](slot)
        assert slot.state is state


@pytest.mark.parametrize("state", SlotState)
def test_only_dead_slots_become_free_at_the_last_move(state: SlotState) -> None:
    """CANCELLED and DOOMED slots go back to FREE when nothing holds them; others stay."""
    slot = slot_in(state)
    generation = slot.generation
    dead = (state, "free") in TRANSITIONS
    assert slot.free_if_dead() is dead
    assert slot.state is (SlotState.FREE if dead else state)
    assert slot.generation == generation + dead


def test_commit_before_the_bytes_have_landed_raises() -> None:
    """A key is never published before its bytes are whole."""
    slot = Slab(TierName.HOST, 0, 4096, 1).make(0)
    slot.reserve(None, 0, Part.FULL, 4096)
    with pytest.raises(InvariantError):
        slot.commit()
    assert slot.state is SlotState.RESERVED


def test_evict_of_a_held_slot_raises() -> None:
    """Evict needs every Move gone (field case 27: the source of a load stays until its end)."""
    slot = slot_in(SlotState.READY)
    slot.hold(MOVE)
    with pytest.raises(InvariantError):
        slot.evict()
    slot.let_go(MOVE)
    slot.evict()
    assert slot.state is SlotState.FREE


@pytest.mark.parametrize("state", [SlotState.CANCELLED, SlotState.DOOMED])
def test_a_dead_slot_stays_until_the_last_of_its_moves_has_ended(state: SlotState) -> None:
    """Two Moves name a slot that died meanwhile: only the second Moved frees it."""
    slot = slot_in(state)
    slot.hold(MOVE)
    slot.hold(MoveID(8))
    assert not slot.free_if_dead()
    slot.let_go(MOVE)
    assert not slot.free_if_dead()
    slot.let_go(MoveID(8))
    assert slot.free_if_dead()


def test_holding_twice_or_letting_go_twice_raises() -> None:
    """A Move holds a slot once and lets it go once (field case 25: a double free raises)."""
    slot = slot_in(SlotState.READY)
    slot.hold(MOVE)
    with pytest.raises(InvariantError):
        slot.hold(MOVE)
    slot.let_go(MOVE)
    with pytest.raises(InvariantError):
        slot.let_go(MOVE)


def test_a_free_slot_cannot_be_held() -> None:
    """A Move names slots that are in use only."""
    with pytest.raises(InvariantError):
        slot_in(SlotState.FREE).hold(MOVE)


@pytest.mark.parametrize("last", ["evict", "doom", "cancel"])
def test_a_handle_is_stale_once_its_slot_was_freed(last: str) -> None:
    """Whatever the way back to FREE, and though the slot is in use again for another chunk."""
    slot = slot_in(SlotState.RESERVED if last == "cancel" else SlotState.READY)
    handle = Handle.of(slot)
    assert not handle.is_stale()
    VERBS[last](slot)
    slot.free_if_dead()
    assert handle.is_stale()
    slot.reserve(None, 0, Part.FULL, 4096)
    assert handle.is_stale()
    assert not Handle.of(slot).is_stale()


def test_a_freed_slot_keeps_nothing_of_its_former_use() -> None:
    """Owner, landed and write_queued belong to one use of the slot."""
    slot = slot_in(SlotState.READY)
    slot.write_queued = True
    slot.evict()
    assert slot.owner is None
    assert not slot.landed
    assert not slot.write_queued
    slot.reserve(None, 0, Part.FULL, 4096)
    with pytest.raises(InvariantError):
        slot.commit()
