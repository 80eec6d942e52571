"""Quotas, seen from outside the core: what each tenant's chunks occupy, slot by slot."""

from __future__ import annotations

from collections import Counter

from kvstore.core.messages import TierName
from kvstore.core.service import Service
from kvstore.core.slots import SlotState
from kvstore.core.tree import Tree
from tests.sim.errors import SimulationError

_KEPT = (SlotState.RESERVED, SlotState.READY)


class QuotaCheck:
    """No tenant holds more than its share of a tier. A scan may find more again (of a tier that was
    larger, or what was evicted and still lies there); from then on it gets no more."""

    def __init__(self) -> None:
        self._found: dict[str, int] | None = {}
        """Bytes of NVMe by tenant, as last seen since the start; None: not seen yet."""

    def restart(self) -> None:
        """The daemon died."""
        self._found = None

    def check(self, service: Service) -> None:
        """Raise SimulationError where a tenant has too much."""
        state = service._state
        for tree in state.directory.trees():
            used = _used(tree)
            allowed: dict[str, int] = {}
            if tree.tier is TierName.NVME:
                if tree.scanning:
                    continue
                allowed, self._found = self._found if self._found is not None else used, used
            total = tree.slabs.limits.slabs * tree.slabs.limits.slab_bytes
            for tenant, nbytes in used.items():
                share = state.limits.quotas.of(tenant)
                if share is not None and nbytes > max(share * total, allowed.get(tenant, 0)):
                    raise SimulationError(
                        f"{tenant} holds {nbytes} bytes of {tree.tier.value}, more than {share}"
                    )


def _used(tree: Tree) -> Counter[str]:
    """Bytes by tenant, counted slot by slot."""
    used: Counter[str] = Counter()
    for slab in tree.slabs.cuts():
        for slot in slab:
            if slot.owner is not None and slot.state in _KEPT:
                used[slot.owner.space.tenant] += slab.slot_bytes
    return used
