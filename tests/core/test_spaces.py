"""Spaces: which epochs are known to be durable."""

from __future__ import annotations

from kvstore.core.messages import SpaceRecord
from kvstore.core.spaces import Space, Spaces


def test_an_epoch_that_came_after_a_persist_waits_for_its_own() -> None:
    """A clear raises an epoch while the manifest of the last clear is being written. What that one
    made durable is the epoch before."""
    spaces = Spaces()
    record = SpaceRecord("t", b"n", "m", "", 0)
    first, persist = spaces.enter(record, 1, set)
    assert persist is not None
    second = spaces.raise_epoch(first)
    spaces.persisted(persist.number)
    assert not second.persisted
    persist = spaces.persist()
    assert persist.spaces[0].epoch == second.epoch
    third = spaces.raise_epoch(second)
    spaces.persisted(persist.number)
    assert not third.persisted
    persist = spaces.persist()
    spaces.persisted(persist.number)
    assert third.persisted


def test_an_older_epoch_that_is_told_late_reveals_a_clear() -> None:
    """The first answer tells the new epoch; a slower one, asked before, the old: what was stored
    before the first is older than a clear, what was stored between them isn't."""
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
    before = space.age
    space.saw_fleet_epoch(4)
    between = space.age
    assert before >= space.shared_from
    space.saw_fleet_epoch(3)
    assert before < space.shared_from <= between
