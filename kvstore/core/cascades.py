"""Spread: what a change of a copy means for what hangs below it, one child at a time.

A chunk may have a million others below it, in a chain or side by side: who walks them must be able
to stop after any child and go on in a later event, whatever left or came meanwhile.
"""

from __future__ import annotations

from collections import deque

from kvstore.core.tree_nodes import Copy


class Spread:
    """Copies, each with a shard, whose children are still to be visited."""

    def __init__(self) -> None:
        self._parents: deque[tuple[Copy, int]] = deque()
        self._child: Copy | None = None

    def __bool__(self) -> bool:
        return bool(self._parents)

    def add(self, copy: Copy, shard: int = 0) -> None:
        """Visit this copy's children."""
        if copy.first_child is not None:
            self._parents.append((copy, shard))

    def next(self) -> tuple[Copy, int] | None:
        """The next child; None when there is none left. Children that come while theirs are being
        visited may be left out; where the next one has left, its siblings are visited again."""
        while self._parents:
            parent, shard = self._parents[0]
            child = self._child
            if child is None or child.parent is not parent:
                child = parent.first_child
            self._child = None if child is None else child.next_sibling
            if self._child is None:
                self._parents.popleft()
            if child is not None:
                return child, shard
        return None
