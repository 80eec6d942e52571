"""Spaces: which epochs are known to be durable."""

from __future__ import annotations

from kvstore.core.messages import SpaceRecord
from kvstore.core.spaces import Spaces


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
