"""Lease: a request's claim on the hit that its lookup reported, until release or deadline.

A lease protects presence only, by pinning the deepest chunk of the hit in each tier (what lies
above can't be evicted while it is there). It also fixes the answer: the same keys get the same one,
until a retrieve failed, from where on the hit is cut.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvstore.core.keys import KEY_BYTES
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy

EngineKey = tuple[str, str]
"""(tenant, engine ID)."""


@dataclass(slots=True)
class Lease:
    """One request's lease: ``chunks`` of ``keys`` are promised by ``pins`` until ``deadline_s``.

    ``keys`` are those of the hit only. ``asked`` names the keys of the lookup: their number and the
    last one, which covers all before it.
    """

    asked: tuple[int, bytes]
    keys: bytes
    chunks: int
    pins: list[tuple[Tree, Copy]]
    deadline_s: float

    def holds(self) -> bool:
        """Whether everything that it promised is still there."""
        return all(copy.live and copy.space.alive and tree.rooted(copy) for tree, copy in self.pins)


@dataclass(slots=True)
class Leases:
    """All leases, one a request of an engine, in the order of their deadlines."""

    lease_s: float
    leases_max: int
    _leases: OrderedDict[tuple[EngineKey, str], Lease] = field(default_factory=OrderedDict)
    _requests: dict[EngineKey, dict[str, None]] = field(default_factory=dict)

    def renew(self, engine: EngineKey, request: str, keys: bytes, now: float) -> Lease | None:
        """The request's lease, prolonged, if it is for the same keys and still holds."""
        lease = self._leases.get((engine, request))
        if lease is None or lease.asked != asked(keys) or not lease.holds():
            return None
        lease.deadline_s = now + self.lease_s
        self._leases.move_to_end((engine, request))
        return lease

    def take(self, engine: EngineKey, request: str, lease: Lease) -> None:
        """Start a lease, which replaces the request's former one; beyond ``leases_max`` the one
        whose deadline is next ends early."""
        for tree, copy in lease.pins:
            tree.lease(copy)
        self.release(engine, request)
        self._leases[engine, request] = lease
        self._requests.setdefault(engine, {})[request] = None
        if len(self._leases) > self.leases_max:
            self.release(*next(iter(self._leases)))

    def cut(self, engine: EngineKey, request: str, key: bytes) -> None:
        """A retrieve of this key failed: the answer is cut before it."""
        lease = self._leases.get((engine, request))
        if lease is None:
            return
        place = lease.keys.find(key)
        while place >= 0 and place % KEY_BYTES:
            place = lease.keys.find(key, place + 1)
        if place >= 0:
            lease.chunks = min(lease.chunks, place // KEY_BYTES)

    def release(self, engine: EngineKey, request: str) -> None:
        """End a request's lease; nothing happens where there is none."""
        lease = self._leases.pop((engine, request), None)
        if lease is None:
            return
        requests = self._requests[engine]
        del requests[request]
        if not requests:
            del self._requests[engine]
        for tree, copy in lease.pins:
            tree.unlease(copy)

    def end_engine(self, engine: EngineKey) -> None:
        """End all leases of an engine."""
        for request in list(self._requests.get(engine, ())):
            self.release(engine, request)

    def expire(self, now: float, most: int) -> None:
        """End up to ``most`` leases whose deadline has passed."""
        for _ in range(most):
            first = next(iter(self._leases.items()), None)
            if first is None or first[1].deadline_s > now:
                return
            self.release(*first[0])

    def pins(self) -> dict[int, int]:
        """How many leases pin each copy, by the copy's id(); for checks."""
        counts: dict[int, int] = {}
        for lease in self._leases.values():
            for _, copy in lease.pins:
                counts[id(copy)] = counts.get(id(copy), 0) + 1
        return counts

    def __len__(self) -> int:
        return len(self._leases)


def asked(keys: bytes) -> tuple[int, bytes]:
    """What names a lookup's keys: a chain is known by its length and its last key."""
    return len(keys), keys[-KEY_BYTES:]
