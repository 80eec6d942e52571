"""The order of eviction in a large tier: what leaves is exactly what was used longest ago."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.core.eviction import LeastRecentlyUsed
from kvstore.core.keys import ChunkKey
from kvstore.core.messages import MoveID
from kvstore.core.room import STEP_COPIES
from kvstore.core.slots import Slot
from kvstore.core.tree_nodes import Copy
from tests.core.forest import Forest

LEAVES = 200_000
MOVE = MoveID(1)


class Roots:
    """A full host tier of chunks that nothing hangs on, named by numbers."""

    def __init__(self, count: int) -> None:
        self.forest = Forest(slots=count)
        self._sample = self.forest.header("a")
        self.events = 0
        for name in range(count):
            self.put(name)

    def put(self, name: int) -> None:
        """Store one, in as many events as it takes to make room for it."""
        tree, space = self.forest.tree, self.forest.space
        header = replace(self._sample, key=self._key(name))
        slot = None
        while slot is None:
            self.events += 1
            tree.begin()
            slot = tree.reserve(space, header)
        assert isinstance(slot, Slot)
        slot.hold(MOVE)
        tree.landed(slot)
        tree.let_go(slot, MOVE)

    def copy(self, name: int) -> Copy | None:
        """Its copy in the index."""
        return self.forest.tree.find(self.forest.space, self._key(name))

    def use(self, name: int) -> None:
        """Something uses it."""
        copy = self.copy(name)
        assert copy is not None
        self.forest.tree.touch(copy)

    def _key(self, name: int) -> ChunkKey:
        return ChunkKey(name.to_bytes(32, "big"))


def test_among_very_many_leaves_what_was_used_longest_ago_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of 200,000 are used in an order of their own, so that each place in the heaps is out of
    date, and every tenth once more: 300 new ones take the places of the 300 that were used longest
    ago, one by one, and no event looks at more than its share."""
    rng = random.Random(1)
    roots = Roots(LEAVES)
    order = list(range(LEAVES))
    rng.shuffle(order)
    for name in order:
        roots.use(name)
    again = set(order[::10])
    for name in order[::10]:
        roots.use(name)
    order = [name for name in order if name not in again]
    looks = [0]
    begin, look = roots.forest.tree.begin, roots.forest.tree.candidates._look

    def counted_begin() -> None:
        looks.append(0)
        begin()

    def counted_look(*arguments: object) -> object:
        looks[-1] += 1
        return look(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(roots.forest.tree, "begin", counted_begin)
    monkeypatch.setattr(roots.forest.tree.candidates, "_look", counted_look)
    roots.events = 0
    for new in range(300):
        assert roots.copy(order[new]) is not None
        roots.put(LEAVES + new)
        assert roots.copy(order[new]) is None, f"another one than {order[new]} left"
    assert all(roots.copy(name) is not None for name in order[300:])
    assert all(roots.copy(name) is not None for name in again)
    assert max(looks) <= STEP_COPIES + 1
    assert roots.events > 300, "places that are out of date are renewed over several events"
    (policy,) = roots.forest.tree.candidates._copies.values()
    assert isinstance(policy, LeastRecentlyUsed)
    assert len(policy) == LEAVES
