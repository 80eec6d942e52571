"""Lease: a request's claim on the hit that its lookup reported, until release or deadline.

A lease protects presence only, by pinning the deepest chunk of the hit in each tier (what lies
above can't be evicted while it is there). It also fixes the answer: the same keys get the same one,
until a retrieve failed, from where on the hit is cut.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvstore.core.answers import Found
from kvstore.core.keys import KEY_BYTES
from kvstore.core.spaces import Space
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy

EngineKey = tuple[str, str]
"""(tenant, engine ID)."""


LEASE_BYTES_MAX = 256 << 20
"""Keys kept by leases in all; beyond it the lease whose deadline is next ends early."""
STEP_LEASES = 128
"""Leases of a lost engine that one event ends."""


@dataclass(slots=True, eq=False)
class Lease:
    """One request's lease: ``chunks`` of ``keys`` are promised by ``pins`` until ``deadline_s``.

    ``keys`` are those of the hit only. ``asked`` names the keys of the lookup: their number and the
    last one, which covers all before it. An ``early`` one was taken while a scan went on: more may
    have been found since, so it doesn't fix the answer, until a retrieve has failed. ``found`` is
    what the remote tier had, where the hit needs that; nothing keeps it there.
    """

    asked: tuple[int, bytes]
    keys: bytes
    chunks: int
    pins: list[tuple[Tree, Copy]]
    deadline_s: float
    space: Space
    request: str = ""
    siblings: dict[str, Lease] = field(default_factory=dict)
    early: bool = False
    found: Found | None = None

    def holds(self) -> bool:
        """Whether everything that it promised is still there."""
        return self.space.alive and all(copy.live and tree.rooted(copy) for tree, copy in self.pins)

    def depth(self, key: bytes, guess: int = 0) -> int | None:
        """Where a key is among those of the hit, if it is. Quick with a right guess."""
        if self.keys[guess * KEY_BYTES : (guess + 1) * KEY_BYTES] == key:
            return guess
        place = self.keys.find(key)
        while place >= 0 and place % KEY_BYTES:
            place = self.keys.find(key, place + 1)
        return None if place < 0 else place // KEY_BYTES


class Leases:
    """All leases, one a request of an engine, in the order of their deadlines.

    Those of an engine that is lost answer nothing from then on; what they pin is let go in steps.
    """

    def __init__(self, lease_s: float, leases_max: int) -> None:
        self.lease_s = lease_s
        self.leases_max = leases_max
        self._engines: dict[EngineKey, dict[str, Lease]] = {}
        self._order: OrderedDict[Lease, None] = OrderedDict()
        self._lost: deque[dict[str, Lease]] = deque()
        self._key_bytes = 0

    def renew(self, engine: EngineKey, request: str, keys: bytes, now: float) -> Lease | None:
        """The request's lease, prolonged, if it is for the same keys and still holds."""
        lease = self._holding(engine, request, keys)
        if lease is None or lease.early:
            return None
        lease.deadline_s = now + self.lease_s
        self._order.move_to_end(lease)
        return lease

    def early_found(self, engine: EngineKey, request: str, keys: bytes) -> Found | None:
        """What the remote tier had for the request's early lease, if that is for the same keys and
        still holds: a scan finds more, and takes no promise back."""
        lease = self._holding(engine, request, keys)
        return lease.found if lease is not None and lease.early else None

    def of(self, engine: EngineKey, request: str) -> Lease | None:
        """The request's lease, if it has one."""
        leases = self._engines.get(engine)
        return None if leases is None else leases.get(request)

    def take(self, engine: EngineKey, request: str, lease: Lease) -> None:
        """Start a lease, which replaces the request's former one; beyond the limits those whose
        deadline is next end early."""
        for tree, copy in lease.pins:
            tree.lease(copy)
        self.release(engine, request)
        lease.request = request
        lease.siblings = self._engines.setdefault(engine, {})
        lease.siblings[request] = lease
        self._order[lease] = None
        self._key_bytes += len(lease.keys)
        while len(self._order) > self.leases_max or self._key_bytes > LEASE_BYTES_MAX:
            self._end(next(iter(self._order)))

    def cut(self, engine: EngineKey, request: str, key: bytes) -> None:
        """A retrieve of this key failed: the answer is cut before it."""
        lease = self.of(engine, request)
        if lease is None:
            return
        depth = lease.depth(key)
        if depth is not None:
            lease.early = False
            lease.chunks = min(lease.chunks, depth)

    def release(self, engine: EngineKey, request: str) -> None:
        """End a request's lease; nothing happens where there is none."""
        lease = self.of(engine, request)
        if lease is not None:
            self._end(lease)
            if not lease.siblings:
                del self._engines[engine]

    def end_engine(self, engine: EngineKey) -> None:
        """End all leases of an engine."""
        leases = self._engines.pop(engine, None)
        if leases:
            self._lost.append(leases)
            self.step()

    def running(self) -> bool:
        """Whether leases of lost engines are left to end, at the next Tick."""
        return bool(self._lost)

    def step(self) -> None:
        """End some leases of lost engines."""
        left = STEP_LEASES
        while self._lost and left:
            leases = self._lost[0]
            if leases:
                self._end(next(reversed(leases.values())))
                left -= 1
            else:
                self._lost.popleft()

    def expire(self, now: float, most: int) -> None:
        """End up to ``most`` leases whose deadline has passed."""
        for _ in range(most):
            lease = next(iter(self._order), None)
            if lease is None or lease.deadline_s > now:
                return
            self._end(lease)

    def pins(self) -> dict[int, int]:
        """How many leases pin each copy, by the copy's id(); for checks."""
        counts: dict[int, int] = {}
        for lease in self._order:
            for _, copy in lease.pins:
                counts[id(copy)] = counts.get(id(copy), 0) + 1
        return counts

    def __len__(self) -> int:
        return len(self._order)

    def _holding(self, engine: EngineKey, request: str, keys: bytes) -> Lease | None:
        """The request's lease, if it is for the same keys and still holds."""
        lease = self.of(engine, request)
        same = lease is not None and lease.asked == asked(keys) and lease.holds()
        return lease if same else None

    def _end(self, lease: Lease) -> None:
        del self._order[lease]
        del lease.siblings[lease.request]
        self._key_bytes -= len(lease.keys)
        for tree, copy in lease.pins:
            tree.unlease(copy)


def asked(keys: bytes) -> tuple[int, bytes]:
    """What names a lookup's keys: a chain is known by its length and its last key."""
    return len(keys), keys[-KEY_BYTES:]
