"""Hidden: what has left a tree but still occupies slots, until sweeps reach it.

Two kinds: the subtrees of doomed copies, and the whole index of a namespace that was cleared. Both
are walked one copy at a time, so that an event frees a bounded number.
"""

from __future__ import annotations

from kvstore.core.tree_nodes import Copy, Index


class Hidden:
    """Doomed copies that have children, and indices of dead spaces."""

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        self._indices: list[Index] = []

    def __bool__(self) -> bool:
        return bool(self._copies or self._indices)

    def subtrees(self) -> bool:
        """Whether copies in a live index hang below a doomed one."""
        return bool(self._copies)

    def add(self, copy: Copy) -> None:
        """A copy that has left the tree; its children, if any, are to follow."""
        if copy.first_child is not None:
            copy.break_off()
            self._copies.append(copy)

    def add_index(self, index: Index) -> None:
        """All copies of a space that is dead."""
        if len(index):
            self._indices.append(index)

    def next(self) -> Copy | None:
        """The next copy to drop, its link to its parent cut; None when nothing is hidden."""
        while self._copies:
            above = self._copies[-1]
            child = above.first_child
            if child is not None:
                child.unlink()
            if above.first_child is None:
                self._copies.pop()
            if child is not None and child.live:
                return child
        while self._indices:
            copy = self._indices[-1].pop_any()
            if copy is None:
                self._indices.pop()
            elif copy.live:
                copy.first_child = None
                return copy
        return None
