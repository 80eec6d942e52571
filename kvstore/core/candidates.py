"""Candidates: the copies of a tier that could leave, and which leaves first.

WINDOW parts leave before whole copies that were used no earlier: they serve the last tokens of one
hit only, but a prompt that was stored a moment ago is no hit without them. A whole copy is a
candidate while it is a leaf without lease or Move. Copies whose slots have different sizes (the
shards of a pipeline) queue together under the sizes that evicting them frees; where there are
quotas, each tenant's queue by themselves.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.eviction import Look, Policy
from kvstore.core.layout import Part
from kvstore.core.quotas import NO_QUOTAS, Quotas
from kvstore.core.tree_nodes import Copy

_Queues = dict[tuple[str, tuple[int, ...]], Policy]
"""By tenant, where quotas are kept, and by sizes."""
_BOTH = [Part.FULL, Part.WINDOW]


class Candidates:
    """A policy for each combination of slot sizes. ``guard`` is the copy that room is made for; a
    policy that comes across it forgets it, and ``release`` offers it again. ``looks_left`` are the
    candidates that this event may still look at."""

    def __init__(self, policy: Callable[[], Policy], quotas: Quotas = NO_QUOTAS) -> None:
        self.guard: Copy | None = None
        self.looks_left = 0
        self._passed_guard = False
        self._policy = policy
        self._by_tenant = quotas != NO_QUOTAS
        self._copies: _Queues = {}
        self._windows: _Queues = {}

    def offer(self, copy: Copy) -> None:
        """Note a copy that may be evictable, whole or in part."""
        if self.evictable(copy):
            self._queue(self._copies, copy, Part.FULL).offer(copy)
        if self.window_evictable(copy):
            self._queue(self._windows, copy, Part.WINDOW).offer(copy)

    def release(self) -> None:
        """Room has been made: the guard is a copy like others again."""
        guard, self.guard = self.guard, None
        if self._passed_guard and guard is not None:
            self._passed_guard = False
            self.offer(guard)

    def begin(self, looks: int) -> None:
        """A new event begins, with so many looks; no fewer than it takes to get anywhere, as each
        policy's coldest is looked at twice."""
        queues = len(self._copies) + len(self._windows)
        self.looks_left = max(looks, 2 * queues + 2)

    def take(self, slot_bytes: int) -> tuple[Copy, list[Part]] | None:
        """The copy, and its parts, to evict for a slot of this size; None where there is none, or
        with ``looks_left`` below 0, where it wasn't found within the looks that there were."""
        return self._first(_freeing(self._windows, slot_bytes), _freeing(self._copies, slot_bytes))

    def take_of(self, tenant: str) -> tuple[Copy, list[Part]] | None:
        """The same for what leaves first of a tenant that has a quota, of any size."""
        return self._first(_of(self._windows, tenant), _of(self._copies, tenant))

    def _first(self, windows: list[Policy], copies: list[Policy]) -> tuple[Copy, list[Part]] | None:
        window = self._coldest(windows, self._look_at_window)
        if window is None:
            copy = None if self.looks_left < 0 else self._take(copies, self._look_at_copy)
            return None if copy is None else (copy, _BOTH)
        whole = self._coldest(copies, self._look_at_copy)
        if self.looks_left < 0:
            return None
        if whole is None or window[0] <= whole[0]:
            copy = window[1].take(self._look_at_window)
            return None if copy is None else (copy, [Part.WINDOW])
        copy = whole[1].take(self._look_at_copy)
        return None if copy is None else (copy, _BOTH)

    def trim(self) -> None:
        """A copy has left otherwise: policies may forget some that have."""
        for queues in (self._copies, self._windows):
            for policy in queues.values():
                policy.trim()

    def evictable(self, copy: Copy) -> bool:
        """Whether the whole copy may leave."""
        return copy.first_child is None and self._loose(copy) and copy.idle()

    def window_evictable(self, copy: Copy) -> bool:
        """Whether the copy's WINDOW part may leave."""
        return copy.window_ready > 0 and self._loose(copy) and copy.idle(Part.WINDOW)

    def _take(self, policies: list[Policy], look: Callable[[Copy], Look]) -> Copy | None:
        """Take the copy used longest ago of all."""
        if len(policies) == 1:
            return policies[0].take(look)
        best = self._coldest(policies, look)
        return None if best is None or self.looks_left < 0 else best[1].take(look)

    def _coldest(
        self, policies: list[Policy], look: Callable[[Copy], Look]
    ) -> tuple[int, Policy] | None:
        """The use of the copy used longest ago of all, and the policy that holds it."""
        best: tuple[int, Policy] | None = None
        for policy in policies:
            use = policy.coldest_use(look)
            if use is not None and (best is None or use < best[0]):
                best = (use, policy)
        return best

    def _look_at_copy(self, copy: Copy) -> Look:
        return self._look(copy, self.evictable)

    def _look_at_window(self, copy: Copy) -> Look:
        return self._look(copy, self.window_evictable)

    def _look(self, copy: Copy, may_leave: Callable[[Copy], bool]) -> Look:
        """The guard costs no look, as it comes back each time."""
        if copy is self.guard:
            self._passed_guard = True
            return Look.STAYS
        self.looks_left -= 1
        if self.looks_left < 0:
            return Look.LATER
        return Look.LEAVES if may_leave(copy) else Look.STAYS

    def _loose(self, copy: Copy) -> bool:
        if copy is self.guard:
            self._passed_guard = True
            return False
        return copy.live and copy.space.alive and not copy.leases

    def _queue(self, queues: _Queues, copy: Copy, part: Part) -> Policy:
        sizes = copy.slot_sizes(part)
        name = (copy.space.tenant if self._by_tenant else "", sizes)
        policy = queues.get(name)
        if policy is None:
            policy = queues[name] = self._policy()
        return policy


def _freeing(queues: _Queues, slot_bytes: int) -> list[Policy]:
    """The policies whose copies free a slot of this size."""
    return [policy for (_, sizes), policy in queues.items() if slot_bytes in sizes]


def _of(queues: _Queues, tenant: str) -> list[Policy]:
    """The policies of a tenant's copies."""
    return [policy for (owner, _), policy in queues.items() if owner == tenant]
